"""Owns the counter-based random number: Philox4x64-10, a pure function of a key and a counter.

Nothing is seeded, kept or advanced, so a draw can be replayed on any machine, in any order and after any loss.
Source: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), section 4.3. Integers
only; the words equal those of ``numpy.random.Philox`` for the same key and counter.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four words for one key and counter; every word is a 64-bit unsigned integer."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (right >> 64) ^ c1 ^ k0, right & _MASK, (left >> 64) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a signed 64-bit seed and a position; 53 bits of it are random."""
    words = philox((seed & _MASK, 0), (position & _MASK, 0, 0, 0))
    return (words[0] >> 11) * 2.0**-53
