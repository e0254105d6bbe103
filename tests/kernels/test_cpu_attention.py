"""The cpu attention kernel against the float64 reference: every length, shape and poison that paging can bring."""

from __future__ import annotations

import math

import numpy as np
import pytest

from copyhold.kernels import cpu, reference
from copyhold.kernels.batch import StepBatch
from copyhold.kernels.pool import KVPool, split_table

TOLERANCE_FP32 = 2e-5
OUT_OF_RANGE = 2**30


class Case:
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
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        needed = [-(-context // block_size) for context in contexts]
        self.pool = KVPool(1, sum(needed) + 3, kv_heads, head_dim, block_size)
        self.pool.k.fill(np.nan)
        self.pool.v.fill(np.nan)
        free = rng.permutation(self.pool.num_blocks).astype(np.int32)
        tables = np.full((len(contexts), max(needed, default=0) + 2), OUT_OF_RANGE, dtype=np.int32)
        for seq, count in enumerate(needed):
            tables[seq, :count], free = free[:count], free[count:]
        for seq, context in enumerate(contexts):
            p = np.arange(context)
            rows = rng.standard_normal((2, context, kv_heads, head_dim), dtype=np.float32)
            slots = tables[seq][p // block_size].astype(np.int64) * block_size + p % block_size
            cpu.write_rows(self.pool.k[0], self.pool.v[0], rows[0], rows[1], slots)
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

    def run(self) -> np.ndarray:
        self.batch.check(self.pool.num_blocks, self.pool.block_size)
        tables = split_table(self.batch.block_tables, self.pool.tiles_per_block)
        out = np.full_like(self.q, np.nan)
        cpu.paged_attention(
            self.q,
            self.pool.k[0],
            self.pool.v[0],
            tables.astype(np.int32),
            self.batch.seq_starts,
            self.batch.context_lens,
            np.float32(self.scale),
            out,
        )
        return out

    def assert_matches_reference(self, tolerance: float = TOLERANCE_FP32) -> None:
        expected = reference.paged_attention(self.q, self.pool, 0, self.batch, self.scale)
        np.testing.assert_allclose(self.run(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 2049])
@pytest.mark.parametrize("phase", ["decode", "last_rows"])
def test_one_sequence_of_any_length(length: int, phase: str) -> None:
    Case([length], [1 if phase == "decode" else min(length, 40)]).assert_matches_reference()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_a_whole_prompt_in_one_shot(length: int) -> None:
    Case([length], [length]).assert_matches_reference()


def test_a_sequence_without_rows_in_the_step_is_skipped() -> None:
    Case([5, 0, 33], [0, 0, 33]).assert_matches_reference()


def test_an_empty_step_writes_nothing() -> None:
    assert Case([], []).run().shape[0] == 0
    assert Case([17, 3], [0, 0]).run().shape[0] == 0


def test_ragged_decode_reads_no_unused_slot_and_no_padded_cell() -> None:
    Case([64, 63, 17, 1], [1, 1, 1, 1]).assert_matches_reference()


def test_prefill_and_decode_mix_in_one_step() -> None:
    Case([64, 63, 17, 1, 90], [1, 40, 17, 1, 7]).assert_matches_reference()


@pytest.mark.parametrize("group", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 72, 128])
def test_grouped_heads_and_head_dims(group: int, head_dim: int) -> None:
    Case([40, 300], [9, 1], group=group, head_dim=head_dim, kv_heads=2).assert_matches_reference()


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_allocator_blocks_split_into_tiles(block_size: int) -> None:
    Case([100, 31, 65], [20, 1, 65], block_size=block_size).assert_matches_reference()


def test_large_scores_do_not_overflow() -> None:
    case = Case([300], [30])
    case.q *= 200
    # Scores near 1000 carry a float32 rounding of 6e-5 each, which the exponential turns into a relative error.
    case.assert_matches_reference(tolerance=1e-3)


def test_a_row_has_the_same_bits_whatever_shares_its_step() -> None:
    together = Case([300], [300], seed=3)
    whole = together.run()
    for row in (0, 15, 16, 37, 99, 255, 256, 299):
        alone = Case([300], [300], seed=3)
        alone.q = np.ascontiguousarray(alone.q[row : row + 1])
        alone.batch.seq_starts = np.array([0, 1], dtype=np.int32)
        alone.batch.context_lens = np.array([row + 1], dtype=np.int32)
        out = np.empty_like(alone.q)
        cpu.paged_attention(
            alone.q,
            alone.pool.k[0],
            alone.pool.v[0],
            alone.batch.block_tables,
            alone.batch.seq_starts,
            alone.batch.context_lens,
            np.float32(alone.scale),
            out,
        )
        assert np.array_equal(out[0], whole[row])


def test_chunks_of_24_equal_one_shot_over_100_tokens() -> None:
    case = Case([100], [100], seed=5)
    whole = case.run()
    for start in range(0, 100, 24):
        stop = min(start + 24, 100)
        out = np.empty_like(case.q[start:stop])
        cpu.paged_attention(
            case.q[start:stop].copy(),
            case.pool.k[0],
            case.pool.v[0],
            case.batch.block_tables,
            np.array([0, stop - start], dtype=np.int32),
            np.array([stop], dtype=np.int32),
            np.float32(case.scale),
            out,
        )
        assert np.array_equal(out, whole[start:stop])
