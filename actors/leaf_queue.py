"""The leaves that may be evicted, in a policy's order: lazy heaps, corrected where they are read.

Owns one entry for every node that may be an exposed leaf. An entry may be out of date (its node gone, leased, no leaf, or
used since); that is found when it comes up, so nothing is rebuilt: O(log n) a victim beside the number of lanes. Invariant:
every exposed leaf has a live entry, provided that ``push`` was called when its node became exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from .policies import Policy, Worth

N = TypeVar("N", bound=Hashable)


class _Lane(Generic[N]):
    """One lane's entries (key, serial, node) by rising key, and by falling key where both ends are read."""

    __slots__ = ("high", "low")

    def __init__(self) -> None:
        self.low: list[tuple[float, int, N]] = []
        self.high: list[tuple[float, int, N]] = []


class Lowest(NamedTuple, Generic[N]):
    """The least worth exposed leaf."""

    worth: Worth
    node: N
    unit: int


class LeafQueue(Generic[N]):
    """``exposed`` gives the unit by which a node is judged, ``None`` where it may not be evicted now."""

    def __init__(self, policy: Policy, exposed: Callable[[N], int | None]) -> None:
        self._policy = policy
        self._exposed = exposed
        self._lanes: dict[int, _Lane[N]] = {}
        self._live: dict[N, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        """Live entries, those out of date included."""
        return len(self._live)

    def __iter__(self) -> Iterator[N]:
        return iter(self._live)

    def push(self, node: N) -> None:
        """The node may be an exposed leaf now; calling it again does no harm."""
        unit = self._exposed(node)
        if unit is None:
            return
        self._enter(node, unit)

    def restore(self, node: N, unit: int) -> None:
        """Queue a node again that was taken, whether or not it is exposed now."""
        self._enter(node, unit)

    def take(self, node: N) -> None:
        """The node is no candidate any more, until it is pushed again."""
        self._live.pop(node, None)

    def lowest(self) -> Lowest[N] | None:
        """The exposed leaf that is worth least; it stays queued. Ties go to the one queued first."""
        while True:
            corrections = self._serial
            best = self._least()
            if self._serial == corrections:
                return best

    def _least(self) -> Lowest[N] | None:
        """One pass over the lanes; a correction may have put something where the pass had been."""
        best: tuple[Worth, int, N, int] | None = None
        for number in list(self._lanes):
            lane = self._lanes[number]
            heaps = (lane.low, lane.high) if self._policy.both_ends else (lane.low,)
            for sign, heap in zip((1.0, -1.0), heaps, strict=False):
                top = self._settle(number, sign, heap)
                if top is None:
                    continue
                key, serial, node, unit = top
                worth = self._policy.worth(number, key)
                if best is None or (worth, serial) < best[:2]:
                    best = (worth, serial, node, unit)
            if not lane.low:
                del self._lanes[number]
        return None if best is None else Lowest(best[0], best[2], best[3])

    def _settle(
        self, number: int, sign: float, heap: list[tuple[float, int, N]]
    ) -> tuple[float, int, N, int] | None:
        """Drop or correct what is out of date on top of one heap."""
        while heap:
            signed_key, serial, node = heap[0]
            if self._live.get(node) != serial:
                heappop(heap)
                continue
            unit = self._exposed(node)
            if unit is None:
                heappop(heap)
                del self._live[node]
                continue
            key = sign * signed_key
            if self._policy.key(unit) == key and self._policy.lane(unit) == number:
                return key, serial, node, unit
            heappop(heap)
            self._enter(node, unit)
        return None

    def _enter(self, node: N, unit: int) -> None:
        number, key = self._policy.lane(unit), self._policy.key(unit)
        self._serial += 1
        self._live[node] = self._serial
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = _Lane()
        heappush(lane.low, (key, self._serial, node))
        if self._policy.both_ends:
            heappush(lane.high, (-key, self._serial, node))
        if len(lane.low) + len(lane.high) > 4 * len(self._live) + 256:
            self._compact(lane)

    def _compact(self, lane: _Lane[N]) -> None:
        for heap in (lane.low, lane.high):
            heap[:] = [entry for entry in heap if self._live.get(entry[2]) == entry[1]]
            heapify(heap)
