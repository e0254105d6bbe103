"""Eviction policies: what a cached unit is worth, asked before anything is evicted.

Owns the worth of units, nothing else: which units may go is the ledger's to say, and every ledger checks the decision again
(K045, K122). A unit is a block of a pool or an entry of the cache lab. A policy sorts units into lanes and orders each lane
by a key that only uses change; ``worth`` compares the ends of lanes. The lowest worth goes first, under pressure only (K194),
and is asked again at every choice: nothing is fixed at insertion (K198).

What counts as use (K197) is declared: every unit on the path of an authorized lookup is used, root included; with the rule
``edge`` only those of its last edge are. Time is counted in uses, not in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

Units = Sequence[int] | np.ndarray
"""Units of one path, root side first."""

Worth = tuple[float, ...]

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

    def held(self, units: Units) -> None:
        """A request that used these units ends now: recent, but no new use."""
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
