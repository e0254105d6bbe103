"""When cached blocks come back: a hazard by age, raised or lowered by what is known of a block.

Owns the model and its learning: the log-odds that a block comes back in an age band, given that it has not so far, are one
number of the band plus one of each trait. Both are learnt from runs of blocks that ended a request together, band by band as
they live through it, so nothing waits for a return that never comes (gradient steps whose size fades to a floor, so that an
old habit is forgotten). They begin with what a study of conversations gave (docs/prefix-reuse.md).
Invariant: bounded: the last ``REMEMBERED`` runs are followed. Time is whatever the caller counts; here blocks asked.
"""

from __future__ import annotations

import numpy as np

from .return_loops import best_rates, follow_runs, levels_of, note_returns

BANDS = 44
"""Ages in half octaves, from 1."""
LEVELS, LEVEL_STEP = 32, 0.5
"""Sums of traits are rounded to levels: a level's rates are one row of a table."""
REMEMBERED = 1 << 14
_EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(BANDS) / 2)])
_WIDTHS = np.diff(_EDGES)
_STEP_BAND, _STEP_TRAIT = 0.1, 0.03
_MOST_SEEN = 1000.0


def bands_of(ages: np.ndarray) -> np.ndarray:
    """The band of each age."""
    bands = 1 + np.floor(2 * np.log2(np.maximum(ages, 1))).astype(np.int64)
    return np.where(ages < 1, 0, np.minimum(bands, BANDS - 1))


class ReturnModel:
    """Learns from runs, gives levels and the table of rates by level and age band."""

    def __init__(
        self, band_odds: np.ndarray, trait_odds: np.ndarray, num_traits: int, first_band: int
    ) -> None:
        """``first_band``: ages below its end are one band."""
        self._first = first_band
        self._band_odds = band_odds.astype(np.float64).copy()
        self._trait_odds = trait_odds.astype(np.float64).copy()
        self._band_seen = np.ones(BANDS)
        self._trait_seen = np.ones(len(trait_odds))
        self._traits = np.zeros((REMEMBERED, num_traits), dtype=np.int64)
        self._ended = np.zeros(REMEMBERED)
        self._back = np.full(REMEMBERED, np.inf)
        self._next = 0
        self._seen_up_to = np.zeros(BANDS, dtype=np.int64)
        self._starts = _EDGES[:BANDS].copy()
        self._starts[first_band] = 0.0
        self._table: list[list[float]] = []
        self._derive()

    def level(self, traits: np.ndarray) -> np.ndarray:
        """Levels of runs ``[runs, traits]``: their log-odds against the bands', rounded."""
        return levels_of(self._trait_odds, traits, LEVEL_STEP, LEVELS)

    def rate(self, level: int, age: float) -> float:
        """Best expected returns per unit of time from here on."""
        band = 0 if age < 1 else min(1 + int(2 * np.log2(age)), BANDS - 1)
        return self._table[level][band]

    def follow(self, traits: np.ndarray, now: float) -> np.ndarray:
        """Follow these runs from now on; their serial numbers."""
        serials = follow_runs(self._traits, self._ended, self._back, traits, self._next, now)
        self._next += len(traits)
        return serials

    def came_back(self, serials: np.ndarray, ages: np.ndarray) -> None:
        """These runs came back at these ages; what was forgotten is ignored."""
        note_returns(self._back, serials, ages, max(0, self._next - REMEMBERED))

    def learn(self, now: float) -> None:
        """Take a step for every band that runs have lived through since the last call."""
        oldest = max(0, self._next - REMEMBERED)
        places = np.arange(oldest, self._next) % REMEMBERED
        lived_up_to = oldest + np.searchsorted(self._ended[places], now - _EDGES[1:], side="right")
        for band in range(self._first, BANDS):
            begin = max(oldest, int(self._seen_up_to[band]))
            end = self._seen_up_to[band] = max(begin, int(lived_up_to[band]))
            if end > begin:
                self._step(band, places[begin - oldest : end - oldest])
        self._derive()

    def _step(self, band: int, places: np.ndarray) -> None:
        back = self._back[places]
        alive = back >= self._starts[band]
        if not alive.any():
            return
        traits = self._traits[places[alive]]
        odds = self._band_odds[band] + self._trait_odds[traits].sum(axis=1)
        error = 1.0 / (1.0 + np.exp(-odds)) - (back[alive] < _EDGES[band + 1])
        squares = error * error
        self._band_seen[band] = min(_MOST_SEEN, self._band_seen[band] + squares.sum())
        self._band_odds[band] -= _STEP_BAND * error.sum() / np.sqrt(self._band_seen[band])
        flat = traits.ravel()
        spread = traits.shape[1]
        size = len(self._trait_odds)
        seen = np.bincount(flat, np.repeat(squares, spread), size)
        self._trait_seen = np.minimum(_MOST_SEEN, self._trait_seen + seen)
        total = np.bincount(flat, np.repeat(error, spread), size)
        self._trait_odds -= _STEP_TRAIT * total / np.sqrt(self._trait_seen)

    def _derive(self) -> None:
        """For each level and band the best of all further whiles: returns expected in it over time expected to be held."""
        levels = (np.arange(LEVELS) - LEVELS // 2) * LEVEL_STEP
        hazard = 1.0 / (1.0 + np.exp(-(self._band_odds + levels[:, None])))
        kept = hazard[:, self._first :]
        padded = np.concatenate([kept[:, :1], kept, kept[:, -1:]], axis=1)
        hazard[:, self._first :] = 0.25 * padded[:, :-2] + 0.5 * padded[:, 1:-1] + 0.25 * padded[:, 2:]
        hazard[:, : self._first] = 0.0
        ones = np.ones((LEVELS, 1))
        there = np.concatenate([ones, np.cumprod(1.0 - hazard, axis=1)], axis=1)
        held = np.cumsum((there[:, 1:] + there[:, :-1]) / 2 * _WIDTHS, axis=1)
        held = np.concatenate([0.0 * ones, held], axis=1)
        self._table = best_rates(there, held).tolist()
