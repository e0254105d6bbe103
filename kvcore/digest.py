"""Incremental digests: a sum of mixed terms, one per cell that differs from zero.

Owns the mixing function, the two 64-bit lanes of each digest and the columns whose writes keep them.
Invariant: a digest equals the sum over all cells of `mix(column, index, value)`, cells of value zero giving
nothing; the order of writes does not matter, the auditor recomputes it from the arrays. These sums detect
accidents, not malice.
Source: LEDGER "Two digests", "Determinism" (uint64 is never mixed with int64).
"""

from __future__ import annotations

from typing import Any

import numpy as np

U64 = np.uint64
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_VALUE = 0xD6E8FEB86659FD93
_SECOND = 0xC2B2AE3D27D4EB4F
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
    words = np.arange(1, count + 1, dtype=U64) * U64(_GOLDEN)
    return mix_words(words) | U64(1)


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


def _lanes(keys: Array, values: Array) -> tuple[Array, Array]:
    first = values * U64(_VALUE)
    first ^= keys
    mix_words(first)
    second = keys * U64(_SECOND)
    second += values
    second ^= first
    return first, mix_words(second)


class DigestSum:
    """Two 64-bit sums of mixed terms. Writes are collected and folded together when the digest is read."""

    __slots__ = ("_added", "_cells", "_first", "_removed", "_second")

    def __init__(self) -> None:
        self._first = 0
        self._second = 0
        self._added: list[tuple[Array, Array]] = []
        self._removed: list[tuple[Array, Array]] = []
        self._cells: list[tuple[int, int, int]] = []

    def change_cell(self, key: int, old: int, new: int) -> None:
        """Records that one cell went from `old` to `new`."""
        self._cells.append((key, old, new))

    def change_cells(self, keys: Array, old: Array, new: Array) -> None:
        """Records that cells went from `old` to `new`; all arrays are uint64 of one length."""
        kept = new != 0
        self._added.append((keys, new) if kept.all() else (keys[kept], new[kept]))
        kept = old != 0
        if kept.any():
            self._removed.append((keys[kept], old[kept]))

    def pair(self) -> tuple[int, int]:
        """Both lanes, every recorded change folded in."""
        if self._cells or self._added or self._removed:
            self._fold()
        return self._first, self._second

    def _fold(self) -> None:
        added, removed = self._added, self._removed
        if self._cells:
            added.append(_pairs([(key, new) for key, _, new in self._cells if new]))
            removed.append(_pairs([(key, old) for key, old, _ in self._cells if old]))
        cut = sum(len(keys) for keys, _ in added)
        both = added + removed
        keys = np.concatenate([entry[0] for entry in both])
        values = np.concatenate([entry[1] for entry in both])
        first, second = _lanes(keys, values)
        self._first = (self._first + _difference(first, cut)) & _MASK
        self._second = (self._second + _difference(second, cut)) & _MASK
        self._added, self._removed, self._cells = [], [], []


def _pairs(cells: list[tuple[int, int]]) -> tuple[Array, Array]:
    words = np.array(cells, dtype=U64).reshape(len(cells), 2)
    return words[:, 0], words[:, 1]


def _difference(lane: Array, cut: int) -> int:
    return int(lane[:cut].sum(dtype=U64)) - int(lane[cut:].sum(dtype=U64))


def digest_bytes(*pairs: tuple[int, int]) -> bytes:
    """16 bytes of the lane-wise sum of several digests (little-endian)."""
    first = sum(pair[0] for pair in pairs) & _MASK
    second = sum(pair[1] for pair in pairs) & _MASK
    return first.to_bytes(8, "little") + second.to_bytes(8, "little")


class Column:
    """An integer array [size] whose writes keep a digest. Readers use `array`; only methods here write it.

    Indices of one call are distinct. Zero is the default and adds nothing to the digest.
    """

    __slots__ = ("_salt", "_sink", "array", "name")

    def __init__(self, name: str, size: int, dtype: Any, sink: DigestSum) -> None:
        self.name = name
        self.array: Array = np.zeros(size, dtype=dtype)
        self._salt = bytes_fingerprint(name.encode())
        self._sink = sink

    def put(self, index: int, value: int) -> None:
        """Writes one cell."""
        old = int(self.array[index])
        if old == value:
            return
        self.array[index] = value
        key = (self._salt + index * _GOLDEN) & _MASK
        self._sink.change_cell(key, old & _MASK, value & _MASK)

    def write(self, indices: Array, values: Array | int) -> None:
        """Writes distinct cells; `indices` int64 [n], `values` [n] or one value."""
        if len(indices) == 0:
            return
        old = as_words(self.array[indices])
        self.array[indices] = values
        self._sink.change_cells(self._keys(indices), old, as_words(self.array[indices]))

    def add(self, indices: Array, delta: int) -> None:
        """Adds `delta` to distinct cells."""
        if len(indices):
            self.write(indices, self.array[indices] + self.array.dtype.type(delta))

    def grow(self, size: int) -> None:
        """Makes room for `size` cells; new cells are zero and leave the digest as it is."""
        grown = np.zeros(size, dtype=self.array.dtype)
        grown[: len(self.array)] = self.array
        self.array = grown

    def recomputed_pair(self) -> tuple[int, int]:
        """This column's share of its digest, from the array alone (for the auditor)."""
        used = np.flatnonzero(self.array)
        first, second = _lanes(self._keys(used), as_words(self.array[used]))
        return int(first.sum(dtype=U64)), int(second.sum(dtype=U64))

    def _keys(self, indices: Array) -> Array:
        keys = as_words(np.asarray(indices))
        keys *= U64(_GOLDEN)
        keys += U64(self._salt)
        return keys


class IdStack:
    """Free ids [0, capacity) as a stack in a column (cell = id + 1), so that the queue order is part of the
    digest.
    """

    __slots__ = ("column", "count")

    def __init__(self, name: str, capacity: int, first: int, sink: DigestSum) -> None:
        self.column = Column(name, capacity, np.int32, sink)
        self.count = 0
        self.push(np.arange(capacity - 1, first - 1, -1, dtype=np.int64))

    def push(self, ids: Array) -> None:
        """Gives ids back; the last one is taken next."""
        self.column.write(np.arange(self.count, self.count + len(ids)), np.asarray(ids) + 1)
        self.count += len(ids)

    def push_one(self, id_: int) -> None:
        self.column.put(self.count, id_ + 1)
        self.count += 1

    def take(self, count: int) -> Array:
        """The next `count` ids, int64; the caller has checked that they are there."""
        low = self.count - count
        cells = np.arange(low, self.count)
        ids = self.column.array[low : self.count][::-1].astype(np.int64) - 1
        self.column.write(cells, 0)
        self.count = low
        return ids

    def take_one(self) -> int:
        self.count -= 1
        taken = int(self.column.array[self.count]) - 1
        self.column.put(self.count, 0)
        return taken

    def ids(self) -> Array:
        """All free ids, int64, bottom of the stack first."""
        return self.column.array[: self.count].astype(np.int64) - 1
