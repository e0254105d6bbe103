"""The leaves that may be evicted, in a policy's order: lazy heaps, corrected where they are read.

Owns one entry for every node that may be an exposed leaf. An entry may be out of date (its node gone, leased, no leaf, or
used since); that is found when it comes up, so nothing is rebuilt: O(log n) a victim beside the number of lanes. Invariant:
every exposed leaf has a live entry, provided that ``push`` was called when its node became exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
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


class _Top(NamedTuple, Generic[N]):
    """The settled top of one end of a lane."""

    entry: tuple[float, int, N]
    worth: Worth
    unit: int


class Tops(Generic[N]):
    """The settled tops of all lanes as a heap of (worth, serial, lane, sign of its keys, top), for one choice."""

    __slots__ = ("heads", "serial")

    def __init__(self) -> None:
        self.heads: list[tuple[Worth, int, int, float, _Top[N]]] = []
        self.serial = -1


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

    def lowest(self, tops: Tops[N] | None = None) -> Lowest[N] | None:
        """The exposed leaf that is worth least; it stays queued. Ties go to the one queued first.

        A caller that takes many in a row hands in one ``tops`` for all of them, so that only what has moved is looked at
        again; between two calls with the same ``tops`` nothing may be used or published.
        """
        known: Tops[N] = Tops() if tops is None else tops
        heads, live = known.heads, self._live
        while True:
            if known.serial != self._serial:
                self._settle_all(known)
            if not heads:
                return None
            worth, serial, number, sign, top = heads[0]
            node = top.entry[2]
            if live.get(node) == serial:
                return Lowest(worth, node, top.unit)
            lane = self._lanes[number]
            again = self._settle(number, sign, lane.low if sign > 0 else lane.high)
            if again is None:
                heappop(heads)
            else:
                heapreplace(heads, (again.worth, again.entry[1], number, sign, again))

    def _settle_all(self, tops: Tops[N]) -> None:
        """Looks at every end of every lane; again where a correction may have put something where it had been."""
        heads = tops.heads
        while tops.serial != self._serial:
            tops.serial = self._serial
            heads.clear()
            for number in tuple(self._lanes):
                lane = self._lanes[number]
                for sign, heap in ((1.0, lane.low), (-1.0, lane.high)):
                    top = self._settle(number, sign, heap) if heap else None
                    if top is not None:
                        heads.append((top.worth, top.entry[1], number, sign, top))
                if not lane.low:
                    del self._lanes[number]
        heapify(heads)

    def _settle(self, number: int, sign: float, heap: list[tuple[float, int, N]]) -> _Top[N] | None:
        """Drop or correct what is out of date on top of one heap."""
        live, policy = self._live, self._policy
        while heap:
            entry = heap[0]
            signed_key, serial, node = entry
            if live.get(node) != serial:
                heappop(heap)
                continue
            unit = self._exposed(node)
            if unit is None:
                heappop(heap)
                del live[node]
                continue
            key = sign * signed_key
            if policy.key(unit) == key and policy.lane(unit) == number:
                return _Top(entry, policy.worth(number, key), unit)
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
