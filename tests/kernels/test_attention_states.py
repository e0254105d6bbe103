"""Partial attention states and their merge, against the float64 reference: ranges, sharing, identity, order."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.kernels import cpu, reference
from copyhold.kernels.pool import KVPool

TOLERANCE_FP32 = 2e-5
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 32


class Scene:
    """One pool whose tokens of sequence s lie in permuted blocks; whatever no sequence holds is NaN."""

    def __init__(self, contexts: list[int], queries: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        blocks = [-(-context // 16) for context in contexts]
        self.pool = KVPool(1, sum(blocks) + 2, KV_HEADS, HEAD_DIM)
        self.pool.k.fill(np.nan)
        self.pool.v.fill(np.nan)
        free = rng.permutation(self.pool.num_blocks).astype(np.int32)
        self.tables = np.full((len(contexts), max(blocks, default=0) + 1), 2**30, dtype=np.int32)
        for seq, (context, count) in enumerate(zip(contexts, blocks, strict=True)):
            self.tables[seq, :count], free = free[:count], free[count:]
            p = np.arange(context)
            rows = rng.standard_normal((2, context, KV_HEADS, HEAD_DIM), dtype=np.float32)
            slots = self.tables[seq][p // 16].astype(np.int64) * 16 + p % 16
            cpu.write_rows(self.pool.k[0], self.pool.v[0], rows[0], rows[1], slots)
        self.starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        self.contexts = np.array(contexts, dtype=np.int32)
        self.q = rng.standard_normal((sum(queries), KV_HEADS * GROUP, HEAD_DIM), dtype=np.float32)
        self.scale = 1 / math.sqrt(HEAD_DIM)

    def states(
        self, firsts: list[int], lasts: list[int] | None = None, causal: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """The cpu kernel's states, checked against the reference's."""
        lens = self.contexts if lasts is None else np.array(lasts, dtype=np.int32)
        first_rows = np.array(firsts, dtype=np.int32)
        out = np.full_like(self.q, np.nan)
        lse = np.full(self.q.shape[:2], np.nan, dtype=np.float32)
        where = (self.tables, self.starts, first_rows, lens, causal)
        k, v = self.pool.k[0], self.pool.v[0]
        cpu.paged_attention_states(self.q, k, v, *where, np.float32(self.scale), out, lse)
        expected = reference.paged_attention_states(self.q, self.pool, 0, *where, self.scale)
        np.testing.assert_allclose(out, expected[0], atol=TOLERANCE_FP32, rtol=TOLERANCE_FP32)
        np.testing.assert_allclose(lse, expected[1], atol=TOLERANCE_FP32, rtol=TOLERANCE_FP32)
        return out, lse


@pytest.mark.parametrize("first", [0, 1, 15, 16, 17, 63, 64, 255, 256, 257, 299])
@pytest.mark.parametrize("causal", [False, True])
def test_a_range_may_begin_anywhere(first: int, causal: bool) -> None:
    Scene([300, 300], [1, 7]).states([first, first], causal=causal)


@pytest.mark.parametrize("rows", [1, 2, 10, 11, 33, 70])
def test_many_query_rows_share_one_range(rows: int) -> None:
    Scene([290], [rows]).states([0], causal=False)


def test_rows_before_a_range_see_nothing_of_it() -> None:
    out, lse = Scene([40], [40]).states([20])
    assert np.isneginf(lse[:20]).all() and not out[:20].any() and np.isfinite(lse[20:]).all()


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_range_is_the_flagged_identity_and_never_nan(causal: bool) -> None:
    scene = Scene([33, 0, 48], [2, 0, 3])
    for firsts, lasts in (([33, 0, 48], None), ([7, 0, 31], [7, 0, 31])):
        out, lse = scene.states(firsts, lasts, causal=causal)
        assert not out.any() and np.isneginf(lse).all()


def test_states_over_a_cut_merge_to_the_whole() -> None:
    scene = Scene([64, 63, 17, 2049], [1, 1, 1, 1])
    whole, mass = scene.states([0, 0, 0, 0])
    cuts = [16, 63, 0, 1000]
    left, left_mass = scene.states([0, 0, 0, 0], cuts, causal=False)
    right, right_mass = scene.states(cuts)
    cpu.merge_states(left, left_mass, right, right_mass)
    np.testing.assert_allclose(left, whole, atol=TOLERANCE_FP32)
    np.testing.assert_allclose(left_mass, mass, atol=TOLERANCE_FP32)


def test_averaging_outputs_or_skipping_the_merge_is_far_from_the_whole() -> None:
    scene = Scene([200], [1])
    whole, _ = scene.states([0])
    left, _ = scene.states([0], [16], causal=False)
    right, _ = scene.states([16])
    assert np.abs((left + right) / 2 - whole).max() > 1e-2
    assert np.abs(right - whole).max() > 1e-2


def test_an_empty_state_changes_no_bit_on_either_side() -> None:
    scene = Scene([50], [3])
    some, mass = scene.states([0])
    none, nothing = scene.states([50])
    left, left_mass = some.copy(), mass.copy()
    cpu.merge_states(left, left_mass, none, nothing)
    assert np.array_equal(left, some) and np.array_equal(left_mass, mass)
    right, right_mass = none.copy(), nothing.copy()
    cpu.merge_states(right, right_mass, some, mass)
    assert np.array_equal(right, some) and np.array_equal(right_mass, mass)
    cpu.merge_states(none, nothing, none.copy(), nothing.copy())
    assert not none.any() and np.isneginf(nothing).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 90), min_size=2, max_size=6),
    st.permutations(range(6)),
    st.sampled_from([0.0, 1e4]),
)
def test_any_order_of_merges_gives_the_single_softmax(
    lengths: list[int], order: list[int], offset: float
) -> None:
    scene = Scene([sum(lengths)], [1], seed=len(lengths))
    whole, mass = scene.states([0], causal=False)
    edges = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    parts = [scene.states([low], [high], causal=False) for low, high in itertools.pairwise(edges)]
    shifted = [(out, (lse + np.float32(offset))) for out, lse in parts]
    (out, lse), *others = [shifted[part] for part in order if part < len(shifted)]
    wide_out, wide_lse = out.astype(np.float64), lse.astype(np.float64)
    for other_out, other_lse in others:
        wide_out, wide_lse = reference.merge_states(wide_out, wide_lse, other_out, other_lse)
        cpu.merge_states(out, lse, other_out, other_lse)
    # A mass near 1e4 carries a float32 rounding of 5e-4.
    tolerance = TOLERANCE_FP32 if not offset else 2e-3
    np.testing.assert_allclose(out, wide_out, atol=tolerance)
    np.testing.assert_allclose(out, whole, atol=tolerance)
    np.testing.assert_allclose(lse - np.float32(offset), mass, atol=tolerance)


def test_a_row_of_a_shared_range_has_the_same_bits_alone() -> None:
    together = Scene([270], [45])
    out, lse = together.states([5], causal=False)
    for row in (0, 1, 9, 31, 44):
        alone = Scene([270], [45])
        alone.q, alone.starts = alone.q[row : row + 1].copy(), np.array([0, 1], dtype=np.int32)
        one, mass = alone.states([5], causal=False)
        assert np.array_equal(one[0], out[row]) and np.array_equal(mass[0], lse[row])
