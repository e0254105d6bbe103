"""Eviction policies: what a cached unit is worth, asked before anything is evicted.

Owns the worth of units, nothing else: which units may go is the ledger's to say, and every ledger checks the decision again
(K045, K122). A unit is a block of a pool or an entry of the cache lab. A policy sorts units into lanes and orders each lane
by a key that only uses change; ``worth`` compares the ends of lanes. The lowest worth goes first, under pressure only (K194),
and is asked again at every choice: nothing is fixed at insertion (K198).

What counts as use is the pool's rule (K197, ``RecencyRule``): a policy is told the units that were used and asks for no
others. Time is counted in uses, not in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

import numpy as np

Units = Sequence[int] | np.ndarray
"""Units of one path, root side first."""

Worth = tuple[float, ...]

RecencyRule = Literal["path", "edge"]
"""What a lookup and a request use: every block of their path, the root's included, or those of its last edge."""

RECENCY_RULES: tuple[str, ...] = get_args(RecencyRule)

TICKS = 1 << 32
"""Most ticks of one policy; uses times this, plus a tick, is exact in a float up to two million uses."""


class Policy(Protocol):
    """One member of the family; ``both_ends``: the least worth of a lane may be at either end of its order."""

    both_ends: bool

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        """New in the index: pages ``first_page``, ... of one path; ``prints`` identify what each prefix holds."""
        ...

    def touched(self, units: Units) -> None:
        """An authorized lookup hit these units, perhaps none."""
        ...

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        """A request that used these units ends now: recent, but no new use. ``reply_tokens`` 0: not known."""
        ...

    def freed(self, unit: int) -> None:
        """The unit was evicted."""
        ...

    def lane(self, unit: int) -> int:
        """The lane a unit is in; changes with uses only."""
        ...

    def key(self, unit: int) -> float:
        """The unit's place in its lane; changes with uses only."""
        ...

    def worth(self, lane: int, key: float) -> Worth:
        """What a unit of a lane is worth now; lowest goes first."""
        ...

    def newcomer(self, first_page: int) -> Worth:
        """The worth of a unit published now: admission uses the same test as eviction (K196)."""
        ...


def ignore_freed(policy: Policy, unit: int) -> None:
    """``freed`` of a policy that keeps nothing of what was evicted: it need not be called."""
    return


class Recency:
    """One lane in order of the last use, in ticks; the base of the simple members."""

    both_ends = False

    def __init__(self, num_units: int, capacity: int) -> None:
        self._tick = 0
        self._last_use = np.zeros(num_units, dtype=np.int64)

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._mark(units)

    def touched(self, units: Units) -> None:
        self._mark(units)

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        self._mark(units)

    freed = ignore_freed

    def lane(self, unit: int) -> int:
        return 0

    def key(self, unit: int) -> float:
        return float(self._last_use[unit])

    def worth(self, lane: int, key: float) -> Worth:
        return (key,)

    def newcomer(self, first_page: int) -> Worth:
        return (float("inf"),)

    def _mark(self, units: Units) -> None:
        self._tick += 1
        self._last_use[units] = self._tick


class Lru(Recency):
    """Least recently used first."""


class Mru(Recency):
    """Most recently used first: for the lab, where it is right for cycles longer than the cache."""

    def key(self, unit: int) -> float:
        return -float(self._last_use[unit])


class Fifo(Recency):
    """First published, first evicted; uses change nothing."""

    def touched(self, units: Units) -> None:
        return

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        return


class Filo(Fifo):
    """Last published, first evicted: for the lab."""

    def key(self, unit: int) -> float:
        return -float(self._last_use[unit])


class Lfu(Recency):
    """Fewest uses since publication first, among equals the least recently used; it never forgets (K195)."""

    def __init__(self, num_units: int, capacity: int) -> None:
        super().__init__(num_units, capacity)
        self._uses = np.zeros(num_units, dtype=np.int64)

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._mark(units)
        self._uses[units] = 0

    def touched(self, units: Units) -> None:
        self._mark(units)
        self._uses[units] += 1

    def key(self, unit: int) -> float:
        return float(int(self._uses[unit]) * TICKS + int(self._last_use[unit]))

    def newcomer(self, first_page: int) -> Worth:
        return (float(self._tick + 1),)


class SegmentedLru(Recency):
    """Units hit since publication are protected, up to four fifths of the capacity; the oldest of them fall back.

    A fallen unit stands among the unprotected by its last use, so falling changes no order: only a bar rises.
    """

    PROTECTED = 0.8

    def __init__(self, num_units: int, capacity: int) -> None:
        super().__init__(num_units, capacity)
        self._limit = max(1, int(capacity * self.PROTECTED))
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._hit = np.zeros(num_units, dtype=np.bool_)
        self._bar = 0

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        for unit in units:
            self._protected.pop(int(unit), None)
        self._mark(units)
        self._hit[units] = False

    def touched(self, units: Units) -> None:
        self._mark(units)
        self._hit[units] = True
        for unit in reversed(units):
            self._protected[int(unit)] = None
            self._protected.move_to_end(int(unit))
        while len(self._protected) > self._limit:
            unit, _ = self._protected.popitem(last=False)
            self._bar = max(self._bar, int(self._last_use[unit]))

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        self._mark(units)

    def freed(self, unit: int) -> None:
        self._protected.pop(unit, None)

    def lane(self, unit: int) -> int:
        return int(self._hit[unit])

    def worth(self, lane: int, key: float) -> Worth:
        return (float(lane == 1 and key > self._bar), key)

    def newcomer(self, first_page: int) -> Worth:
        return (0.0, float(self._tick + 1))
