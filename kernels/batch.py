"""Owns the shape of one engine step as the kernels see it: token rows, their slots and the block tables.

Sequence `s` owns the token rows `[seq_starts[s], seq_starts[s+1])`, which are the last rows of its
context: its first row's position is `context_lens[s] - rows`. Cells of a table past the context are never
read, whatever they hold. Contracts: K140, K141, K142.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import KernelInputRefused


@dataclass(slots=True)
class GroupRows:
    """Where one more cache group keeps the step's rows; its blocks have a size of their own."""

    slots: npt.NDArray[np.int64]
    """`[T]`"""
    block_tables: npt.NDArray[np.int32]
    """`[S, max_blocks]`"""


@dataclass(slots=True)
class StepBatch:
    """One step's arrays; the caller owns them and may reuse them after the step."""

    tokens: npt.NDArray[np.int64]
    """`[T]` token ids"""
    positions: npt.NDArray[np.int64]
    """`[T]` position of each row in its sequence"""
    slots: npt.NDArray[np.int64]
    """`[T]` `block * block_size + offset` where the row's K/V is written"""
    seq_starts: npt.NDArray[np.int32]
    """`[S+1]` first row of each sequence, then T"""
    context_lens: npt.NDArray[np.int32]
    """`[S]` K/V rows visible to the sequence's last row, this step's writes included"""
    block_tables: npt.NDArray[np.int32]
    """`[S, max_blocks]`"""
    logit_rows: npt.NDArray[np.int64]
    """`[L]` row indices whose logits are wanted"""
    others: tuple[GroupRows, ...] = ()
    """Slots and tables of cache groups 1, 2, ...; `slots` and `block_tables` are those of group 0"""

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.context_lens.shape[0])

    def check(self, num_blocks: int, block_size: int) -> None:
        """Refuse a batch that would make a kernel guess or leave its memory; tables and slots are those of group 0.

        Raises: `KernelInputRefused` (nothing was read or written).
        """
        rows, seqs = self.num_tokens, self.num_seqs
        _same(self.positions.shape, (rows,), "positions")
        _same(self.seq_starts.shape, (seqs + 1,), "seq_starts")
        counts = np.diff(self.seq_starts)
        if self.seq_starts[0] != 0 or self.seq_starts[-1] != rows or (counts < 0).any():
            raise KernelInputRefused("seq_starts", f"must rise from 0 to {rows}")
        if (self.context_lens < counts).any():
            raise KernelInputRefused("context_lens", "a context is shorter than the rows it is given")
        self._check_places(self.slots, self.block_tables, num_blocks, block_size)
        if self.logit_rows.size and (self.logit_rows.min() < 0 or self.logit_rows.max() >= rows):
            raise KernelInputRefused("logit_rows", f"outside the step's {rows} rows")
        expected = np.repeat(self.context_lens - counts - self.seq_starts[:-1], counts) + np.arange(rows)
        if not np.array_equal(self.positions, expected):
            raise KernelInputRefused("positions", "rows are not the last rows of their sequences")

    def check_others(self, geometries: Sequence[tuple[int, int]]) -> None:
        """The same for groups 1, 2, ..., of `(num_blocks, block_size)` each. Raises: `KernelInputRefused`."""
        if len(geometries) != len(self.others):
            raise KernelInputRefused(
                "others", f"{len(self.others)} for {len(geometries)} further cache groups"
            )
        for rows, (num_blocks, block_size) in zip(self.others, geometries, strict=True):
            self._check_places(rows.slots, rows.block_tables, num_blocks, block_size)

    def _check_places(
        self,
        slots: npt.NDArray[np.int64],
        tables: npt.NDArray[np.int32],
        num_blocks: int,
        block_size: int,
    ) -> None:
        seqs = self.num_seqs
        _same(slots.shape, (self.num_tokens,), "slots")
        if tables.ndim != 2 or tables.shape[0] != seqs:
            raise KernelInputRefused("block_tables", f"shape {tables.shape} for {seqs} sequences")
        used = -(-self.context_lens.astype(np.int64) // block_size)
        if seqs and used.max() > tables.shape[1]:
            raise KernelInputRefused("block_tables", f"a context needs {used.max()} table cells")
        visible = np.arange(tables.shape[1]) < used[:, None]
        bad = visible & ((tables < 0) | (tables >= num_blocks))
        if bad.any():
            raise KernelInputRefused("block_tables", f"a used cell is outside {num_blocks} blocks")
        if slots.size and (slots.min() < 0 or slots.max() >= num_blocks * block_size):
            raise KernelInputRefused("slots", f"outside the pool of {num_blocks * block_size} rows")


def _same(shape: tuple[int, ...], expected: tuple[int, ...], field: str) -> None:
    if shape != expected:
        raise KernelInputRefused(field, f"shape {shape}, expected {expected}")
