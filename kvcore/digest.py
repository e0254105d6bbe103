"""Digests: a sum of weighted cells, kept incrementally, and the fingerprints that feed it.

Owns the mixing function, the weights of cells and the two 64-bit lanes of each digest. A cell's term is its
value (two's complement) times an odd weight mixed from the column's name and the cell's index, another weight
in each lane; a digest is the sum of all terms modulo 2^64. Invariant: cells of value zero give nothing, the
order of writes does not matter, the auditor recomputes the sum from the arrays. These sums detect accidents,
not malice.
Source: LEDGER "Two digests", "Determinism" (uint64 is never mixed with int64).
"""

from __future__ import annotations

from typing import Any

import numpy as np

U64 = np.uint64
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
SECOND = 0xC2B2AE3D27D4EB4F
_MIX_A = U64(0xFF51AFD7ED558CCD)
_MIX_B = U64(0xC4CEB9FE1A85EC53)
_SHIFT = U64(33)

Array = np.ndarray[Any, np.dtype[Any]]


def mix_words(words: Array) -> Array:
    """Avalanche of uint64 words, in place; returns the same array."""
    words ^= words >> _SHIFT
    words *= _MIX_A
    words ^= words >> _SHIFT
    words *= _MIX_B
    words ^= words >> _SHIFT
    return words


def position_weights(count: int) -> Array:
    """Odd uint64 weights [count], one a position: the fingerprint of a sequence is sum((x + 1) * weight)."""
    words = np.arange(1, count + 1, dtype=U64) * U64(GOLDEN)
    return mix_words(words) | U64(1)


def cell_weights(space: int, indices: Array) -> tuple[Array, Array]:
    """Weights of cells of one space in both lanes, uint64 [n] each; `indices` are not negative."""
    first = mix_words(indices.astype(U64) * U64(GOLDEN) + U64(space)) | U64(1)
    return first, ((first ^ (first >> U64(29))) * U64(SECOND)) | U64(1)


def field_salts(count: int) -> tuple[Array, Array]:
    """Odd factors that tell the fields of one record apart, in both lanes, uint64 [count] each."""
    numbers = np.arange(1, count + 1, dtype=U64)
    return mix_words(numbers * U64(GOLDEN)) | U64(1), mix_words(numbers * U64(SECOND)) | U64(1)


def bytes_fingerprint(content: bytes) -> int:
    """64-bit fingerprint of a short byte string, equal in every process."""
    words = np.frombuffer(content, dtype=np.uint8).astype(U64) + U64(1)
    total = (words * position_weights(len(content))).sum(dtype=U64)
    return int(mix_words(np.array([total ^ U64(len(content) + 1)], dtype=U64))[0])


def as_words(values: Array) -> Array:
    """Any integer array as uint64 words (two's complement), copied."""
    if values.dtype == U64:
        return values.copy()
    return values.astype(np.int64).view(U64)


def as_signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return ((value + (1 << 63)) & MASK) - (1 << 63)


def digest_bytes(*pairs: tuple[int, int]) -> bytes:
    """16 bytes of the lane-wise sum of several digests (little-endian)."""
    first = sum(pair[0] for pair in pairs) & MASK
    second = sum(pair[1] for pair in pairs) & MASK
    return first.to_bytes(8, "little") + second.to_bytes(8, "little")
