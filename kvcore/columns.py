"""Columns: the arrays of a ledger whose writes keep a digest.

Owns records (int64 [size, fields]), of which a `Column` is one field, flat int32 cells (`Cells`) and stacks of
free ids. Invariant: every write goes through a method here or through a loop of `loops` that is given the same
key space; the arrays alone decide the digest.
Source: LEDGER "Two digests"; contracts K066.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from . import loops
from .digest import U64, Array, as_signed, as_words, bytes_fingerprint, cell_weights, field_salts

_FEW_CELLS = 256
_SALTS = field_salts(loops.GROUP_FIELDS + loops.GROUP_STRIDE * loops.MAX_GROUPS)


class DigestSum:
    """Two 64-bit sums. `sums` uint64 [2] may be a view into a wider array."""

    __slots__ = ("sums",)

    def __init__(self, sums: Array | None = None) -> None:
        self.sums: Array = np.zeros(2, dtype=U64) if sums is None else sums

    def pair(self) -> tuple[int, int]:
        first, second = self.sums.tolist()
        return first, second


class Digested(Protocol):
    """What the auditor sums again."""

    def recomputed(self, sink: DigestSum) -> tuple[int, int]:
        """The share of one digest, from the array alone."""
        ...


class Records:
    """int64 [size, fields]: one record an index, so that one index is one place in memory."""

    __slots__ = ("_salts", "_weights", "cells", "columns", "name", "space")

    def __init__(self, name: str, size: int, fields: int) -> None:
        self.name = name
        self.space: Any = U64(bytes_fingerprint(name.encode()))
        self.cells: Array = np.zeros((size, fields), dtype=np.int64)
        self.columns: list[Column] = []
        self._salts: dict[int, tuple[Array, Array]] = {}
        self._weights: tuple[Array, Array] = cell_weights(0, np.zeros(0, dtype=np.int64))

    def column(self, field: int, name: str, sink: DigestSum, *, unsigned: bool = False) -> Column:
        """The view of one field that keeps `sink`."""
        made = Column(f"{self.name}.{name}", self, field, sink, unsigned)
        self.columns.append(made)
        return made

    def recomputed(self, sink: DigestSum) -> tuple[int, int]:
        """What all fields that keep `sink` add to it, from the array alone."""
        salts = self._salts.get(id(sink))
        if salts is None:
            salts = self._salts[id(sink)] = self._salts_of(sink)
        if len(self._weights[0]) != len(self.cells):
            self._weights = cell_weights(int(self.space), np.arange(len(self.cells)))
        words = self.cells.view(U64)
        first, second = [(words @ lane) @ weights for lane, weights in zip(salts, self._weights, strict=True)]
        return int(first), int(second)

    def _salts_of(self, sink: DigestSum) -> tuple[Array, Array]:
        """Factor of each field in one digest, by lane; 0 for a field that has no share in it."""
        first, second = np.zeros((2, self.cells.shape[1]), dtype=U64)
        for column in self.columns:
            if column.sink is sink:
                first[column.field], second[column.field] = [lane[column.field] for lane in _SALTS]
        return first, second

    def grow(self, size: int) -> None:
        """Makes room for `size` records; new ones are zero and leave the digests as they are."""
        grown = np.zeros((size, self.cells.shape[1]), dtype=np.int64)
        grown[: len(self.cells)] = self.cells
        self.cells = grown
        for column in self.columns:
            column.attach()


class Column:
    """One field of records. Readers use `array` [size]; only methods here and loops write it.

    Indices of one call are distinct. Zero is the default and adds nothing to the digest.
    """

    __slots__ = ("_unsigned", "array", "field", "name", "records", "sink")

    def __init__(self, name: str, records: Records, field: int, sink: DigestSum, unsigned: bool) -> None:
        self.name = name
        self.records = records
        self.field = field
        self.sink = sink
        self._unsigned = unsigned
        self.array: Array = records.cells[:, field]
        self.attach()

    def attach(self) -> None:
        """Follows records that have grown."""
        view = self.records.cells[:, self.field]
        self.array = view.view(U64) if self._unsigned else view

    def put(self, index: int, value: int) -> None:
        """Writes one cell."""
        word = as_signed(value) if self._unsigned else value
        records = self.records
        loops.put_field(records.cells, index, self.field, word, records.space, self.sink.sums)

    def write(self, indices: Array, values: Array | int) -> None:
        """Writes distinct cells; `indices` int64 [n], `values` [n] or one value."""
        records = self.records
        where = np.asarray(indices, dtype=np.int64)
        words = as_words(np.asarray(values).reshape(-1)).view(np.int64)
        if len(where):
            loops.write_field(records.cells, where, self.field, words, records.space, self.sink.sums)

    def add(self, indices: Array, delta: int) -> None:
        """Adds `delta` to distinct cells."""
        self.write(indices, self.records.cells[np.asarray(indices, dtype=np.int64), self.field] + delta)


class Cells:
    """Flat int32 cells [size], such as tables and stacks."""

    __slots__ = ("_weights", "array", "name", "sink", "space")

    def __init__(self, name: str, size: int, sink: DigestSum) -> None:
        self.name = name
        self.array: Array = np.zeros(size, dtype=np.int32)
        self.space: Any = U64(bytes_fingerprint(name.encode()))
        self.sink = sink
        few = size <= _FEW_CELLS
        self._weights = cell_weights(int(self.space), np.arange(size)) if few else None

    def fill(self, start: int, values: Array) -> None:
        """Writes values int64 [n] into zero cells from `start` on."""
        loops.fill_cells(self.array, start, values, self.space, self.sink.sums)

    def clear(self, start: int, stop: int) -> None:
        """Zeroes cells [start, stop)."""
        loops.clear_cells(self.array, start, stop, self.space, self.sink.sums)

    def recomputed(self, sink: DigestSum) -> tuple[int, int]:
        """What the cells add to `sink`, from the array alone."""
        if sink is not self.sink:
            return 0, 0
        if self._weights is not None:
            words = self.array.astype(np.int64).view(U64)
            return int(words @ self._weights[0]), int(words @ self._weights[1])
        used = np.flatnonzero(self.array)
        words = as_words(self.array[used])
        first, second = cell_weights(int(self.space), used)
        return int(words @ first), int(words @ second)


class IdStack:
    """Free ids as a stack of id + 1 in cells, so that the queue order is part of the digest."""

    __slots__ = ("column", "count")

    def __init__(self, name: str, capacity: int, first: int, sink: DigestSum) -> None:
        self.column = Cells(name, capacity, sink)
        self.count = 0
        self.push(np.arange(first, capacity, dtype=np.int64))

    def push(self, ids: Array) -> None:
        """Gives ids int64 [n] back; the first one is taken next."""
        cells = self.column
        loops.push_ids(cells.array, self.count, ids, cells.space, cells.sink.sums)
        self.count += len(ids)

    def take_one(self) -> int:
        """The next id; the caller has checked that there is one."""
        self.count -= 1
        taken = int(self.column.array[self.count]) - 1
        self.column.clear(self.count, self.count + 1)
        return taken

    def ids(self) -> Array:
        """All free ids, int64, bottom of the stack first."""
        return self.column.array[: self.count].astype(np.int64) - 1
