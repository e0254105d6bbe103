"""Cost-aware eviction: prefill time that a unit is expected to save, per block and unit of time (K194).

Owns what was learnt of returns. Uses are sorted into classes (how often used, opened or continued a conversation, last page
of its path); of each class it learns at what age units come back. A unit's worth is the best rate it can reach if it is kept
for some further while: expected returns, divided by the expected time held, times the prefill cost of its page. So a unit
that has just been used is worth little where nobody returns at once, one whose time to return has come is worth most, and one
that has outlived it is worth nothing. Statistics fade (K195). Identities evicted not long ago are remembered by their prefix
fingerprints, so that what is evicted too early is learnt too. Nothing here is a wall clock: time is blocks published.
"""

from __future__ import annotations

import numpy as np

from .policies import Units, Worth, ignore_freed

_OPENING, _CONTINUED = 0, 1
_USES = (2, 3, 4, 6, 10, 32)
"""Classes of a unit that was used again: at most so many uses, publication included, the last one open."""
_REMEMBERED_LEAST = 1 << 16
"""Identities remembered by a small cache: returns take as long as in a big one."""
_CLASSES = 2 + len(_USES) + 1
_BANDS = 4
"""Depth bands by cost: a page in band b costs (1 + b) times the first."""


def savings_rate(probability: float, tokens: int, ms_per_token: float, num_bytes: int) -> float:
    """Expected prefill milliseconds saved per byte and unit of time (K194)."""
    return probability * tokens * ms_per_token / num_bytes


class CostAware:
    """Keeps what is expected to save most prefill time per block held. O(1) a use, O(classes) a choice."""

    both_ends = True

    def __init__(
        self,
        num_units: int,
        capacity: int,
        *,
        attention_pages: int = 0,
        remembered: int = 8,
        fade_capacities: float = 64.0,
        bins_per_octave: int = 2,
        learn_per_capacity: int = 4,
        prior: float = 4.0,
    ) -> None:
        """``attention_pages``: depth at which attention costs as much as the rest of a page; 0: all pages cost alike."""
        self.attention_pages = attention_pages
        self._tick = 1
        self._last_use = np.zeros(num_units, dtype=np.int64)
        self._class = np.zeros(num_units, dtype=np.int64)
        self._band = np.zeros(num_units, dtype=np.int64)
        self._print = np.zeros(num_units, dtype=np.uint64)
        size = 1 << (max(remembered * capacity, _REMEMBERED_LEAST) - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._known_print = np.zeros(size, dtype=np.uint64)
        self._known_last = np.zeros(size, dtype=np.int64)
        self._known_class = np.zeros(size, dtype=np.int64)
        self._known_uses = np.zeros(size, dtype=np.int64)
        self._returns = Returns(float(capacity), fade_capacities, bins_per_octave, prior)
        self._learn_every = max(32, capacity // learn_per_capacity)
        self._learn_at = self._learn_every
        self._asked_pages = 0

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        count = len(units)
        if count == 0:
            return
        marks = np.asarray(prints, dtype=np.uint64)
        pages = np.arange(first_page, first_page + count)
        self._print[units] = marks
        self._band[units] = self._bands(pages)
        ticks = np.arange(self._tick, self._tick + count)
        fresh = _CONTINUED if self._asked_pages > 1 else _OPENING
        self._use(np.asarray(units, dtype=np.int64), marks, ticks, fresh)
        self._tick += count

    def touched(self, units: Units) -> None:
        self._asked_pages = len(units)
        if len(units):
            chosen = np.asarray(units, dtype=np.int64)
            self._use(chosen, self._print[chosen], np.full(len(units), self._tick), _OPENING)
            self._tick += 1
        if self._tick >= self._learn_at:
            self._learn_at = self._tick + self._learn_every
            held = self._known_print != 0
            self._returns.learn(self._tick, self._known_class[held], self._tick - self._known_last[held])

    def held(self, units: Units) -> None:
        return

    freed = ignore_freed

    def lane(self, unit: int) -> int:
        return int(self._class[unit] * _BANDS + self._band[unit])

    def key(self, unit: int) -> float:
        return float(self._last_use[unit])

    def worth(self, lane: int, key: float) -> Worth:
        rate = self._returns.rate(lane // _BANDS, self._tick - key)
        return (rate * (1 + lane % _BANDS), key)

    def newcomer(self, first_page: int) -> Worth:
        kind = _CONTINUED if first_page > 1 else _OPENING
        band = int(self._bands(np.array([first_page]))[0])
        return (self._returns.rate(kind, 0.0) * (1 + band), float(self._tick))

    def _bands(self, pages: np.ndarray) -> np.ndarray:
        if self.attention_pages == 0:
            return np.zeros(len(pages), dtype=np.int64)
        return np.minimum(pages // self.attention_pages, _BANDS - 1)

    def _use(self, units: np.ndarray, prints: np.ndarray, ticks: np.ndarray, fresh_class: int) -> None:
        """One use of each unit: a return where its prefix was known."""
        slots = (prints & self._mask).astype(np.int64)
        known = self._known_print[slots] == prints
        back = slots[known]
        self._returns.record(self._known_class[back], ticks[known] - self._known_last[back])
        uses = np.where(known, self._known_uses[slots] + 1, 1)
        kinds = np.where(known, _CLASS_OF_USES[np.minimum(uses, len(_CLASS_OF_USES) - 1)], fresh_class)
        self._known_print[slots] = prints
        self._known_last[slots] = ticks
        self._known_class[slots] = kinds
        self._known_uses[slots] = uses
        self._last_use[units] = ticks
        self._class[units] = kinds


class Returns:
    """Ages at which units of each class come back, and the rate that follows."""

    def __init__(self, capacity: float, fade_capacities: float, bins_per_octave: int, prior: float) -> None:
        octaves = 30
        self._per_octave = bins_per_octave
        edges = np.concatenate([[0.0], 2.0 ** (np.arange(octaves * bins_per_octave + 1) / bins_per_octave)])
        self._widths = np.diff(edges)
        self._bins = len(self._widths)
        middle = (edges[1:] + edges[:-1]) / 2
        self._fade = fade_capacities * capacity
        apart = middle[:, None] - middle[None, :]
        self._reach = np.where(apart >= 0, np.exp2(-np.maximum(apart, 0) / self._fade), 0.0)
        self._prior = prior
        self._returned = np.zeros((_CLASSES, self._bins))
        self._exposed = np.zeros((_CLASSES, self._bins))
        self._recent = np.zeros((_CLASSES, self._bins))
        self._learnt_at = 0.0
        self._rates = np.zeros((_CLASSES, self._bins))
        self._derive(self._exposed)
        self._table = self._rates.tolist()

    def record(self, classes: np.ndarray, ages: np.ndarray) -> None:
        """These units came back at these ages."""
        np.add.at(self._recent, (classes, self._bins_of(ages)), 1.0)

    def rate(self, kind: int, age: float) -> float:
        """Best expected returns per unit of time from here on."""
        return self._table[kind][self._bin(age)]

    def learn(self, tick: float, classes: np.ndarray, ages: np.ndarray) -> None:
        """Fold in what was recorded; ``classes`` and ``ages`` are those that have not come back so far."""
        faded = 2.0 ** (-(tick - self._learnt_at) / self._fade)
        self._learnt_at = tick
        self._returned = self._returned * faded + self._recent
        self._exposed = self._exposed * faded + self._recent @ self._reach
        self._recent = np.zeros_like(self._recent)
        waiting = np.zeros_like(self._exposed)
        np.add.at(waiting, (classes, self._bins_of(ages)), 1.0)
        self._derive(self._exposed + waiting @ self._reach)
        self._table = self._rates.tolist()

    def _derive(self, exposed: np.ndarray) -> None:
        """Hazard of each bin, pulled to that of all classes; then the best rate over all further whiles."""
        overall = (self._returned.sum(axis=0) + 0.01) / (exposed.sum(axis=0) + 1.0)
        hazard = (self._returned + self._prior * overall) / (exposed + self._prior)
        hazard = np.minimum(hazard, 0.999)
        kept = np.cumprod(1.0 - hazard, axis=1)
        alive = np.concatenate([np.ones((_CLASSES, 1)), kept[:, :-1]], axis=1)
        gain = _from_zero(alive * hazard)
        time = _from_zero(alive * (1.0 - hazard / 2) * self._widths)
        gained = gain[:, None, 1:] - gain[:, :-1, None]
        waited = time[:, None, 1:] - time[:, :-1, None]
        ahead = np.triu(np.ones((self._bins, self._bins), dtype=np.bool_))
        rates = np.where(ahead, gained / np.where(ahead, np.maximum(waited, 1e-300), 1.0), 0.0)
        self._rates = rates.max(axis=2)

    def _bin(self, age: float) -> int:
        # floor(log2(age ** n)) = floor(n * log2(age)), in integers and without a call into numpy.
        return min(self._bins - 1, (int(age) ** self._per_octave).bit_length())

    def _bins_of(self, ages: np.ndarray) -> np.ndarray:
        bins = 1 + np.floor(np.log2(np.maximum(ages, 1)) * self._per_octave).astype(np.int64)
        return np.where(ages < 1, 0, np.minimum(bins, self._bins - 1))


def _from_zero(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


_CLASS_OF_USES = np.array(
    [_OPENING, _OPENING] + [2 + sum(uses > most for most in _USES) for uses in range(2, _USES[-1] + 2)]
)
