"""Windows, soft caps, split reductions, 16-bit K/V, uneven heads and far tiles against float64; and faults that are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from paged_case import TOLERANCE_FP32, PagedCase, poison

from copyhold.kernels import cpu, reference
from copyhold.kernels.choices import KVDtype
from copyhold.kernels.errors import PartitionNotWholeTiles
from copyhold.kernels.interface import KV_DTYPES, widen_rows
from copyhold.kernels.pool import KVPool

RAGGED = [64, 63, 17, 1]
_FIXTURES = json.loads((Path(__file__).parents[1] / "data" / "fixtures.json").read_text())
FACTS = {entry["id"]: (entry["inputs"], entry["expected"]) for entry in _FIXTURES["fixtures"]}

STORED_TOLERANCE = {"float32": TOLERANCE_FP32, "float16": 4e-3, "bfloat16": 4e-2}
"""Of the output against float64 over the rows as they were before they were stored."""


@pytest.mark.parametrize("window", [1, 2, 5, 15, 16, 17, 100, 255, 256, 257, 5000])
@pytest.mark.parametrize("contexts", [RAGGED, [2049]])
def test_a_window_of_any_width(window: int, contexts: list[int]) -> None:
    queries = [min(context, 9) for context in contexts]
    PagedCase(contexts, queries).assert_matches_reference(window=window)


@pytest.mark.parametrize("window", [3, 16, 40])
def test_rows_before_a_window_may_be_gone(window: int) -> None:
    case = PagedCase([300], [1])
    expected = case.expected(window=window)
    gone = (300 - window) // 16
    blocks = case.batch.block_tables[0, :gone]
    case.pool.k[:, blocks] = np.nan
    case.pool.v[:, blocks] = np.nan
    case.batch.block_tables[0, :gone] = 2**30
    out = np.empty_like(case.q)
    where = (case.tile_tables, case.batch.seq_starts, case.batch.context_lens, np.float32(case.scale), out)
    cpu.paged_attention(case.q, case.pool.k[0], case.pool.v[0], *where, window=window)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE_FP32)


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
def test_capped_scores(soft_cap: float) -> None:
    case = PagedCase([*RAGGED, 300], [1, 30, 17, 1, 5])
    case.q *= 8
    assert np.abs(case.expected(soft_cap=soft_cap) - case.expected()).max() > 1e-3
    case.assert_matches_reference(1e-4, soft_cap=soft_cap)
    case.assert_matches_reference(1e-4, soft_cap=soft_cap, window=7)


@pytest.mark.parametrize("context", [1, 511, 512, 513, 2048, 2049])
@pytest.mark.parametrize("partition", [16, 512])
def test_partitions_merge_to_the_whole(context: int, partition: int) -> None:
    case = PagedCase([context, 5], [1, 1])
    np.testing.assert_allclose(case.run_split(partition), case.expected(), atol=TOLERANCE_FP32)


def test_partitions_of_windows_and_prompts() -> None:
    case = PagedCase([300, 63, 1], [40, 63, 1])
    for window in (0, 3, 70):
        split = case.run_split(64, window=window, soft_cap=20.0)
        np.testing.assert_allclose(
            split, case.expected(window=window, soft_cap=20.0), atol=TOLERANCE_FP32, rtol=TOLERANCE_FP32
        )


def test_f085_partitions_of_2049_tokens() -> None:
    given, expected = FACTS["F085"]
    case = PagedCase([given["T"]], [1])
    assert -(-given["T"] // given["partition"]) == expected["16"]["partitions"]
    np.testing.assert_allclose(case.run_split(given["partition"]), case.expected(), atol=TOLERANCE_FP32)
    for partition in (0, -16, 8, 24):
        with pytest.raises(PartitionNotWholeTiles) as refused:
            PagedCase([5], [1]).run_split(partition)
        assert refused.value.reason == "partition_not_multiple_of_block"


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
def test_every_storage_type(kv_dtype: KVDtype, block_size: int) -> None:
    case = PagedCase([*RAGGED, 300], [1, 30, 17, 1, 5], kv_dtype=kv_dtype, block_size=block_size, head_dim=40)
    case.assert_matches_reference()
    case.assert_matches_reference(window=10)
    wide = PagedCase([*RAGGED, 300], [1, 30, 17, 1, 5], block_size=block_size, head_dim=40)
    assert all(np.array_equal(a, b) for a, b in zip(case.rows, wide.rows, strict=True))
    assert np.abs(case.run() - wide.expected()).max() < STORED_TOLERANCE[kv_dtype]


@pytest.mark.parametrize("split", [(2, 1), (3, 2, 2), (1, 1, 1, 1)])
def test_uneven_ranks_compute_the_heads_they_hold(split: tuple[int, ...]) -> None:
    whole = PagedCase(RAGGED, [1, 20, 17, 1], kv_heads=sum(split))
    expected, first = whole.run(), 0
    for held in split:
        k = np.ascontiguousarray(whole.pool.k[0][:, first : first + held])
        v = np.ascontiguousarray(whole.pool.v[0][:, first : first + held])
        heads = slice(first * 3, (first + held) * 3)
        q = np.ascontiguousarray(whole.q[:, heads])
        out, lens = np.empty_like(q), whole.batch.context_lens
        cpu.paged_attention(
            q, k, v, whole.tile_tables, whole.batch.seq_starts, lens, np.float32(whole.scale), out
        )
        assert np.array_equal(out, expected[:, heads])
        first += held


def test_a_row_keeps_its_bits_when_windows_and_strangers_share_its_step() -> None:
    together = PagedCase([300, 90], [300, 3], seed=3)
    whole = together.run(window=50)
    for row in (0, 15, 49, 50, 63, 255, 256, 299):
        out = np.empty_like(together.q[:1])
        one, lens = np.array([0, 1], dtype=np.int32), np.array([row + 1], dtype=np.int32)
        where = (together.tile_tables[:1], one, lens, np.float32(together.scale), out)
        pool = together.pool
        cpu.paged_attention(together.q[row : row + 1].copy(), pool.k[0], pool.v[0], *where, window=50)
        assert np.array_equal(out[0], whole[row])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_tile_past_two_to_the_31_elements_is_found(kv_dtype: KVDtype) -> None:
    kv_heads, head_dim, far = 8, 128, 140_000
    storage = KVPool(1, 1, 1, 8, kv_dtype=kv_dtype).k.dtype
    tile_elements = kv_heads * head_dim * 16
    assert far * tile_elements > 2**31
    # Memory that is never touched is never made real.
    k = np.empty((far + 1, kv_heads, head_dim, 16), dtype=storage)
    v = np.empty((far + 1, kv_heads, 16, head_dim), dtype=storage)
    rows = np.random.default_rng(1).standard_normal((2, 16, kv_heads, head_dim), dtype=np.float32)
    cpu.write_rows(k, v, rows[0], rows[1], far * 16 + np.arange(16))
    near = KVPool(1, 1, kv_heads, head_dim, kv_dtype=kv_dtype)
    cpu.write_rows(near.k[0], near.v[0], rows[0], rows[1], np.arange(16))
    assert np.array_equal(k[far], near.k[0, 0]) and np.array_equal(v[far], near.v[0, 0])
    q = np.random.default_rng(2).standard_normal((1, kv_heads, head_dim), dtype=np.float32)
    found = []
    for keys, values, tile in ((k, v, far), (near.k[0], near.v[0], 0)):
        out, one = np.empty_like(q), np.array([0, 1], dtype=np.int32)
        lens, table = np.array([16], dtype=np.int32), np.array([[tile]], dtype=np.int32)
        cpu.paged_attention(q, keys, values, table, one, lens, np.float32(0.1), out)
        found.append(out)
    assert np.array_equal(*found)


def faulty(case: PagedCase, **changed: Any) -> np.ndarray:
    """The kernel's output of a case of which one input is wrong."""
    batch, out = case.batch, np.empty_like(case.q)
    given = {
        "tile_tables": case.tile_tables,
        "seq_starts": batch.seq_starts,
        "context_lens": batch.context_lens,
        "scale": np.float32(case.scale),
        "out": out,
    }
    cpu.paged_attention(case.q, case.pool.k[0], case.pool.v[0], **(given | changed))
    return out


@pytest.mark.parametrize("fault", ["one_row_past", "stale_table", "window_one_wide", "window_one_narrow"])
def test_a_planted_fault_is_far_outside_the_tolerance(fault: str) -> None:
    case = PagedCase([90, 61], [1, 1])
    good = case.run(window=20)
    np.testing.assert_allclose(good, case.expected(window=20), atol=TOLERANCE_FP32)
    if fault == "one_row_past":
        bad = faulty(case, context_lens=case.batch.context_lens + np.array([0, 1], dtype=np.int32), window=20)
        assert np.isnan(bad[1]).all()
        return
    if fault == "stale_table":
        stale = case.tile_tables
        stale[1, 3] = stale[0, 3]
        bad = faulty(case, tile_tables=stale, window=20)
    else:
        bad = faulty(case, window=21 if fault == "window_one_wide" else 19)
    assert np.abs(bad - good).max() > 100 * TOLERANCE_FP32


def test_a_partition_left_out_of_the_merge_is_far_outside_the_tolerance() -> None:
    case = PagedCase([90], [1])
    firsts, one = np.array([16], dtype=np.int32), case.batch.seq_starts
    out, lse = np.empty_like(case.q), np.empty(case.q.shape[:2], dtype=np.float32)
    where = (case.tile_tables, one, firsts, case.batch.context_lens, True, np.float32(case.scale))
    cpu.paged_attention_states(case.q, case.pool.k[0], case.pool.v[0], *where, out, lse)
    assert np.abs(out - case.expected()).max() > 100 * TOLERANCE_FP32


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 31, 32])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_exactly_the_valid_rows_are_copied_in_all_layers(rows: int, kv_dtype: KVDtype) -> None:
    pool = KVPool(3, 4, 2, 16, 32, kv_dtype)
    poison(pool)
    written = np.random.default_rng(rows).standard_normal((2, 32, 2, 16), dtype=np.float32)
    for layer in range(3):
        cpu.write_rows(pool.k[layer], pool.v[layer], written[0] + layer, written[1] - layer, np.arange(32))
    before = pool.k.copy(), pool.v.copy()
    pool.copy_rows([0], [3], [rows])
    offsets = np.arange(32)
    for layer in range(3):
        source = pool.read_rows(layer, np.zeros(32, dtype=np.int64), offsets)
        target = pool.read_rows(layer, np.full(32, 3), offsets)
        for mine, other in zip(source, target, strict=True):
            assert np.array_equal(mine[:rows], other[:rows]) and np.isnan(other[rows:]).all()
    assert np.array_equal(before[0][:, :6], pool.k[:, :6], equal_nan=pool.kv_dtype == "float32")
    assert np.array_equal(before[1][:, :6], pool.v[:, :6], equal_nan=pool.kv_dtype == "float32")


@pytest.mark.parametrize("head_dim", [16, 40, 128])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_whole_tiles_are_written_with_the_bits_of_single_rows(kv_dtype: KVDtype, head_dim: int) -> None:
    rows = np.random.default_rng(8).standard_normal((2, 37, 3, head_dim), dtype=np.float32)
    rows[:, 3, 1, :4] = [np.nan, np.inf, -0.0, 1e-42]
    slots = np.concatenate([np.arange(48, 64), np.arange(16, 32)[::-1], np.arange(3, 8)])
    pools = [KVPool(1, 4, 3, head_dim, kv_dtype=kv_dtype) for _ in range(2)]
    cpu.write_rows(pools[0].k[0], pools[0].v[0], rows[0], rows[1], slots)
    for at in range(len(slots)):
        one = rows[:, at : at + 1]
        cpu.write_rows(pools[1].k[0], pools[1].v[0], one[0].copy(), one[1].copy(), slots[at : at + 1])
    assert pools[0].k.tobytes() == pools[1].k.tobytes() and pools[0].v.tobytes() == pools[1].v.tobytes()


def test_the_bits_of_sixteen_bit_rows_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.array(
        [
            0.0,
            -0.0,
            1.0,
            1 + 2**-8,
            1 + 3 * 2**-8,
            1 + 2**-11,
            65504,
            65520,
            1e-7,
            6e-8,
            3e38,
            np.inf,
            np.nan,
        ],
        dtype=np.float32,
    )
    padded = np.zeros(16, dtype=np.float32)
    padded[: len(values)] = values
    for kv_dtype in cast(tuple[KVDtype, ...], ("bfloat16", "float16")):
        pool = KVPool(1, 1, 1, 16, kv_dtype=kv_dtype)
        rows = padded.reshape(1, 1, 16)
        cpu.write_rows(pool.k[0], pool.v[0], rows, rows, np.array([7]))
        expected = torch.from_numpy(padded).to(getattr(torch, kv_dtype)).float().numpy()
        np.testing.assert_array_equal(widen_rows(pool.v[0, 0, 0, 7]), expected)
        np.testing.assert_array_equal(widen_rows(pool.k[0, 0, 0, :, 7].copy()), expected)


def test_f090_a_tree_merged_path_by_path_equals_the_single_softmax() -> None:
    """Nineteen (query, key) pairs over ten stored rows; eight partial rows of 14 bytes stand between the phases."""
    given, fact = FACTS["F090"]
    rng = np.random.default_rng(FACTS["F093"][0]["seed_rng"])
    rows, covers = given["chunk_rows"], given["coverage"]
    k = {name: rng.standard_normal((count, 2)) for name, count in rows.items()}
    v = {name: rng.standard_normal((count, 3)) for name, count in rows.items()}
    q = rng.standard_normal((4, 1, 2))
    paths = [[name for name, (low, high) in covers.items() if low <= seq < high] for seq in range(4)]
    assert paths == fact["paths"]
    assert [sum(rows[name] for name in path) for path in paths] == fact["path_lengths"]
    assert sum(fact["path_lengths"]) == fact["logical_pairs"] and sum(rows.values()) == fact["physical_rows"]
    shared = [high - low for low, high in covers.values() if high - low > 1]
    partial_row_bytes = given["state_bytes"] * 2 + given["d_v"] * given["scalar_bytes"]
    assert (
        sum(shared) == fact["partial_rows"]
        and sum(shared) * partial_row_bytes == fact["partial_buffer_bytes"]
    )

    def state(seq: int, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        scores = np.concatenate([k[name] for name in names]) @ q[seq, 0]
        weights = np.exp(scores - scores.max())
        out = weights @ np.concatenate([v[name] for name in names]) / weights.sum()
        return out.reshape(1, 1, 3), np.array([[scores.max() + np.log(weights.sum())]])

    apart = 0.0
    for seq, path in enumerate(paths):
        whole, mass = state(seq, path)
        merged = np.zeros((1, 1, 3)), np.full((1, 1), -np.inf)
        for name in path:
            merged = reference.merge_states(*merged, *state(seq, [name]))
        assert np.abs(merged[0] - whole).max() < 2e-15 and np.abs(merged[1] - mass).max() < 2e-15
        plain = np.mean([state(seq, [name])[0] for name in path], axis=0)
        apart = max(apart, np.abs(plain - whole).max())
    assert apart > 1e-3
