"""All generations of this gateway on one replica incarnation, over one remote stream that is taken apart here.

Owns the stream, its reader and one queue a request. Invariant: every request that was started gets its items in order and one
last item, if need be one that says the replica is gone; items of a request that has had its last one are dropped.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec
from ray.exceptions import RayError

from copyhold.actors.messages import Failed, Finished, GenerateRequest, StreamItem
from copyhold.actors.outlet import decode_parcels

Items = asyncio.Queue[StreamItem]


class Subscription:
    """One outlet of a replica actor; made and used on one event loop."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self._name = secrets.token_hex(8)
        self._waiting: dict[str, Items] = {}
        self._end: Failed | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._stream = replica.parcels.options(num_returns="streaming").remote(self._name)
        self._reader = asyncio.ensure_future(self._read())

    @property
    def over(self) -> bool:
        """Whether the replica's stream has ended: a new subscription is needed then."""
        return self._end is not None

    def start(self, request: GenerateRequest) -> Items:
        """Have the replica generate; what it sends arrives in the queue, ``Finished`` or ``Failed`` last."""
        items: Items = asyncio.Queue()
        if self._end is not None:
            items.put_nowait(self._end)
            return items
        self._waiting[request.request_id] = items
        answer = self._replica.open.remote(request, self._name)
        starting = asyncio.ensure_future(self._started(answer, request.request_id, items))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        return items

    async def _started(self, answer: Any, request_id: str, items: Items) -> None:
        try:
            await answer
        except RayError as error:
            if self._waiting.get(request_id) is items:
                del self._waiting[request_id]
                items.put_nowait(_gone(error))

    async def _read(self) -> None:
        try:
            async for reference in self._stream:
                for parcel in decode_parcels(await reference):
                    self._hand_out(parcel.request_id, parcel.items)
            self._end = Failed("replica_stopped", "the replica's stream ended")
        except (RayError, msgspec.ValidationError) as error:
            self._end = _gone(error)
        finally:
            end = self._end = self._end or Failed("replica_stopped", "the gateway is stopping")
            waiting, self._waiting = self._waiting, {}
            for items in waiting.values():
                items.put_nowait(end)

    def _hand_out(self, request_id: str, parcel: tuple[StreamItem, ...]) -> None:
        items = self._waiting.get(request_id)
        if items is None:
            return
        for item in parcel:
            items.put_nowait(item)
        if isinstance(parcel[-1], Finished | Failed):
            del self._waiting[request_id]


def _gone(error: Exception) -> Failed:
    return Failed("replica_stopped", f"the replica is gone ({type(error).__name__})")
