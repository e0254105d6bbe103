"""Compiled loops of the default policy: what is known of a path's blocks when its request ends, and what is known after.

Owns the layout of the policy's two tables, int64: a *cell* for each unit (prefix fingerprint, last use, level, depth) and one
for each remembered identity (fingerprint, last use, uses, run), found by the low bits of the fingerprint. Invariant: a path is
read before any of it is written, so two blocks that meet in one cell do not see each other. All loops stand in this file,
because a cached caller does not notice a changed callee elsewhere.
"""

from __future__ import annotations

import numpy as np
from numba import njit

PRINT, LAST = 0, 1
LEVEL, DEPTH = 2, 3
USES, RUN = 2, 3
_USE_STEPS = np.array([2, 3, 4, 5, 7, 11, 33])
_AGE_STEPS = 2 ** np.arange(9, 16)
_SIZES = 8
"""Sizes by octave, the last one open."""
_REPLIES = 12
TRAIT_VALUES = (len(_USE_STEPS) + 1, len(_AGE_STEPS) + 2, 2 * _SIZES, 2 * _SIZES, 2, _REPLIES)
"""How many values each trait has."""
_OFFSETS = np.concatenate([[0], np.cumsum(TRAIT_VALUES)[:-1]]).astype(np.int64)


@njit(cache=True)
def _octave(value: int) -> int:
    octave = 0
    while value > 1 and octave < _SIZES - 1:
        value >>= 1
        octave += 1
    return octave


@njit(cache=True)
def _steps_up_to(steps: np.ndarray, value: int) -> int:
    number = 0
    while number < len(steps) and steps[number] <= value:
        number += 1
    return number


@njit(cache=True)
def path_traits(uses: np.ndarray, ages: np.ndarray, known: np.ndarray, reply_tokens: int) -> np.ndarray:
    """``[blocks, traits]``: indexes into the trait odds, for the blocks of one path."""
    count = len(uses)
    reused = 0
    while reused < count and known[reused]:
        reused += 1
    kind = _SIZES if reused > 1 else 0
    reply = 0
    while reply_tokens > 0 and reply < _REPLIES - 1:
        reply_tokens >>= 1
        reply += 1
    traits = np.empty((count, len(_OFFSETS)), dtype=np.int64)
    for block in range(count):
        traits[block, 0] = _steps_up_to(_USE_STEPS, uses[block])
        traits[block, 1] = 1 + _steps_up_to(_AGE_STEPS, ages[block]) if known[block] else 0
        traits[block, 2] = kind + _octave(count - reused)
        traits[block, 3] = kind + _octave(count)
        traits[block, 4] = 1 if block == count - 1 else 0
        traits[block, 5] = reply
        for trait in range(len(_OFFSETS)):
            traits[block, trait] += _OFFSETS[trait]
    return traits


@njit(cache=True)
def read_path(
    units: np.ndarray, cells: np.ndarray, identities: np.ndarray, reply_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What is known of a path that ends: per block ``[blocks, (place, uses, run, age)]`` and whether it was remembered,
    then per run of equal blocks its traits ``[runs, traits]`` and where it ends, and which blocks had a run before.
    """
    count, mask = len(units), len(identities) - 1
    blocks = np.empty((count, 4), dtype=np.int64)
    known = np.empty(count, dtype=np.bool_)
    for at in range(count):
        cell = cells[units[at]]
        place = cell[PRINT] & mask
        identity = identities[place]
        known[at] = identity[PRINT] == cell[PRINT]
        blocks[at, 0] = place
        blocks[at, 1] = identity[USES] + 1 if known[at] else 1
        blocks[at, 2] = identity[RUN] if known[at] else -1
        blocks[at, 3] = cell[LAST] - identity[LAST] if known[at] else 0
    traits = path_traits(blocks[:, 1], blocks[:, 3], known, reply_tokens)
    ends = np.empty(count, dtype=np.int64)
    runs = 0
    for at in range(count):
        if at and (traits[at] == traits[runs - 1]).all():
            ends[runs - 1] = at
            continue
        traits[runs] = traits[at]
        ends[runs] = at
        runs += 1
    return blocks, known, traits[:runs], ends[:runs], np.flatnonzero(blocks[:, 2] >= 0)


@njit(cache=True)
def write_path(
    units: np.ndarray,
    cells: np.ndarray,
    identities: np.ndarray,
    blocks: np.ndarray,
    ends: np.ndarray,
    levels: np.ndarray,
    serials: np.ndarray,
    now: int,
) -> None:
    """Give a path that ends now its levels, and remember its blocks; a run is remembered by its last block."""
    run = 0
    for at in range(len(units)):
        if at > ends[run]:
            run += 1
        cell, identity = cells[units[at]], identities[blocks[at, 0]]
        cell[LAST], cell[LEVEL] = now, levels[run]
        identity[PRINT], identity[LAST], identity[USES], identity[RUN] = cell[PRINT], now, blocks[at, 1], -1
    for run in range(len(ends)):
        identities[blocks[ends[run], 0], RUN] = serials[run]


@njit(cache=True)
def levels_of(odds: np.ndarray, traits: np.ndarray, step: float, levels: int) -> np.ndarray:
    """Each run's sum of trait odds ``[runs, traits]``, rounded to ``step`` and counted from the middle of the levels."""
    found = np.empty(len(traits), dtype=np.int64)
    for run in range(len(traits)):
        others = 0.0
        for trait in range(1, traits.shape[1]):
            others += odds[traits[run, trait]]
        level = int(np.rint((odds[traits[run, 0]] + others) / step)) + levels // 2
        found[run] = min(max(level, 0), levels - 1)
    return found


@njit(cache=True)
def follow_runs(
    followed: np.ndarray, ended: np.ndarray, back: np.ndarray, traits: np.ndarray, first: int, now: float
) -> np.ndarray:
    """Put runs ``[runs, traits]`` into the ring from serial number ``first`` on; their serial numbers."""
    serials = np.empty(len(traits), dtype=np.int64)
    for run in range(len(traits)):
        place = (first + run) % len(ended)
        followed[place] = traits[run]
        ended[place], back[place] = now, np.inf
        serials[run] = first + run
    return serials


@njit(cache=True)
def note_returns(back: np.ndarray, serials: np.ndarray, ages: np.ndarray, oldest: int) -> None:
    """The first age at which each run came back; runs before ``oldest`` are forgotten."""
    for at in range(len(serials)):
        if serials[at] >= oldest:
            place = serials[at] % len(back)
            back[place] = min(back[place], ages[at])


@njit(cache=True)
def best_rates(there: np.ndarray, held: np.ndarray) -> np.ndarray:
    """``[levels, bands]``: the best of all further whiles, returns expected in it over time expected to be held.

    Both arguments ``[levels, bands + 1]``, at the edges of the bands.
    """
    levels, edges = there.shape
    rates = np.zeros((levels, edges - 1))
    for level in range(levels):
        for band in range(edges - 1):
            for until in range(band + 1, edges):
                gained = there[level, band] - there[level, until]
                rate = gained / max(held[level, until] - held[level, band], 1e-300)
                rates[level, band] = max(rates[level, band], rate)
    return rates
