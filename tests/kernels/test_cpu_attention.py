"""The cpu attention kernel against the float64 reference: every length, shape and poison that paging can bring."""

from __future__ import annotations

import numpy as np
import pytest
from paged_case import PagedCase

from copyhold.kernels import cpu


@pytest.mark.parametrize("length", [1, 15, 16, 17, 255, 256, 257, 2049])
@pytest.mark.parametrize("phase", ["decode", "last_rows"])
def test_one_sequence_of_any_length(length: int, phase: str) -> None:
    PagedCase([length], [1 if phase == "decode" else min(length, 40)]).assert_matches_reference()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_a_whole_prompt_in_one_shot(length: int) -> None:
    PagedCase([length], [length]).assert_matches_reference()


def test_a_sequence_without_rows_in_the_step_is_skipped() -> None:
    PagedCase([5, 0, 33], [0, 0, 33]).assert_matches_reference()


def test_an_empty_step_writes_nothing() -> None:
    assert PagedCase([], []).run().shape[0] == 0
    assert PagedCase([17, 3], [0, 0]).run().shape[0] == 0


def test_ragged_decode_reads_no_unused_slot_and_no_padded_cell() -> None:
    PagedCase([64, 63, 17, 1], [1, 1, 1, 1]).assert_matches_reference()


def test_prefill_and_decode_mix_in_one_step() -> None:
    PagedCase([64, 63, 17, 1, 90], [1, 40, 17, 1, 7]).assert_matches_reference()


@pytest.mark.parametrize("group", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 72, 128])
def test_grouped_heads_and_head_dims(group: int, head_dim: int) -> None:
    PagedCase([40, 300], [9, 1], group=group, head_dim=head_dim, kv_heads=2).assert_matches_reference()


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_allocator_blocks_split_into_tiles(block_size: int) -> None:
    PagedCase([100, 31, 65], [20, 1, 65], block_size=block_size).assert_matches_reference()


def test_large_scores_do_not_overflow() -> None:
    case = PagedCase([300], [30])
    case.q *= 200
    # Scores near 1000 carry a float32 rounding of 6e-5 each, which the exponential turns into a relative error.
    case.assert_matches_reference(tolerance=1e-3)


def test_a_row_has_the_same_bits_whatever_shares_its_step() -> None:
    together = PagedCase([300], [300], seed=3)
    whole = together.run()
    for row in (0, 15, 16, 37, 99, 255, 256, 299):
        alone = PagedCase([300], [300], seed=3)
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
    case = PagedCase([100], [100], seed=5)
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
