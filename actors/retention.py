"""How long and how firmly a request's prefix is kept: no_store, ttl_s, priority, within what its namespace may ask.

Owns the limits and the clock of lifetimes, which is outside the ledger: what has outlived its time is named by handle in an
Evict command. Invariants: a prefix used by several requests lives as long as the longest of them asked; blocks kept with a
priority above 0 never exceed the namespace's pin budget; priority orders blocks before any policy does.
"""

from __future__ import annotations

from heapq import heappop, heappush

import msgspec
import numpy as np

from copyhold.kvcore.commands import NodeHandle

from .errors import InvalidRequest
from .policies import Policy, Units, Worth, ignore_freed

_LANES_PER_PRIORITY = 1 << 40
_AGAIN_S = 1.0
"""A lifetime that is over while the edge is in use, or has descendants, is looked at again so much later."""


class Retention(msgspec.Struct, frozen=True):
    """What one request asks; ``ttl_s`` None: until evicted. ``no_store``: reuse, publish nothing."""

    priority: int = 0
    ttl_s: float | None = None
    no_store: bool = False


DEFAULT_RETENTION = Retention()


class RetentionLimits(msgspec.Struct, frozen=True):
    """What any namespace may ask; ``pin_blocks``: blocks of one namespace kept with a priority above 0."""

    max_priority: int = 3
    max_ttl_s: float = 86400.0
    pin_blocks: int = 64

    def check(self, asked: Retention, prompt_blocks: int, pinned_blocks: int) -> None:
        """Raises: ``InvalidRequest`` that names the field above its quota; nothing changed."""
        if not 0 <= asked.priority <= self.max_priority:
            raise InvalidRequest(
                f"cache_priority is {asked.priority}; this namespace may ask for 0 to {self.max_priority}",
                "cache_priority",
            )
        if asked.ttl_s is not None and not 0 < asked.ttl_s <= self.max_ttl_s:
            raise InvalidRequest(
                f"cache_ttl_s is {asked.ttl_s:g}; this namespace may ask for up to {self.max_ttl_s:g} seconds",
                "cache_ttl_s",
            )
        if asked.priority and not asked.no_store and pinned_blocks + prompt_blocks > self.pin_blocks:
            raise InvalidRequest(
                f"cache_priority above 0 would keep {prompt_blocks} blocks; {pinned_blocks} of this namespace's "
                f"{self.pin_blocks} are kept already",
                "cache_priority",
            )


class Prioritized:
    """A policy below priorities: blocks of a lower priority go first, whatever they are worth."""

    def __init__(self, policy: Policy, priority: np.ndarray) -> None:
        self._policy = policy
        self._priority = priority
        self.both_ends = policy.both_ends
        self.ignores_freed = type(policy).freed is ignore_freed

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._policy.published(units, first_page, prints)

    def touched(self, units: Units) -> None:
        self._policy.touched(units)

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        self._policy.held(units, reply_tokens)

    def freed(self, unit: int) -> None:
        self._policy.freed(unit)

    def lane(self, unit: int) -> int:
        priority, lane = self._priority.item(unit), self._policy.lane(unit)
        return priority * _LANES_PER_PRIORITY + lane if priority else lane

    def key(self, unit: int) -> float:
        return self._policy.key(unit)

    def worth(self, lane: int, key: float) -> Worth:
        if lane < _LANES_PER_PRIORITY:
            return (0.0, *self._policy.worth(lane, key))
        priority, inner = divmod(lane, _LANES_PER_PRIORITY)
        return (float(priority), *self._policy.worth(inner, key))

    def newcomer(self, first_page: int) -> Worth:
        return (0.0, *self._policy.newcomer(first_page))


class Lifetimes:
    """When each block's time is over (monotonic seconds), and which edges are due."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._until_s: np.ndarray = np.full(1, np.inf)
        self._due: list[tuple[float, int, NodeHandle]] = []
        self._serial = 0
        self._any_end = False

    def start(self, blocks: np.ndarray, until_s: float) -> None:
        """Blocks that were just published live until then; ``inf``: until evicted."""
        if until_s < np.inf and not self._any_end:
            self._any_end, self._until_s = True, np.full(self._num_blocks, np.inf)
        if self._any_end:
            self._until_s[blocks] = until_s

    def extend(self, blocks: np.ndarray, until_s: float) -> None:
        """Another request uses the blocks: they live as long as the longest asked."""
        if self._any_end:
            self._until_s[blocks] = np.maximum(self._until_s[blocks], until_s)

    def watch(self, node: NodeHandle, until_s: float) -> None:
        """Look at an edge when its time is over."""
        if until_s < np.inf:
            self._serial += 1
            heappush(self._due, (until_s, self._serial, node))

    def over(self, block: int, now_s: float) -> bool:
        """Whether the block's time is over."""
        return self._any_end and bool(self._until_s[block] <= now_s)

    def until_s(self, block: int) -> float:
        """When the block's time is over."""
        return float(self._until_s[block]) if self._any_end else float("inf")

    def take_due(self, now_s: float) -> list[NodeHandle]:
        """Edges whose time may be over; each is returned once, ``watch_again`` keeps it."""
        due: list[NodeHandle] = []
        while self._due and self._due[0][0] <= now_s:
            due.append(heappop(self._due)[2])
        return due

    def watch_again(self, node: NodeHandle, now_s: float, until_s: float) -> None:
        """The edge cannot go yet, or lives longer than was thought."""
        self.watch(node, max(until_s, now_s + _AGAIN_S))
