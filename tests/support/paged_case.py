"""Random paged contexts for kernel tests: permuted blocks, ragged lengths, everything that is not a row poisoned with NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from copyhold.kernels import cpu, reference
from copyhold.kernels.batch import StepBatch
from copyhold.kernels.choices import KVDtype
from copyhold.kernels.pool import KVPool, split_table

TOLERANCE_FP32 = 2e-5
"""Of a cpu kernel's float32 output against float64 over the same stored rows, whatever their type: absolute and relative."""

OUT_OF_RANGE = 2**30
"""What unused cells of a table hold: no pool has such a block."""


class PagedCase:
    """Random K/V for contexts of given lengths, in permuted blocks; whatever is not a row is NaN."""

    def __init__(
        self,
        contexts: list[int],
        queries: list[int],
        *,
        kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 64,
        block_size: int = 16,
        kv_dtype: KVDtype = "float32",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        needed = [-(-context // block_size) for context in contexts]
        self.pool = KVPool(1, sum(needed) + 3, kv_heads, head_dim, block_size, kv_dtype)
        poison(self.pool)
        free = rng.permutation(self.pool.num_blocks).astype(np.int32)
        tables = np.full((len(contexts), max(needed, default=0) + 2), OUT_OF_RANGE, dtype=np.int32)
        for seq, count in enumerate(needed):
            tables[seq, :count], free = free[:count], free[count:]
        self.rows: list[np.ndarray] = []
        """Per sequence, K and V `[2, context, kv_heads, head_dim]` as written"""
        for seq, context in enumerate(contexts):
            p = np.arange(context)
            rows = rng.standard_normal((2, context, kv_heads, head_dim), dtype=np.float32)
            slots = tables[seq][p // block_size].astype(np.int64) * block_size + p % block_size
            cpu.write_rows(self.pool.k[0], self.pool.v[0], rows[0], rows[1], slots)
            self.rows.append(rows)
        total = sum(queries)
        lens, counts = np.array(contexts, dtype=np.int32), np.array(queries, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.repeat(lens - counts - starts[:-1], counts) + np.arange(total)
        rows_of = np.repeat(np.arange(len(contexts)), counts)
        blocks = tables[rows_of, positions // block_size].astype(np.int64)
        self.batch = StepBatch(
            tokens=np.zeros(total, dtype=np.int64),
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            seq_starts=starts,
            context_lens=lens,
            block_tables=tables,
            logit_rows=np.empty(0, dtype=np.int64),
        )
        self.q = rng.standard_normal((total, kv_heads * group, head_dim), dtype=np.float32)
        self.scale = 1 / math.sqrt(head_dim)

    @property
    def tile_tables(self) -> np.ndarray:
        return split_table(self.batch.block_tables, self.pool.tiles_per_block).astype(np.int32)

    def run(self, backend: Any = cpu, *, window: int = 0, soft_cap: float = 0.0) -> np.ndarray:
        """A backend's paged attention of the batch."""
        self.batch.check(self.pool.num_blocks, self.pool.block_size)
        out = np.full_like(self.q, np.nan)
        backend.paged_attention(
            self.q,
            self.pool.k[0],
            self.pool.v[0],
            self.tile_tables,
            self.batch.seq_starts,
            self.batch.context_lens,
            np.float32(self.scale),
            out,
            window=window,
            soft_cap=soft_cap,
        )
        return out

    def run_split(self, partition: int, *, window: int = 0, soft_cap: float = 0.0) -> np.ndarray:
        """The cpu kernel in partitions of so many tokens."""
        out = np.full_like(self.q, np.nan)
        cpu.paged_attention_split(
            self.q,
            self.pool.k[0],
            self.pool.v[0],
            self.tile_tables,
            self.batch.seq_starts,
            self.batch.context_lens,
            partition,
            np.float32(self.scale),
            out,
            window=window,
            soft_cap=soft_cap,
        )
        return out

    def expected(self, *, window: int = 0, soft_cap: float = 0.0) -> np.ndarray:
        """Float64 over the rows as the pool keeps them."""
        return reference.paged_attention(
            self.q, self.pool, 0, self.batch, self.scale, window=window, soft_cap=soft_cap
        )

    def assert_matches_reference(self, tolerance: float = TOLERANCE_FP32, **rule: Any) -> None:
        np.testing.assert_allclose(self.run(**rule), self.expected(**rule), atol=tolerance, rtol=tolerance)


def poison(pool: KVPool) -> None:
    """Every value of the pool becomes NaN, in whatever type it is kept."""
    nan = {"float32": np.float32(np.nan), "bfloat16": np.uint16(0x7FC0), "float16": np.int16(0x7E00)}
    pool.k.fill(nan[pool.kv_dtype])
    pool.v.fill(nan[pool.kv_dtype])
