"""Outlets: all that a replica's streams release to one gateway leaves as one message a step, whatever the number of streams.

Owns the parcels that wait and the tasks that fill them. A remote stream of its own for every request costs both processes half
a millisecond a token; one for all costs that once a step. Invariants: items of one request keep their order; a request ends with
exactly one last item, or with its gateway: when nobody takes an outlet's parcels any more, the requests behind it are ended.
One event loop owns all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from .messages import Failed, StreamItem


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """Items of one request, in order."""

    request_id: str
    items: tuple[StreamItem, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Parcel, ...])


def decode_parcels(message: bytes) -> tuple[Parcel, ...]:
    """What ``Outlets.parcels`` yields, taken apart. Raises: ``msgspec.ValidationError``."""
    return _decoder.decode(message)


class Outlets:
    """One outlet a gateway, by a name that the gateway chose."""

    def __init__(self) -> None:
        self._open: dict[str, _Outlet] = {}

    def forward(self, name: str, request_id: str, stream: AsyncIterator[list[StreamItem]]) -> None:
        """Send a request's stream through the outlet of that name; its parcels may be asked for before or after."""
        self._outlet(name).forward(request_id, stream)

    async def parcels(self, name: str) -> AsyncIterator[bytes]:
        """All parcels there are, message by message, until the outlets close. Ended early, it ends its requests."""
        outlet = self._outlet(name)
        try:
            while parcels := await outlet.take():
                yield _encoder.encode(parcels)
        finally:
            outlet.cancel()
            if self._open.get(name) is outlet:
                del self._open[name]

    def close(self) -> None:
        """Let every outlet end with its requests: the replica is stopping and admits none."""
        for outlet in self._open.values():
            outlet.close()

    def _outlet(self, name: str) -> _Outlet:
        return self._open.setdefault(name, _Outlet())


class _Outlet:
    def __init__(self) -> None:
        self._parcels: list[Parcel] = []
        self._filled = asyncio.Event()
        # The event loop keeps weak references to tasks only.
        self._forwarding: set[asyncio.Task[None]] = set()
        self._closed = False

    def forward(self, request_id: str, stream: AsyncIterator[list[StreamItem]]) -> None:
        task = asyncio.ensure_future(self._forward(request_id, stream))
        self._forwarding.add(task)
        task.add_done_callback(self._forwarded)

    async def take(self) -> list[Parcel]:
        """What waits, at least one parcel; nothing once the outlet is closed and its requests have ended."""
        while not self._parcels and (self._forwarding or not self._closed):
            self._filled.clear()
            await self._filled.wait()
        taken, self._parcels = self._parcels, []
        return taken

    def close(self) -> None:
        self._closed = True
        self._filled.set()

    def cancel(self) -> None:
        for task in self._forwarding:
            task.cancel()

    def _forwarded(self, task: asyncio.Task[None]) -> None:
        self._forwarding.discard(task)
        self._filled.set()

    async def _forward(self, request_id: str, stream: AsyncIterator[list[StreamItem]]) -> None:
        try:
            async for items in stream:
                self._put(Parcel(request_id, tuple(items)))
        except Exception as error:  # noqa: BLE001 - the task's last frame: whoever waits for the request is told
            self._put(Parcel(request_id, (Failed("replica_stopped", type(error).__name__),)))

    def _put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._filled.set()
