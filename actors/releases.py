"""What the engine's thread released, handed to the replica's event loop once a step instead of once an item.

Owns the items in between. Every hand-over wakes the loop's thread, which then competes with the engine's for the interpreter
while the ranks wait for their next plan. Invariant: each queue gets its items in the order in which they were released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .messages import StreamItem

Items = asyncio.Queue[StreamItem]


class Releases:
    """Filled and flushed on one thread, emptied on the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: list[tuple[Items, StreamItem]] = []

    def sink(self, queue: Items) -> Callable[[StreamItem], None]:
        """What puts an item into a queue of the loop; it arrives with the next flush."""

        def put(item: StreamItem) -> None:
            self._held.append((queue, item))

        return put

    def flush(self) -> None:
        """Hand over what was put since the last time."""
        if self._held:
            held, self._held = self._held, []
            self._loop.call_soon_threadsafe(_hand_over, held)


def _hand_over(held: list[tuple[Items, StreamItem]]) -> None:
    for queue, item in held:
        queue.put_nowait(item)
