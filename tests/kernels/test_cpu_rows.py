"""Row writing, rotation, norms and activation against the float64 reference; compilation happens only in warm-up."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import njit

from copyhold.kernels import cpu, cpu_rows, reference
from copyhold.kernels.pool import KVPool

RNG_SEED = 7


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(RNG_SEED + sum(shape)).standard_normal(shape, dtype=np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


def test_written_rows_read_back_and_nothing_else_changes() -> None:
    pool = KVPool(2, 4, 3, 16, 32)
    k, v = normal(5, 3, 16), normal(5, 3, 16)
    slots = np.array([0, 17, 31, 64, 127], dtype=np.int64)
    cpu.write_rows(pool.k[1], pool.v[1], k, v, slots)
    got_k, got_v = pool.read_rows(1, slots // 32, slots % 32)
    assert np.array_equal(got_k, k) and np.array_equal(got_v, v)
    assert np.count_nonzero(pool.k) == k.size and np.count_nonzero(pool.v) == v.size


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (6, 2, 64), (4, 4, 16), (8, 2, 128)])
def test_fused_projection_is_split_rotated_and_stored(heads: int, kv_heads: int, head_dim: int) -> None:
    rows = 7
    pool = KVPool(1, 3, kv_heads, head_dim)
    qkv = normal(rows, (heads + 2 * kv_heads) * head_dim)
    angles = np.outer(np.arange(50), 0.01 * np.arange(1, head_dim // 2 + 1))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([0, 1, 2, 30, 31, 48, 49], dtype=np.int64)
    slots = np.array([0, 15, 16, 17, 31, 32, 47], dtype=np.int64)
    q = np.empty((rows, heads, head_dim), dtype=np.float32)
    cpu.rotate_and_write(qkv, cos, sin, positions, slots, pool.k[0], pool.v[0], q)
    split = qkv.reshape(rows, heads + 2 * kv_heads, head_dim)
    c, s = cos[positions], sin[positions]
    stored_k, stored_v = pool.read_rows(0, slots // 16, slots % 16)
    np.testing.assert_allclose(q, reference.rotate(split[:, :heads], c, s), atol=1e-6)
    np.testing.assert_allclose(
        stored_k, reference.rotate(split[:, heads : heads + kv_heads], c, s), atol=1e-6
    )
    assert np.array_equal(stored_v, split[:, heads + kv_heads :])


@pytest.mark.parametrize("hidden", [16, 64, 100, 576])
def test_residual_and_norm(hidden: int) -> None:
    x, delta, weight = normal(3, hidden), normal(4, hidden)[:3].copy(), normal(hidden)
    total = x + delta
    out = np.empty_like(x)
    cpu.add_rms_norm(x, delta, weight, np.float32(1e-5), out)
    assert np.array_equal(x, total)
    np.testing.assert_allclose(out, reference.rms_norm(total, weight, 1e-5), atol=1e-5, rtol=1e-5)


def test_gated_activation_over_the_whole_range() -> None:
    gate_up = normal(4, 2 * 48) * 4
    gate_up[0, :4] = [-1e4, 1e4, -90.0, 90.0]
    out = np.empty((4, 48), dtype=np.float32)
    cpu.silu_mul(gate_up, out)
    np.testing.assert_allclose(out, reference.silu_mul(gate_up), atol=1e-6, rtol=2e-6)


def test_nothing_compiles_after_warm_up() -> None:
    cpu.warm_up()
    before = cpu.compile_counts()
    pool = KVPool(2, 9, 3, 64, 32)
    slots = np.arange(40, dtype=np.int64)
    cpu.write_rows(pool.k[1], pool.v[1], normal(40, 3, 64), normal(40, 3, 64), slots)
    q = np.empty((40, 9, 64), dtype=np.float32)
    cos = normal(100, 32)
    cpu.rotate_and_write(normal(40, 15 * 64), cos, cos, slots, slots, pool.k[0], pool.v[0], q)
    tables = np.arange(18, dtype=np.int32).reshape(1, 18)
    starts, lens = np.array([0, 40], dtype=np.int32), np.array([40], dtype=np.int32)
    cpu.paged_attention(q, pool.k[0], pool.v[0], tables, starts, lens, np.float32(0.1), np.empty_like(q))
    cpu.add_rms_norm(normal(8, 576), normal(8, 576), normal(576), np.float32(1e-5), normal(8, 576))
    cpu.silu_mul(normal(8, 64), normal(8, 32))
    narrow = to_bfloat16(normal(8, 64))
    cpu.add_rms_norm(normal(8, 64), narrow, normal(64), np.float32(1e-5), np.empty_like(narrow))
    cpu.silu_mul(narrow, to_bfloat16(normal(8, 32)))
    qkv = to_bfloat16(normal(40, 15 * 64))
    cpu.rotate_and_write(qkv, cos, cos, slots, slots, pool.k[0], pool.v[0], q)
    attended = np.empty(q.shape, dtype=np.uint16)
    cpu.paged_attention(q, pool.k[0], pool.v[0], tables, starts, lens, np.float32(0.1), attended)
    assert cpu.compile_counts() == before


def test_a_rank_compiles_these_signatures_and_no_more() -> None:
    """In a process of its own, since other tests of this one call the kernels with every storage type."""
    script = (
        "import json; from copyhold.kernels import cpu; cpu.warm_up();"
        "print(json.dumps({name: count for name, (count, _) in cpu.compile_counts().items()}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "write_rows": 1,
        "rotate_and_write": 2,
        "copy_rows": 1,
        "zero_blocks": 1,
        "count_nonzero": 1,
        "add_rms_norm": 3,
        "silu_mul": 2,
        "attention": 2,
        "attention_partitions": 1,
        "merge_states": 1,
        "merge_rows": 1,
        "narrow_rows": 1,
    }


def test_bfloat16_activations_give_the_rounded_results_of_float32() -> None:
    gate_up, delta, x = normal(4, 96) * 4, normal(4, 48), normal(5, 48)[:4].copy()
    gate_up, delta = from_bfloat16(to_bfloat16(gate_up)), from_bfloat16(to_bfloat16(delta))
    wide, narrow = np.empty((4, 48), dtype=np.float32), np.empty((4, 48), dtype=np.uint16)
    cpu.silu_mul(gate_up, wide)
    cpu.silu_mul(to_bfloat16(gate_up), narrow)
    assert np.array_equal(narrow, to_bfloat16(wide))
    same = x.copy()
    cpu.add_rms_norm(x, delta, normal(48), np.float32(1e-5), wide)
    cpu.add_rms_norm(same, to_bfloat16(delta), normal(48), np.float32(1e-5), narrow)
    assert np.array_equal(x, same) and np.array_equal(narrow, to_bfloat16(wide))
    pools = KVPool(1, 3, 3, 16), KVPool(1, 3, 3, 16)
    qkv, rows = from_bfloat16(to_bfloat16(normal(7, 15 * 16))), np.arange(7, dtype=np.int64)
    queries = np.empty((2, 7, 9, 16), dtype=np.float32)
    for pool, projected, q in zip(pools, (qkv, to_bfloat16(qkv)), queries, strict=True):
        cpu.rotate_and_write(projected, normal(9, 8), normal(9, 8), rows, rows, pool.k[0], pool.v[0], q)
    assert np.array_equal(queries[0], queries[1]) and np.array_equal(pools[0].k, pools[1].k)
    assert np.array_equal(pools[0].v, pools[1].v)


def test_bfloat16_output_of_attention_rounds_ties_to_even_and_keeps_nan() -> None:
    pool = KVPool(1, 1, 1, 16)
    values = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, -3.4e38, 1e-40, np.inf, -np.inf, np.nan, 0.0]
    pool.v[0, 0, 0, 0, : len(values)] = values
    q, out = normal(1, 1, 16), np.empty((1, 1, 16), dtype=np.uint16)
    one, table = np.array([0, 1], dtype=np.int32), np.zeros((1, 1), dtype=np.int32)
    cpu.paged_attention(q, pool.k[0], pool.v[0], table, one, one[1:], np.float32(1), out)
    expected = torch.from_numpy(pool.v[0, 0, 0, 0]).bfloat16().float().numpy()
    np.testing.assert_array_equal(from_bfloat16(out[0, 0]), expected)


@pytest.mark.parametrize("storage", [np.float32, np.uint16, np.int16])
def test_compiled_borders_of_a_storage_type_are_those_of_the_interface(storage: type) -> None:
    """Plain Python says what the compiled conversion does, value by value."""
    narrow, widen = cpu_rows._narrow, cpu_rows._widen
    kept = np.zeros(1, storage)
    compiled = njit(lambda value, array: narrow(value, array)), njit(lambda value: widen(value))
    for value in np.array([0, -0.0, 1, 1 / 3, -2.5e-5, 65504, 1.00390625, 1.01171875, np.inf], np.float32):
        stored = narrow(value, kept)
        assert compiled[0](value, kept) == stored
        assert compiled[1](storage(stored)) == widen(storage(stored))
