"""What the Triton kernels must compute, run by Triton's interpreter in a process of its own (``TRITON_INTERPRET=1``).

`CASES` is plain data, so that a test can name its cases without loading Triton. Run as a script it runs them all and prints one
JSON object: name -> null, or why it failed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton_bfloat16

from copyhold.kernels import reference
from copyhold.kernels.batch import StepBatch
from copyhold.kernels.triton_config import AttentionConfig, TileConfig
from copyhold.kernels.triton_plan import AttentionPlan, Segment, plan_attention

SMALL = AttentionConfig(TileConfig(16, 32, 1, 1), TileConfig(32, 32, 1, 1), 64)
"""Tiles that make short contexts cross every edge."""
OUT_OF_RANGE = 2**30
_MAP_NORESERVE = 0x4000
"""Linux; not in the mmap module before Python 3.12."""
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One step; `shared` sequences have their first `prefix` tokens in common, read in segments of `levels`."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    partition: int | None = None
    prefix: int = 0
    segments: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    scores: float = 1.0
    fault: str = ""


def _lengths() -> dict[str, Case]:
    found = {}
    for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65):
        rows = min(length, 20)
        for name, partition in (("whole", None), ("split", 32)):
            found[f"decode {length} {name}"] = Case((length,), (1,), partition=partition)
            found[f"prefill {length} {name}"] = Case((length,), (rows,), partition=partition)
    return found


def _features() -> dict[str, Case]:
    ragged, mixed = (64, 63, 17, 1), ((64, 63, 17, 1, 90), (1, 40, 17, 1, 7))
    found = {
        "ragged decode": Case(ragged, (1, 1, 1, 1), partition=32),
        "ragged decode, no split": Case(ragged, (1, 1, 1, 1)),
        "mixed prefill and decode": Case(*mixed, partition=32, kv_heads=2),
        "sequences without rows": Case((5, 0, 33), (0, 0, 33)),
        "2049 tokens, split at 512": Case((2049,), (1,), partition=512, head_dim=16),
        "exactly 4 partitions and 1 token": Case((257, 256), (1, 1), partition=64),
        "chunk over cached context": Case((120,), (24,), partition=64),
        "large scores": Case((90,), (10,), scores=60.0, partition=32),
        "MQA, 40 heads on one": Case((50,), (3,), group=40),
        "MHA": Case((50, 20), (3, 1), group=1, kv_heads=3),
        "windows that leave partitions empty": Case((100,), (40,), window=5, partition=32),
        "window with a shared prefix": Case((70, 66), (1, 1), window=20, prefix=48, partition=32),
    }
    for block_size in (16, 32, 64):
        for partition in (None, 64):
            name = f"allocator blocks of {block_size}, split {partition}"
            found[name] = Case((100, 31, 65), (20, 1, 65), block_size=block_size, partition=partition)
    for head_dim in (8, 40, 64, 72, 96, 128):
        found[f"head dim {head_dim}"] = Case((40, 33), (9, 1), group=3, head_dim=head_dim, partition=32)
    for window in (1, 3, 15, 16, 17, 33, 500):
        found[f"window {window}"] = Case((70, 34, 9), (20, 1, 9), window=window)
        found[f"window {window}, split"] = Case((70, 34, 9), (20, 1, 9), window=window, partition=32)
    for cap in (0.5, 30.0):
        found[f"soft cap {cap}"] = Case((50, 17), (5, 1), soft_cap=cap, scores=20.0, partition=32)
    for dtype in ("float16", "bfloat16"):
        found[f"{dtype} decode"] = Case(ragged, (1, 1, 1, 1), dtype=dtype, head_dim=64, partition=32)
        found[f"{dtype} mixed"] = Case(*mixed, dtype=dtype, group=4)
        found[f"{dtype} window and cap"] = Case(
            (70, 34), (20, 1), dtype=dtype, window=17, soft_cap=8.0, partition=32
        )
        found[f"{dtype} shared"] = Case(
            (52, 49, 61), (1, 1, 3), dtype=dtype, prefix=48, segments=_one_level(3)
        )
    return found


def _one_level(sequences: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """A prefix of 48 tokens that all read together; the rest, to the end of each, alone."""
    return ((0, 48, tuple(range(sequences))), *((48, 0, (seq,)) for seq in range(sequences)))


def _shared() -> dict[str, Case]:
    contexts = (52, 49, 61, 50)
    levels = (
        (0, 16, (0, 1, 2, 3)),
        (16, 48, (0, 1)),
        (16, 48, (3, 2)),
        *((48, 0, (seq,)) for seq in range(4)),
    )
    return {
        "shared prefix, decode": Case(contexts, (1, 1, 1, 1), prefix=48, segments=_one_level(4)),
        "shared prefix, split too": Case(
            contexts, (1, 1, 1, 1), prefix=48, segments=_one_level(4), partition=32
        ),
        "shared prefix, prefill rows": Case(contexts, (4, 1, 13, 2), prefix=48, segments=_one_level(4)),
        "shared prefix, two levels": Case(contexts, (1, 1, 1, 1), prefix=48, segments=levels, kv_heads=2),
        "shared by 12": Case(
            (50,) * 12, (1,) * 12, prefix=48, segments=_one_level(12), partition=32, group=3
        ),
        "a prefix and nothing else": Case((48, 48), (1, 1), prefix=48, segments=((0, 48, (0, 1)),)),
    }


FAULTS = (
    "a row past validity",
    "a skipped merge",
    "a stale table",
    "a wrong window edge",
    "a doubled partition",
)
SPECIAL = (
    "write rows of any dtype and stride",
    "copy exactly the valid rows",
    "zero and count",
    "rows beyond 2^31 elements",
    "empty states are the identity",
    "merge in any order",
    "refusals write nothing",
    "the backend offers the interface",
)


def _faulty() -> dict[str, Case]:
    faulty = Case((70, 37), (1, 1), partition=32)
    return {
        f"caught: {fault}": dataclasses.replace(faulty, fault=fault, window=20 if "window" in fault else None)
        for fault in FAULTS
    }


CASES: dict[str, Case] = {**_lengths(), **_features(), **_shared(), **_faulty()}
NAMES = (*CASES, *SPECIAL)


class Step:
    """A case's pool, tables and queries; whatever is not a row that may be read is NaN."""

    def __init__(self, case: Case) -> None:
        from copyhold.kernels.triton_pool import TritonPool

        self.case = case
        rng = np.random.default_rng(len(case.contexts) + sum(case.contexts))
        size, needed = case.block_size, [-(-context // case.block_size) for context in case.contexts]
        self.pool = TritonPool(
            2, sum(needed) + 3, case.kv_heads, case.head_dim, case.block_size, case.dtype, "cpu"
        )
        for part in (self.pool.k, self.pool.v):
            part.fill_(math.nan)
        # Block 0, which a masked table cell reads as, is never used: it stays poisoned.
        free = 1 + rng.permutation(self.pool.num_blocks - 1).astype(np.int32)
        tables = np.full((len(case.contexts), max(needed, default=0) + 2), OUT_OF_RANGE, dtype=np.int32)
        for seq, count in enumerate(needed):
            tables[seq, :count], free = free[:count], free[count:]
            tables[seq, : case.prefix // size] = tables[0, : case.prefix // size]
        counts, lens = np.array(case.queries), np.array(case.contexts, dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.repeat(lens - counts - starts[:-1], counts) + np.arange(counts.sum())
        none = np.zeros(counts.sum(), dtype=np.int64)
        self.batch = StepBatch(none, positions, none, starts, lens, tables, np.zeros(0, np.int64))
        for seq, context in enumerate(case.contexts):
            oldest = max(0, context - case.queries[seq] - case.window + 1) if case.window else 0
            self._fill(rng, tables[seq], case.prefix if seq else oldest, context)
            if case.window and not case.prefix:
                tables[seq, : oldest // size] = OUT_OF_RANGE
        q = rng.standard_normal((counts.sum(), case.kv_heads * case.group, case.head_dim)) * case.scores
        self.q = torch.from_numpy(q).to(getattr(torch, case.dtype))
        self.scale = 1 / math.sqrt(case.head_dim)

    def _fill(self, rng: np.random.Generator, table: np.ndarray, start: int, stop: int) -> None:
        at = np.arange(start, stop)
        rows = torch.from_numpy(rng.standard_normal((2, at.size, self.case.kv_heads, self.case.head_dim)))
        slots = torch.from_numpy(table[at // self.case.block_size].astype(np.int64) * self.case.block_size)
        slots += torch.from_numpy(at % self.case.block_size)
        self.pool.write_rows(1, rows[0].float(), rows[1].float(), slots)

    def plan(self) -> AttentionPlan:
        case = self.case
        segments = [
            Segment(begin, end or case.contexts[members[0]], members)
            for begin, end, members in case.segments
            if (end or case.contexts[members[0]]) > begin
        ]
        window = case.window and case.window + (case.fault == "a wrong window edge")
        plan = plan_attention(
            self.batch,
            case.group,
            SMALL.for_group(case.group),
            window=window,
            segments=segments or None,
            partition_tokens=case.partition,
        )
        items = plan.launches[0].items
        if case.fault == "a row past validity":
            items[1, 4] += 1
        elif case.fault == "a skipped merge":
            plan.merge_starts[1] -= 1
        elif case.fault == "a doubled partition":
            items[1, 3:5] = items[0, 3:5]
        return plan

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Outputs and the keys that merged rows covered."""
        from copyhold.kernels.triton_step import AttentionShape, AttentionStep

        case, plan = self.case, self.plan()
        window = case.window
        if case.fault == "a row past validity":
            self.batch.positions[0] += 1
        if case.fault == "a stale table":
            self.batch.block_tables[0, 1] = self.batch.block_tables[1, 0]
        if case.fault == "a wrong window edge":
            window = (window or 0) + 1
        heads = (case.group * case.kv_heads, case.kv_heads, case.head_dim)
        shape = AttentionShape(*heads, self.scale, window, case.soft_cap)
        step = AttentionStep(self.batch, plan, shape, self.pool.device, self.pool.tiles_per_block)
        out = torch.full_like(self.q, math.nan)
        step.attend(self.q, self.pool.k[1], self.pool.v[1], out)
        return out.double().numpy(), step.key_counts.numpy()

    def expected(self) -> np.ndarray:
        """Float64 attention over the rows as the pool stores them, gathered by the reference."""
        case, q = self.case, self.q.double().numpy()
        out = np.zeros_like(q)
        for seq, context in enumerate(case.contexts):
            for row in range(*self.batch.seq_starts[seq : seq + 2].tolist()):
                stop = context - int(self.batch.seq_starts[seq + 1]) + row + 1
                start = max(0, stop - case.window) if case.window else 0
                k, v = self._rows(seq, start, stop)
                for head in range(q.shape[1]):
                    scores = k[:, head // case.group] @ q[row, head] * self.scale
                    if case.soft_cap:
                        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights @ v[:, head // case.group] / weights.sum()
        return out

    def _rows(self, seq: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        first = start // self.case.block_size
        skipped = first * self.case.block_size
        table = self.batch.block_tables[seq, first:]
        k, v = reference.gather_context(self.pool, 1, table, stop - skipped)  # pyright: ignore[reportArgumentType]
        return k[start - skipped :], v[start - skipped :]


def run_case(case: Case) -> None:
    step = Step(case)
    expected = step.expected()
    actual, keys = step.run()
    if case.fault:
        assert not np.allclose(actual, expected, atol=1e-3, rtol=1e-3), f"not noticed: {case.fault}"
        return
    tolerance = TOLERANCE[case.dtype] * max(1.0, case.scores / 4)
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)
    seen = np.minimum(step.batch.positions + 1, case.window or OUT_OF_RANGE)[:, None]
    assert ((keys == 0) | (keys == seen)).all(), "a row's states do not add up to the keys that it sees"
    if case.partition and max(case.contexts) > case.partition and not case.window:
        assert keys.any(), "nothing was split"


def write_rows_of_any_dtype_and_stride() -> None:
    from copyhold.kernels.triton_pool import TritonPool

    rng = np.random.default_rng(1)
    for dtype, kv_heads, head_dim, block_size in (
        ("float32", 3, 40, 32),
        ("float16", 2, 64, 16),
        ("bfloat16", 1, 8, 48),
    ):
        pool = TritonPool(2, 5, kv_heads, head_dim, block_size, dtype, "cpu")
        slots = rng.permutation(5 * block_size)[:23]
        fused = torch.from_numpy(rng.standard_normal((23, kv_heads * 2, head_dim))).float()
        # The interpreter cuts a bfloat16 off where a GPU rounds, so the rows are rounded before.
        fused = fused.to(getattr(torch, dtype)).float()
        k, v = fused[:, :kv_heads], fused[:, kv_heads:]
        pool.write_rows(1, k, v, torch.from_numpy(slots))
        read = pool.read_rows(1, slots // block_size, slots % block_size)
        for found, wanted in zip(read, (k, v), strict=True):
            np.testing.assert_array_equal(found, wanted.numpy())
        written = 2 * 23 * kv_heads * head_dim
        assert int((pool.k != 0).sum() + (pool.v != 0).sum()) == written


def copy_exactly_the_valid_rows() -> None:
    from copyhold.kernels.triton_pool import TritonPool

    for block_size in (16, 32):
        pool = TritonPool(2, 8, 2, 24, block_size, "float16", "cpu")
        noise = torch.randn(pool.k.shape).half()
        for part in (pool.k, pool.v):
            part.copy_(noise)
        before = pool._memory.clone()
        jobs = [(1, 4, block_size), (0, 5, 7), (2, 6, 1), (3, 7, 0)]
        pool.copy_rows(jobs)
        wanted = _by_rows(before, block_size)
        for source, target, rows in jobs:
            wanted[:, :, target, :, :rows] = wanted[:, :, source, :, :rows].clone()
        assert torch.equal(_by_rows(pool._memory, block_size), wanted)


def _by_rows(memory: torch.Tensor, block_size: int) -> torch.Tensor:
    """`[2, layers, blocks, kv_heads, block_size, head_dim]` of a pool's memory."""
    parts, layers, _, heads, tile, dim = memory.shape
    blocks = memory.reshape(parts, layers, -1, block_size // tile, heads, tile, dim)
    return blocks.transpose(3, 4).reshape(parts, layers, -1, heads, block_size, dim).clone()


def zero_and_count() -> None:
    from copyhold.kernels.triton_pool import TritonPool

    for dtype in ("float32", "bfloat16"):
        pool = TritonPool(3, 6, 2, 24, 32, dtype, "cpu")
        for part in (pool.k, pool.v):
            part.copy_(torch.randn(part.shape))
        memory = _by_rows(pool._memory, 32)
        bytes_of = memory.transpose(0, 2).contiguous().view(torch.uint8).numpy()
        assert pool.count_nonzero_bytes([4, 1]) == np.count_nonzero(bytes_of[[4, 1]])
        pool.zero_blocks([2, 5])
        assert pool.count_nonzero_bytes([2, 5]) == 0
        memory[:, :, [2, 5]] = 0
        assert torch.equal(_by_rows(pool._memory, 32), memory)
        pool.k[1, 4, 0, 0, 3] = -0.0
        assert pool.count_nonzero_bytes([2]) == 1, "a negative zero is a byte that is not zero"
        assert pool.count_nonzero_bytes([]) == 0


def rows_beyond_2_31_elements() -> None:
    """Block ids whose element offset needs 64 bits, over address space that is reserved and mostly never touched."""
    from copyhold.kernels.triton_pool import TritonPool

    case = Case((40,), (9,), partition=32, dtype="float16")
    step = Step(case)
    small, size = step.pool, 16 * case.head_dim
    blocks = 2**31 // size + 100
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = mmap.mmap(-1, 4 * blocks * size * 2, flags=flags)
    memory = torch.frombuffer(reserved, dtype=torch.float16).view(2, 2, blocks, 1, 16, case.head_dim)
    big = TritonPool(2, blocks, 1, case.head_dim, 16, "float16", "cpu", memory)
    moved = big.num_blocks - 1 - np.arange(small.num_blocks)
    for old, new in enumerate(moved.tolist()):
        memory[:, :, new] = small._memory[:, :, old]
    expected = step.expected()
    used = step.batch.block_tables < OUT_OF_RANGE
    step.batch.block_tables[used] = moved[step.batch.block_tables[used]]
    step.pool = big
    actual, _ = step.run()
    np.testing.assert_allclose(actual, expected, atol=2e-3, rtol=2e-3)
    last = big.num_blocks - 1
    rows = torch.ones(1, 1, case.head_dim)
    big.write_rows(1, rows, rows, torch.tensor([last * 16 + 3]))
    assert big.read_rows(1, np.array([last]), np.array([3]))[0].sum() == case.head_dim
    big.zero_blocks([last])
    assert big.count_nonzero_bytes([last]) == 0
    big.copy_rows([(int(moved[0]) - 1, last, 4)])


def _merge(states: list[tuple[np.ndarray, float, int]], heads: int = 1) -> tuple[np.ndarray, float, int]:
    from copyhold.kernels.triton_attention import merge_states
    from copyhold.kernels.triton_launch import launch

    dim = states[0][0].size
    rows = torch.from_numpy(np.stack([state[0] for state in states])).float().view(-1, heads, dim)
    lse = torch.tensor([[state[1]] for state in states], dtype=torch.float32)
    keys = torch.tensor([[state[2]] for state in states], dtype=torch.int32)
    out, out_lse, out_keys = torch.empty(1, 1, dim), torch.empty(1, 1), torch.empty(1, 1, dtype=torch.int32)
    order = torch.arange(len(states), dtype=torch.int32)
    bounds = torch.tensor([0, len(states)], dtype=torch.int32)
    launch(
        merge_states,
        (1, 1),
        rows,
        lse,
        keys,
        out,
        out_lse,
        out_keys,
        torch.zeros(1, dtype=torch.int32),
        bounds,
        order,
        out.stride(0),
        HEADS=1,
        HEAD_ROWS=8,
        DIM=dim,
        DIM_PAD=16,
    )
    return out.numpy().reshape(-1), float(out_lse), int(out_keys)


def empty_states_are_the_identity() -> None:
    """Whatever lies in an empty state's other fields, NaN and infinities included."""
    state = (np.linspace(-2, 3, 16), 1.25, 7)
    for rubbish in (0.0, math.nan, math.inf, -math.inf):
        empty = (np.full(16, rubbish), rubbish, 0)
        for parts in ([empty, state], [state, empty], [empty, state, empty]):
            out, lse, keys = _merge(parts)
            np.testing.assert_allclose(out, state[0], rtol=1e-6)
            assert abs(lse - 1.25) < 1e-6 and keys == 7
        out, lse, keys = _merge([empty, empty])
        assert not out.any() and lse == 0.0 and keys == 0


def merge_in_any_order() -> None:
    rng = np.random.default_rng(2)
    for offset in (0.0, 1e4, -1e4):
        states = [(rng.standard_normal(16), offset + float(rng.normal(0, 3)), n) for n in (3, 0, 5, 64, 1)]
        full = [state for state in states if state[2]]
        masses = np.exp(np.array([state[1] for state in full]) - offset)
        wanted = sum(m * state[0] for m, state in zip(masses, full, strict=True)) / masses.sum()
        for _ in range(4):
            out, lse, keys = _merge([states[i] for i in rng.permutation(len(states))])
            np.testing.assert_allclose(out, wanted, atol=1e-5 + abs(offset) * 1e-6)
            assert abs(lse - offset - math.log(masses.sum())) < 1e-5 + abs(offset) * 1e-6 and keys == 73


def refusals_write_nothing() -> None:
    from copyhold.kernels.errors import KernelError
    from copyhold.kernels.triton_pool import TritonPool
    from copyhold.kernels.triton_step import AttentionShape, AttentionStep

    pool = TritonPool(1, 4, 2, 16, 16, "float32", "cpu")
    pool.k.fill_(1.0)
    before = pool._memory.clone()
    rows = torch.ones(2, 2, 16)
    step = Step(Case((20,), (1,), kv_heads=2, head_dim=16))
    device, layers = pool.device, (step.pool.k[1], step.pool.v[1])
    attention = AttentionStep(step.batch, step.plan(), AttentionShape(4, 2, 16, 1.0), device)
    refused: list[Callable[[], Any]] = [
        lambda: TritonPool(1, 4, 2, 16, 24, "float32", "cpu"),
        lambda: TritonPool(1, 4, 2, 20, 16, "float32", "cpu"),
        lambda: TritonPool(1, 4, 2, 16, 16, "float64", "cpu"),
        lambda: pool.write_rows(0, rows, rows, torch.tensor([1])),
        lambda: pool.write_rows(
            0, rows, rows.transpose(0, 1).contiguous().transpose(0, 1), torch.tensor([1, 2])
        ),
        lambda: pool.copy_rows([(0, 4, 1)]),
        lambda: pool.copy_rows([(0, 1, 17)]),
        lambda: pool.copy_rows([(0, 1, 3), (1, 2, 3)]),
        lambda: pool.copy_rows([(0, 1, 3), (2, 1, 3)]),
        lambda: pool.zero_blocks([0, -1]),
        lambda: pool.count_nonzero_bytes([4]),
        lambda: pool.read_rows(0, np.array([1]), np.array([16])),
        lambda: AttentionStep(step.batch, step.plan(), AttentionShape(3, 2, 16, 1.0), device),
        lambda: AttentionStep(step.batch, step.plan(), AttentionShape(4, 2, 16, 1.0, None, 0.0), device),
        lambda: attention.attend(step.q.half(), *layers, step.q),
        lambda: attention.attend(step.q[:, :2], *layers, step.q),
        lambda: attention.attend(step.q, layers[0][:, :1], layers[1], step.q),
    ]
    for number, call in enumerate(refused):
        try:
            call()
        except KernelError:
            continue
        raise AssertionError(f"call {number} was not refused")
    assert torch.equal(pool._memory, before)


def the_backend_offers_the_interface() -> None:
    """Each call over torch tensors beside the float64 reference."""
    from copyhold.kernels import triton_backend
    from copyhold.kernels.triton_pool import TritonPool

    rng = np.random.default_rng(4)
    pool = TritonPool(1, 6, 2, 16, 16, "float32", "cpu")
    pool.k.fill_(math.nan)
    pool.v.fill_(math.nan)
    contexts, starts = np.array([37, 5, 0], dtype=np.int32), np.array([0, 6, 7, 7], dtype=np.int32)
    tables = np.array([[4, 1, 5], [2, 99, 99], [99, 99, 99]], dtype=np.int32)
    rows = np.arange(37), np.arange(5)
    slots = np.concatenate(
        [tables[seq][at // 16].astype(np.int64) * 16 + at % 16 for seq, at in enumerate(rows)]
    )
    qkv = rng.standard_normal((42, (4 + 2 * 2) * 16), dtype=np.float32)
    angles, positions = rng.standard_normal((2, 40, 8), dtype=np.float32), np.concatenate(rows)
    q = torch.zeros(42, 4, 16)
    sent = [torch.from_numpy(array) for array in (qkv, angles[0], angles[1], positions, slots)]
    triton_backend.rotate_and_write(sent[0], sent[1], sent[2], sent[3], sent[4], pool.k[0], pool.v[0], q)
    split = qkv.reshape(42, 8, 16)
    turned = reference.rotate(split[:, :6], angles[0][positions], angles[1][positions])
    np.testing.assert_allclose(q.numpy(), turned[:, :4], atol=1e-5)
    for found, wanted in zip(
        pool.read_rows(0, slots // 16, slots % 16), (turned[:, 4:], split[:, 6:]), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    _check_attention(pool, q[[31, 32, 33, 34, 35, 36, 41]].contiguous(), (tables, starts, contexts))
    _check_activations(rng)


def _check_attention(pool: Any, q: torch.Tensor, where: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Whole and split; then states of two ranges, some of them empty, and their merge."""
    from copyhold.kernels import triton_backend

    tables, starts, contexts = where
    none, layers, found = np.zeros_like(contexts), (pool.k[0], pool.v[0]), torch.full(q.shape, math.nan)
    every: list[dict[str, Any]] = [{}, {"window": 7}, {"soft_cap": 2.0}]
    for limits in every:
        wanted, _ = reference.paged_attention_states(
            q.numpy(), pool, 0, tables, starts, none, contexts, True, 0.25, **limits
        )
        triton_backend.paged_attention(q, *layers, *where, 0.25, found, **limits)
        np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5)
        triton_backend.paged_attention_split(q, *layers, *where, 16, 0.25, found, **limits)
        np.testing.assert_allclose(found.numpy(), wanted, atol=2e-5)
    cut = np.array([20, 5, 0], dtype=np.int32)
    parts = []
    for first, stop, causal in ((none, cut, False), (cut, contexts, True)):
        arguments = (tables, starts, first, stop, causal)
        out, lse = reference.paged_attention_states(q.numpy(), pool, 0, *arguments, 0.25, window=25)
        mass = torch.zeros(q.shape[:2])
        state = torch.full(q.shape, math.nan)
        triton_backend.paged_attention_states(q, *layers, *arguments, 0.25, state, mass, window=25)
        np.testing.assert_allclose(state.numpy(), out, atol=2e-5)
        np.testing.assert_allclose(mass.numpy(), lse, atol=2e-5)
        parts.append((out, lse, state, mass))
    assert np.isneginf(parts[1][1][6]).all(), "the second sequence has nothing in the second range"
    (out, lse, state, mass), (out_b, lse_b, state_b, mass_b) = parts
    some = np.array([6, 2, 2, 0])
    mixed, mixed_mass = state.clone(), mass.clone()
    triton_backend.merge_rows(mixed, mixed_mass, some, state_b[:4], mass_b[:4])
    out_c, lse_c = out.copy(), lse.copy()
    for i, row in enumerate(some):
        out_c[[row]], lse_c[[row]] = reference.merge_states(
            out_c[[row]], lse_c[[row]], out_b[[i]], lse_b[[i]]
        )
    np.testing.assert_allclose(mixed.numpy(), out_c, atol=2e-5)
    np.testing.assert_allclose(mixed_mass.numpy(), lse_c, atol=2e-5)
    out, lse = reference.merge_states(out, lse, out_b, lse_b)
    triton_backend.merge_states(state, mass, state_b, mass_b)
    np.testing.assert_allclose(state.numpy(), out, atol=2e-5)
    np.testing.assert_allclose(mass.numpy(), lse, atol=2e-5)


def _check_activations(rng: np.random.Generator) -> None:
    from copyhold.kernels import triton_backend

    x, delta = rng.standard_normal((2, 3, 32), dtype=np.float32)
    weight = rng.standard_normal(32, dtype=np.float32)
    summed, found, gated = torch.from_numpy(x.copy()), torch.zeros(3, 32), torch.zeros(3, 16)
    triton_backend.add_rms_norm(summed, torch.from_numpy(delta), torch.from_numpy(weight), 1e-5, found)
    np.testing.assert_allclose(summed.numpy(), x + delta, atol=1e-6)
    np.testing.assert_allclose(found.numpy(), reference.rms_norm(x + delta, weight, 1e-5), atol=1e-5)
    triton_backend.silu_mul(found, gated)
    np.testing.assert_allclose(gated.numpy(), reference.silu_mul(found.numpy()), atol=1e-5)
    half = torch.zeros(3, 16, dtype=torch.bfloat16)
    triton_backend.narrow_rows(gated, half)
    assert torch.equal(half, gated.bfloat16())


def main() -> int:
    triton_bfloat16.widen_products()
    found: dict[str, str | None] = {}
    with torch.inference_mode(), np.errstate(over="ignore"):
        for name in NAMES:
            try:
                if name in CASES:
                    run_case(CASES[name])
                else:
                    globals()[name.replace(" ", "_").replace("^", "_")]()
                found[name] = None
            except Exception:  # noqa: BLE001 - a failure is that case's result
                found[name] = traceback.format_exc()[-3000:]
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
