"""Attention that reads shared rows once gives what every sequence alone would get, whatever is shared and however."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.kernels import cpu, reference, reference_backend
from copyhold.kernels.batch import StepBatch
from copyhold.kernels.interface import KernelBackend
from copyhold.kernels.pool import KVPool
from copyhold.kernels.shared_attention import SharedAttention, StateBuffers
from copyhold.kernels.shared_cost import Geometry, choose, predict_ns
from copyhold.kernels.shared_schedule import (
    Schedule,
    chunk_attention,
    hydragen,
    partial_buffer_bytes,
    plain,
)
from copyhold.kvcore.commands import RequestHandle
from copyhold.kvcore.execution import ExecutionSnapshot, check_counts, chunks_of_tables
from copyhold.kvcore.execution_errors import GroupSizeNotDivisible

TOLERANCE_FP32 = 2e-5
TOLERANCE_BF16 = 1e-2
KV_HEADS, GROUP, HEAD_DIM, BLOCK = 2, 3, 32, 16
FACTS = {
    row["id"]: row
    for row in json.loads((Path(__file__).parents[1] / "data/fixtures.json").read_text("utf-8"))["fixtures"]
}


class Tree:
    """Sequences over a pool by paths of block names; equal names are the same block. What nobody may read is NaN."""

    def __init__(self, paths: list[list[str]], tails: list[int], tokens: list[int], seed: int = 0) -> None:
        """`tails`: own rows behind the last named block; `tokens`: how many of those the step computes."""
        rng = np.random.default_rng(seed)
        names = {name: number for number, name in enumerate(dict.fromkeys(chain.from_iterable(paths)))}
        own = [-(-tail // BLOCK) for tail in tails]
        self.pool = KVPool(1, len(names) + sum(own) + 1, KV_HEADS, HEAD_DIM)
        self.pool.k.fill(np.nan)
        self.pool.v.fill(np.nan)
        place = rng.permutation(self.pool.num_blocks)
        width = max(len(path) + more for path, more in zip(paths, own, strict=True))
        self.tables = np.full((len(paths), width), self.pool.num_blocks - 1, dtype=np.int32)
        used = len(names)
        for row, (path, more) in enumerate(zip(paths, own, strict=True)):
            blocks = [*(names[name] for name in path), *range(used, used + more)]
            self.tables[row, : len(blocks)] = place[blocks]
            used += more
        self.contexts = np.array(
            [len(p) * BLOCK + t for p, t in zip(paths, tails, strict=True)], dtype=np.int32
        )
        for row, context in enumerate(self.contexts):
            p = np.arange(context)
            slots = self.tables[row][p // BLOCK].astype(np.int64) * BLOCK + p % BLOCK
            fresh = np.isnan(self.pool.k[0][slots // 16, 0, 0, slots % 16])
            rows = rng.standard_normal((2, int(fresh.sum()), KV_HEADS, HEAD_DIM), dtype=np.float32)
            cpu.write_rows(self.pool.k[0], self.pool.v[0], rows[0], rows[1], slots[fresh])
        self.counts = np.array(tokens, dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
        self.q = rng.standard_normal((sum(tokens), KV_HEADS * GROUP, HEAD_DIM), dtype=np.float32)
        self.scale = np.float32(1 / math.sqrt(HEAD_DIM))

    def snapshot(self) -> ExecutionSnapshot:
        firsts = self.contexts - self.counts
        slots = np.arange(len(self.counts), dtype=np.int64)
        order, chunks = chunks_of_tables(self.tables, slots, firsts, BLOCK)
        handles = tuple([RequestHandle(slot, 1) for slot in range(len(order))])
        return ExecutionSnapshot(
            0, b"", "c", handles, order, firsts, chunks, np.zeros(len(chunks), dtype=np.uint64)
        )

    def run(self, schedule: Schedule, dtype: Any = np.float32, kernels: KernelBackend = cpu) -> np.ndarray:
        out = np.full(self.q.shape, 9, dtype=dtype)
        buffers = StateBuffers(self.q.shape[1], HEAD_DIM)
        shared = SharedAttention(kernels, schedule, self.tables, self.starts, self.contexts, buffers)
        shared(self.q, self.pool.k[0], self.pool.v[0], self.scale, out)
        return out

    def expected(self) -> np.ndarray:
        rows = np.zeros(len(self.q), dtype=np.int64)
        batch = StepBatch(rows, rows, rows, self.starts, self.contexts, self.tables, rows[:0])
        return reference.paged_attention(self.q, self.pool, 0, batch, float(self.scale))


def _covered(schedule: Schedule, tree: Tree) -> None:
    """Every row of every sequence is in one partition (K148), and saved states count as they should (K151)."""
    parts: list[list[tuple[int, int]]] = [
        [(int(first), int(end))] for first, end in zip(schedule.own_first, tree.contexts, strict=True)
    ]
    owner = np.repeat(np.arange(len(tree.counts)), tree.counts)
    for phase in schedule.phases:
        for at in range(len(phase.leaders)):
            readers = owner[phase.token_rows[phase.starts[at] : phase.starts[at + 1]]]
            for sequence in np.unique(readers).tolist():
                parts[sequence].append((int(phase.first_rows[at]), int(phase.end_rows[at])))
                assert (readers == sequence).sum() == tree.counts[sequence]
    for sequence, ranges in enumerate(parts):
        check_counts(ranges, sequence, int(tree.contexts[sequence]))


LEVELS = [["a", "b", *(["c", f"d{row // 4}", f"e{row // 2}"])] for row in range(8)]


@pytest.mark.parametrize("tail", [1, 15, 16, 17, 40])
def test_levels_of_eight_four_and_two_equal_the_monolithic_kernel(tail: int) -> None:
    tree = Tree(LEVELS, [tail] * 8, [1] * 8)
    snapshot = tree.snapshot()
    schedule = hydragen(snapshot, tree.counts)
    assert [int(np.diff(phase.starts)[0]) for phase in schedule.phases] == [8, 4, 2]
    _covered(schedule, tree)
    np.testing.assert_allclose(tree.run(schedule), tree.expected(), atol=TOLERANCE_FP32)


@pytest.mark.parametrize("threshold", [1, 2, 3, 4, 7, 8])
def test_any_threshold_gives_the_same_outputs(threshold: int) -> None:
    tree = Tree(LEVELS, [3, 9, 16, 1, 30, 2, 5, 17], [1] * 8)
    schedule = chunk_attention(tree.snapshot(), tree.counts, threshold)
    assert bool(schedule.phases) == (threshold < 8)
    _covered(schedule, tree)
    np.testing.assert_allclose(tree.run(schedule), tree.expected(), atol=TOLERANCE_FP32)


def test_bfloat16_outputs_are_the_rounded_states() -> None:
    tree = Tree(LEVELS, [5] * 8, [1] * 8)
    schedule = chunk_attention(tree.snapshot(), tree.counts)
    bits = tree.run(schedule, np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(wide, tree.expected(), atol=TOLERANCE_BF16)


def test_the_reference_backend_shares_too() -> None:
    tree = Tree(LEVELS, [3, 9, 16, 1, 30, 2, 5, 17], [1] * 8)
    for make in (hydragen, chunk_attention):
        out = tree.run(make(tree.snapshot(), tree.counts), kernels=reference_backend)
        np.testing.assert_allclose(out, tree.expected(), atol=1e-6)


paths = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=6)


@settings(max_examples=120, deadline=None)
@given(paths, st.data())
def test_ragged_trees_are_exact_under_every_schedule(steps: list[list[int]], data: st.DataObject) -> None:
    named = [["/".join(map(str, path[: end + 1])) for end in range(len(path))] for path in steps]
    tails = [data.draw(st.integers(1, 40)) for _ in steps]
    tokens = [data.draw(st.integers(1, tail)) for tail in tails]
    tree = Tree(named, tails, tokens, seed=len(steps))
    snapshot, expected = tree.snapshot(), tree.expected()
    schedules = [plain(snapshot, tree.counts), chunk_attention(snapshot, tree.counts)]
    schedules.append(chunk_attention(snapshot, tree.counts, data.draw(st.integers(1, 6))))
    schedules.append(choose(snapshot, tree.counts, Geometry(KV_HEADS * GROUP, KV_HEADS, HEAD_DIM)).schedule)
    try:
        schedules.append(hydragen(snapshot, tree.counts))
    except GroupSizeNotDivisible as refusal:
        assert len(set(refusal.sizes)) > 1 or refusal.level
    for schedule in schedules:
        _covered(schedule, tree)
        np.testing.assert_allclose(tree.run(schedule), expected, atol=TOLERANCE_FP32)


class _Wrong(SharedAttention):
    """Skips the merge of its last phase, or reads one row further than a shared chunk goes."""

    fault = ""

    def _share(self, phase: Any, tables: Any, *rest: Any) -> None:
        if self.fault == "merge" and phase is self.schedule.phases[-1]:
            return
        if self.fault == "row":
            phase = type(phase)(
                phase.token_rows, phase.starts, phase.leaders, phase.first_rows, phase.end_rows + np.int32(1)
            )
        if self.fault == "table":
            tables = np.roll(tables, 1, axis=1)
        super()._share(phase, tables, *rest)


@pytest.mark.parametrize("fault", ["merge", "row", "table"])
def test_a_planted_fault_shows(fault: str) -> None:
    tree = Tree(LEVELS, [20] * 8, [1] * 8)
    schedule = hydragen(tree.snapshot(), tree.counts)
    wrong = _Wrong(
        cpu, schedule, tree.tables, tree.starts, tree.contexts, StateBuffers(KV_HEADS * GROUP, HEAD_DIM)
    )
    wrong.fault = fault
    out = np.zeros_like(tree.q)
    wrong(tree.q, tree.pool.k[0], tree.pool.v[0], tree.scale, out)
    assert not np.allclose(out, tree.expected(), atol=1e-3)


def _uniform(group: int, prefix: int, suffix: int) -> tuple[ExecutionSnapshot, np.ndarray]:
    """`group` sequences over one prefix of whole blocks, one decode row each."""
    four = np.arange(group, dtype=np.int64)
    chunks = np.array([[0, prefix, 0, group, 0]], dtype=np.int64)
    handles = tuple([RequestHandle(slot, 1) for slot in range(group)])
    firsts = np.full(group, prefix + suffix - 1, dtype=np.int64)
    return ExecutionSnapshot(0, b"", "c", handles, four, firsts, chunks, np.zeros(1, np.uint64)), four * 0 + 1


def test_the_cost_model_shares_long_prefixes_of_many_and_leaves_short_ones_alone() -> None:
    geometry = Geometry(32, 8, 128)
    assert choose(*_uniform(32, 2048, 64), geometry).schedule.mode != "plain"
    assert choose(*_uniform(8, 1792, 64), geometry).schedule.mode != "plain"
    assert choose(*_uniform(2, 16, 200), geometry).schedule.mode == "plain"
    assert choose(*_uniform(32, 2048, 64), geometry, "off").schedule.mode == "plain"


def test_a_longer_prefix_or_a_larger_group_never_predicts_a_smaller_gain() -> None:
    geometry = Geometry(9, 3, 64)

    def gain(group: int, prefix: int, suffix: int = 64) -> float:
        snapshot, counts = _uniform(group, prefix, suffix)
        shared = chunk_attention(snapshot, counts)
        own = predict_ns(plain(snapshot, counts), snapshot, counts, geometry)
        return own / predict_ns(shared, snapshot, counts, geometry)

    for group in (2, 4, 8):
        gains = [gain(group, prefix) for prefix in (64, 256, 1024, 4096)]
        assert gains == sorted(gains)
    assert gain(2, 1024) < gain(4, 1024) < gain(8, 1024)
    assert gain(8, 1024, 16) > gain(8, 1024, 1024)


def test_levels_of_unequal_groups_are_left_to_saved_states() -> None:
    named = [["a"], ["a", "b"], ["a", "b"], ["a", "c"], ["a", "c"], ["a", "c"]]
    tree = Tree(named, [8] * 6, [1] * 6)
    with pytest.raises(GroupSizeNotDivisible, match=r"sizes=\((2, 3|3, 2)\)"):
        hydragen(tree.snapshot(), tree.counts)
    choice = choose(tree.snapshot(), tree.counts, Geometry(KV_HEADS * GROUP, KV_HEADS, HEAD_DIM), "hydragen")
    assert choice.schedule.mode == "plain" and choice.refused == (("hydragen", "group_size_not_divisible"),)


def test_known_rows_of_the_four_sequence_tree() -> None:
    fact, offsets = FACTS["F090"], FACTS["F091"]["expected"]
    chunks = np.array(
        [
            [0, 2, 0, 4, 0],
            [2, 3, 0, 2, 1],
            [3, 5, 0, 1, 2],
            [3, 4, 1, 2, 2],
            [2, 4, 2, 4, 1],
            [4, 5, 2, 3, 2],
            [4, 5, 3, 4, 2],
        ],
        dtype=np.int64,
    )
    lengths = np.array(fact["expected"]["path_lengths"], dtype=np.int64)
    handles = tuple([RequestHandle(slot, 1) for slot in range(4)])
    snapshot = ExecutionSnapshot(
        0, b"", "c", handles, np.arange(4, dtype=np.int64), lengths, chunks, np.zeros(7, np.uint64)
    )
    one = np.ones(4, dtype=np.int64)
    schedule = chunk_attention(snapshot, one * 0, fact["inputs"]["threshold"])
    saved = chunk_attention(snapshot, one, fact["inputs"]["threshold"])
    assert schedule.rows.logical_pairs == fact["expected"]["logical_pairs"]
    assert schedule.rows.physical_rows == fact["expected"]["physical_rows"]
    assert schedule.rows.saved_reads == fact["expected"]["saved_reads"]
    assert saved.rows.partial_rows == fact["expected"]["partial_rows"] == offsets["partial_rows"]
    assert saved.phases[0].starts[:-1].tolist() == offsets["offsets"]
    inputs = fact["inputs"]
    assert (
        partial_buffer_bytes(8, inputs["d_v"], inputs["scalar_bytes"])
        == fact["expected"]["partial_buffer_bytes"]
    )


def test_known_rows_of_eight_sequences_over_one_prefix() -> None:
    fact = FACTS["F094"]
    prefix, own = fact["inputs"]["S"], np.array(fact["inputs"]["U"], dtype=np.int64)
    snapshot, _ = _uniform(fact["inputs"]["B"], prefix, 1)
    rows = chunk_attention(
        ExecutionSnapshot(
            0, b"", "c", snapshot.handles, snapshot.order, prefix + own, snapshot.chunks, snapshot.digests
        ),
        own * 0,
    ).rows
    expected = fact["expected"]
    assert (rows.logical_pairs, rows.physical_rows, rows.saved_reads) == (
        expected["logical_rows"],
        expected["unique_rows"],
        expected["saved_rows"],
    )
