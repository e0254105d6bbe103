"""Cost-aware eviction: prefill time that a unit is expected to save, per block and unit of time (K194).

Owns what is known of units. When a request ends, each of its blocks gets a level from what is known then: how often it was
used, how long ago the last time, how much the request added to what it reused, how long its path and its reply are, whether the
block is the path's last. A unit's worth is the best rate of returns it can reach if it is kept for some further while, times the
prefill cost of its page: so a unit that has just been used is worth little where nobody returns at once, one whose time to
return has come is worth most, and one that has outlived it is worth nothing. Identities evicted not long ago are remembered by
their prefix fingerprints, so that what is evicted too early is learnt too. Nothing here is a wall clock: time is blocks asked.
"""

from __future__ import annotations

import numpy as np

from . import return_loops as loops
from .policies import Units, Worth, ignore_freed
from .return_model import BANDS, ReturnModel, bands_of

_REMEMBERED_LEAST = 1 << 16
"""Identities remembered by a small cache: returns take as long as in a big one."""
_DEPTHS = 4
"""Depths by cost: a page of depth d costs (1 + d) times the first."""


def savings_rate(probability: float, tokens: int, ms_per_token: float, num_bytes: int) -> float:
    """Expected prefill milliseconds saved per byte and unit of time (K194)."""
    return probability * tokens * ms_per_token / num_bytes


def warm_up() -> None:
    """Compile the policy's loops, or load them from the package's cache: seconds once, then some tenths."""
    policy = CostAware(4, 4)
    for _ in range(2):
        policy.published([0, 1], 0, [11, 12])
        policy.held(np.arange(2), 1)


class CostAware:
    """Keeps what is expected to save most prefill time per block held. O(1) a use, O(levels) a choice."""

    both_ends = True

    def __init__(
        self,
        num_units: int,
        capacity: int,
        *,
        attention_pages: int = 0,
        remembered: int = 8,
        learn_per_capacity: int = 4,
    ) -> None:
        """``attention_pages``: depth at which attention costs as much as the rest of a page; 0: all pages cost alike."""
        self.attention_pages = attention_pages
        self._tick = 1
        self._cells = np.zeros((num_units, 4), dtype=np.int64)
        size = 1 << (max(remembered * capacity, _REMEMBERED_LEAST) - 1).bit_length()
        self._identities = np.zeros((size, 4), dtype=np.int64)
        self._identities[:, loops.RUN] = -1
        first_band = int(bands_of(np.array([min(256, max(2, capacity // 4))]))[0])
        self._returns = ReturnModel(_BAND_ODDS, _TRAIT_ODDS, len(_TABLES), first_band)
        self._learn_every = max(64, capacity // learn_per_capacity)
        self._learn_at = self._learn_every
        self._fresh = [self._level_of_newcomer(0), self._level_of_newcomer(1)]

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        count = len(units)
        if count == 0:
            return
        self._tick += count
        fresh = np.empty((count, 4), dtype=np.int64)
        fresh[:, loops.PRINT] = np.asarray(prints, dtype=np.uint64).view(np.int64)
        fresh[:, loops.LAST] = self._tick
        fresh[:, loops.LEVEL] = round(self._fresh[first_page > 1])
        fresh[:, loops.DEPTH] = self._depths(np.arange(first_page, first_page + count))
        self._cells[units] = fresh

    def touched(self, units: Units) -> None:
        if len(units):
            self._tick += len(units)
            self._cells[units, loops.LAST] = self._tick
        if self._tick >= self._learn_at:
            self._learn_at = self._tick + self._learn_every
            self._returns.learn(float(self._tick))

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        if len(units) == 0:
            return
        chosen, cells, identities = np.asarray(units, dtype=np.int64), self._cells, self._identities
        blocks, known, traits, ends, had_runs = loops.read_path(chosen, cells, identities, reply_tokens)
        if len(had_runs):
            self._returns.came_back(blocks[had_runs, 2], blocks[had_runs, 3])
        levels = self._returns.level(traits)
        serials = self._returns.follow(traits, float(self._tick))
        loops.write_path(chosen, cells, identities, blocks, ends, levels, serials, self._tick)
        if not known[-1]:
            again = int(np.count_nonzero(known) > 1)
            self._fresh[again] += 0.05 * (
                cells.item(chosen[len(chosen) - 2], loops.LEVEL) - self._fresh[again]
            )

    freed = ignore_freed

    def lane(self, unit: int) -> int:
        return self._cells.item(unit, loops.LEVEL) * _DEPTHS + self._cells.item(unit, loops.DEPTH)

    def key(self, unit: int) -> float:
        return float(self._cells.item(unit, loops.LAST))

    def worth(self, lane: int, key: float) -> Worth:
        rate = self._returns.rate(lane // _DEPTHS, self._tick - key)
        return (rate * (1 + lane % _DEPTHS), key)

    def newcomer(self, first_page: int) -> Worth:
        depth = int(self._depths(np.array([first_page]))[0])
        return (self._returns.rate(round(self._fresh[first_page > 1]), 0.0) * (1 + depth), float(self._tick))

    def _depths(self, pages: np.ndarray) -> np.ndarray:
        if self.attention_pages == 0:
            return np.zeros(len(pages), dtype=np.int64)
        return np.minimum(pages // self.attention_pages, _DEPTHS - 1)

    def _level_of_newcomer(self, again: int) -> float:
        known = np.array([bool(again)] * 4 + [False] * 4)
        traits = loops.path_traits(np.where(known, 2, 1), np.where(known, 4096, 0), known, 0)
        return float(self._returns.level(traits[-2:-1])[0])


_TABLES: tuple[tuple[float, ...], ...] = (
    # Used once, twice, 3, 4, 5 to 6, 7 to 10, 11 to 32 times, more: every further turn makes the next one likelier.
    (-1.6, -1.4, -1.15, -0.95, -0.85, -0.55, 0.2, 6.5),
    # Blocks asked since the use before: none before, under 512, and octaves from there. What came back sooner comes sooner.
    (-1.6, 2.6, -0.9, -0.95, -1.3, -1.5, -1.55, -1.55, -1.8),
    # Added to nothing that was reused, 1 block, 2 to 3, ...; then the same for what continued: short turns are conversations.
    (0.1, 0.2, 0.15, 0.1, -0.1, 0.0, -0.1, -0.25, 0.45, 0.5, -0.1, -0.9, -0.6, -0.5, -0.8, -0.8),
    # Length of the path in blocks: of one that opened; then of one that continued.
    (0.0, 0.35, 0.2, 0.15, 0.0, -0.1, -0.1, -0.2, 0.0, -0.35, 0.0, -0.05, 0.25, 0.2, -0.15, -0.15),
    # Not the last block of its path; the last, which a longer prompt replaces.
    (1.9, -2.0),
    # Tokens of the reply: unknown, 1, 2 to 3, ...: no answer, no next question.
    (0.2, 1.1, -0.5, -0.15, 0.2, 0.15, 0.6, 0.3, 0.3, 0.2, 0.3, 0.4),
)
assert tuple(map(len, _TABLES)) == loops.TRAIT_VALUES
_TRAIT_ODDS = np.concatenate([np.array(one) for one in _TABLES])
_BAND_ODDS = np.interp(
    np.arange(BANDS),
    [0, 15, 19, 22, 25, 26, 28, 31, 33, BANDS - 1],
    [-9.5, -6.5, -6.5, -4.4, -2.2, -1.85, -1.95, -2.6, -3.6, -4.5],
)
"""Nobody is back before an answer was read; most who return do so within four octaves after that."""
