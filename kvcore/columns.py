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
from .digest import MASK, U64, Array, as_signed, as_words, bytes_fingerprint, cell_weights, field_salts


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

    name: str
    array: Array

    def recomputed_pair(self) -> tuple[int, int]:
        """The share of its digest, from the array alone."""
        ...


class Records:
    """int64 [size, fields]: one record an index, so that one index is one place in memory."""

    __slots__ = ("cells", "columns", "name", "space")

    def __init__(self, name: str, size: int, fields: int) -> None:
        self.name = name
        self.space: Any = U64(bytes_fingerprint(name.encode()))
        self.cells: Array = np.zeros((size, fields), dtype=np.int64)
        self.columns: list[Column] = []

    def column(self, field: int, name: str, sink: DigestSum, *, unsigned: bool = False) -> Column:
        """The view of one field that keeps `sink`."""
        made = Column(f"{self.name}.{name}", self, field, sink, unsigned)
        self.columns.append(made)
        return made

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

    __slots__ = ("_field", "_records", "_sink", "_unsigned", "array", "name")

    def __init__(self, name: str, records: Records, field: int, sink: DigestSum, unsigned: bool) -> None:
        self.name = name
        self._records = records
        self._field = field
        self._sink = sink
        self._unsigned = unsigned
        self.array: Array = records.cells[:, field]
        self.attach()

    def attach(self) -> None:
        """Follows records that have grown."""
        view = self._records.cells[:, self._field]
        self.array = view.view(U64) if self._unsigned else view

    def put(self, index: int, value: int) -> None:
        """Writes one cell."""
        word = as_signed(value) if self._unsigned else value
        records = self._records
        loops.put_field(records.cells, index, self._field, word, records.space, self._sink.sums)

    def write(self, indices: Array, values: Array | int) -> None:
        """Writes distinct cells; `indices` int64 [n], `values` [n] or one value."""
        records = self._records
        where = np.asarray(indices, dtype=np.int64)
        words = as_words(np.asarray(values).reshape(-1)).view(np.int64)
        if len(where):
            loops.write_field(records.cells, where, self._field, words, records.space, self._sink.sums)

    def add(self, indices: Array, delta: int) -> None:
        """Adds `delta` to distinct cells."""
        self.write(indices, self._records.cells[np.asarray(indices, dtype=np.int64), self._field] + delta)

    def recomputed_pair(self) -> tuple[int, int]:
        return _summed(self.array, self._records.space, self._field)


class Cells:
    """Flat int32 cells [size], such as tables and stacks."""

    __slots__ = ("array", "name", "sink", "space")

    def __init__(self, name: str, size: int, sink: DigestSum) -> None:
        self.name = name
        self.array: Array = np.zeros(size, dtype=np.int32)
        self.space: Any = U64(bytes_fingerprint(name.encode()))
        self.sink = sink

    def fill(self, start: int, values: Array) -> None:
        """Writes values int64 [n] into zero cells from `start` on."""
        loops.fill_cells(self.array, start, values, self.space, self.sink.sums)

    def clear(self, start: int, stop: int) -> None:
        """Zeroes cells [start, stop)."""
        loops.clear_cells(self.array, start, stop, self.space, self.sink.sums)

    def recomputed_pair(self) -> tuple[int, int]:
        return _summed(self.array, self.space, None)


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

    def push_one(self, id_: int) -> None:
        self.push(np.array([id_], dtype=np.int64))

    def take_one(self) -> int:
        """The next id; the caller has checked that there is one."""
        self.count -= 1
        taken = int(self.column.array[self.count]) - 1
        self.column.clear(self.count, self.count + 1)
        return taken

    def ids(self) -> Array:
        """All free ids, int64, bottom of the stack first."""
        return self.column.array[: self.count].astype(np.int64) - 1


def _summed(array: Array, space: Any, field: int | None) -> tuple[int, int]:
    used = np.flatnonzero(array)
    words = as_words(array[used])
    first, second = cell_weights(int(space), used)
    lanes = int((words * first).sum(dtype=U64)), int((words * second).sum(dtype=U64))
    if field is None:
        return lanes
    salts = field_salts(field + 1)
    return lanes[0] * int(salts[0][field]) & MASK, lanes[1] * int(salts[1][field]) & MASK
