"""The plan of a GPU step: every row meets each key that it may see once, whatever is shared, split or windowed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.kernels.batch import StepBatch
from copyhold.kernels.errors import KernelContractMismatch, KernelInputRefused, PartitionNotWholeTiles
from copyhold.kernels.triton_config import SHARED_BYTES, AttentionConfig, TileConfig, attention_config
from copyhold.kernels.triton_plan import (
    AttentionPlan,
    Segment,
    check_cover,
    partition_for,
    plan_attention,
    whole_contexts,
)

SMALL = AttentionConfig(TileConfig(16, 16, 1, 1), TileConfig(32, 32, 1, 1), 64)


def batch_of(contexts: list[int], queries: list[int]) -> StepBatch:
    lens, counts = np.array(contexts, dtype=np.int32), np.array(queries, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.repeat(lens - counts - starts[:-1], counts) + np.arange(counts.sum())
    none, tables = np.zeros(counts.sum(), dtype=np.int64), np.zeros((lens.size, 1), dtype=np.int32)
    return StepBatch(none, positions, none, starts, lens, tables, np.zeros(0, np.int64))


def covered(plan: AttentionPlan, batch: StepBatch, window: int | None = None) -> dict[int, Counter[int]]:
    """How often each row's items bring each key that the row may see, read off the plan as a kernel reads it."""
    found: dict[int, Counter[int]] = {row: Counter() for row in range(batch.num_tokens)}
    for launch in plan.launches:
        for first, count, _, begin, end, _ in launch.items.tolist():
            for row in plan.rows[first : first + count].tolist():
                position = int(batch.positions[row])
                oldest = max(begin, position - window + 1) if window else begin
                found[row].update(range(oldest, min(end, position + 1)))
    return found


def assert_exact(plan: AttentionPlan, batch: StepBatch, window: int | None = None) -> None:
    for row, keys in covered(plan, batch, window).items():
        position = int(batch.positions[row])
        wanted = range(max(0, position - window + 1) if window else 0, position + 1)
        assert keys == Counter(wanted), f"row {row}"
    merged = plan.merge_rows.tolist()
    assert sorted(plan.merge_states.tolist()) == list(range(plan.num_states))
    direct = [
        row
        for launch in plan.launches
        if not launch.partial
        for first, count in launch.items[:, :2].tolist()
        for row in plan.rows[first : first + count].tolist()
    ]
    assert sorted(merged + direct) == list(range(batch.num_tokens)), "a row is written once"


@st.composite
def trees(draw: st.DrawFn) -> tuple[StepBatch, list[Segment], int | None, int | None, int]:
    """Ragged sequences under random shared prefixes, cut anywhere, with or without window and split."""
    size = draw(st.integers(1, 6))
    contexts = draw(st.lists(st.integers(1, 150), min_size=size, max_size=size))
    queries = [draw(st.integers(0, min(context, 40))) for context in contexts]
    segments: list[Segment] = []

    def cut(members: tuple[int, ...], begin: int) -> None:
        shortest = min(contexts[seq] for seq in members)
        if len(members) == 1 or draw(st.booleans()):
            segments.extend(Segment(begin, contexts[s], (s,)) for s in members if contexts[s] > begin)
            return
        end = draw(st.integers(begin, shortest))
        if end > begin:
            segments.append(Segment(begin, end, members))
        middle = draw(st.integers(1, len(members) - 1))
        cut(members[:middle], end)
        cut(members[middle:], end)

    cut(tuple(draw(st.permutations(range(size)))), 0)
    window = draw(st.none() | st.integers(1, 160))
    partition = draw(st.none() | st.sampled_from([16, 64, 96]))
    return batch_of(contexts, queries), segments, window, partition, draw(st.sampled_from([1, 3, 4, 16]))


@settings(max_examples=120, deadline=None)
@given(trees())
def test_every_key_is_covered_once_under_any_tree(
    case: tuple[StepBatch, list[Segment], int | None, int | None, int],
) -> None:
    batch, segments, window, partition, group = case
    plan = plan_attention(batch, group, SMALL, window=window, segments=segments, partition_tokens=partition)
    assert_exact(plan, batch, window)
    alone = plan_attention(batch, group, SMALL, window=window, partition_tokens=partition)
    assert_exact(alone, batch, window)
    for launch in plan.launches:
        counts, begins, ends = launch.items[:, 1], launch.items[:, 3], launch.items[:, 4]
        assert (
            (counts * group <= launch.tile.query_rows).all() and (counts > 0).all() and (ends > begins).all()
        )
        if partition:
            assert ((ends - 1) // partition == begins // partition).all()


def test_a_shared_prefix_is_read_once_for_the_group() -> None:
    """32 requests over 2,048 shared tokens with 64 own ones each: 4,096 key rows instead of 67,584."""
    batch = batch_of([2112] * 32, [1] * 32)
    config = attention_config(128, "bfloat16", 90, 4)
    shared = [Segment(0, 2048, tuple(range(32))), *(Segment(2048, 2112, (seq,)) for seq in range(32))]
    assert plan_attention(batch, 4, config).key_rows_read == 32 * 2112
    together = plan_attention(batch, 4, config, segments=shared)
    assert together.key_rows_read == 2048 + 32 * 64
    assert together.num_states == 64 and together.merge_rows.size == 32
    assert [launch.tile for launch in together.launches] == [config.wide, config.narrow]


def test_a_merge_lists_states_in_key_order() -> None:
    batch = batch_of([130], [1])
    plan = plan_attention(batch, 1, SMALL, partition_tokens=32)
    begins = plan.launches[0].items[:, 3]
    by_state = {
        int(state): int(begin) for state, begin in zip(plan.launches[0].items[:, 5], begins, strict=True)
    }
    order = [by_state[state] for state in plan.merge_states.tolist()]
    assert order == [0, 32, 64, 96, 128]


@pytest.mark.parametrize(
    ("segments", "says"),
    [
        ([(0, 20, (0,)), (0, 10, (1,))], "doubled"),
        ([(0, 20, (0,)), (3, 9, (1,))], "missed"),
        ([(0, 8, (0, 1)), (9, 20, (0,)), (8, 9, (1,))], "missed"),
        ([(0, 8, (0, 1)), (7, 20, (0,)), (8, 9, (1,))], "doubled"),
        ([(0, 20, (0,)), (0, 8, (1,))], "end at 8"),
        ([(0, 20, (0,))], "end at 0"),
        ([(0, 20, (0,)), (0, 9, (2,))], "not a sequence"),
    ],
)
def test_segments_that_miss_or_double_a_key_are_refused(segments: list[Any], says: str) -> None:
    batch = batch_of([20, 9], [1, 1])
    with pytest.raises(KernelInputRefused, match=says if "doubled" not in says else "doubled|end at"):
        check_cover(batch, [Segment(*segment) for segment in segments])


def test_bad_plans_are_refused() -> None:
    batch = batch_of([20, 9], [1, 1])
    with pytest.raises(KernelInputRefused, match="window"):
        plan_attention(batch, 1, SMALL, window=0)
    for partition in (0, 24, -16):
        with pytest.raises(PartitionNotWholeTiles):
            plan_attention(batch, 1, SMALL, partition_tokens=partition)
    with pytest.raises(KernelInputRefused, match="no row"):
        plan_attention(batch, 17, SMALL)


def test_an_empty_step_launches_nothing() -> None:
    for batch in (batch_of([], []), batch_of([9, 4], [0, 0])):
        plan = plan_attention(batch, 4, SMALL, partition_tokens=32)
        assert plan.launches == [] and plan.num_states == 0 and whole_contexts(batch) == []
        assert partition_for(batch, 4, SMALL, 8, 132) is None


def test_few_rows_are_split_and_many_are_not() -> None:
    config = attention_config(128, "bfloat16", 90, 4)
    one = partition_for(batch_of([8192], [1]), 4, config, 8, 132)
    assert one is not None and one % 64 == 0 and 8192 / one * 8 >= 132
    assert partition_for(batch_of([8192] * 128, [1] * 128), 4, config, 8, 132) is None
    assert partition_for(batch_of([40], [1]), 4, config, 8, 132) is None


def test_the_table_serves_what_it_says_and_refuses_the_rest() -> None:
    for sm in SHARED_BYTES:
        for head_dim in (8, 64, 72, 128, 256):
            for dtype in ("float32", "float16", "bfloat16"):
                config = attention_config(head_dim, dtype, sm, 40)
                assert min(config.narrow.query_rows, config.wide.query_rows) >= 40
                assert config.partition_tokens % config.narrow.key_tokens == 0
    for arguments in (
        (60, "float16", 90, 1),
        (264, "float16", 90, 1),
        (64, "int8", 90, 1),
        (64, "float16", 75, 1),
    ):
        with pytest.raises(KernelContractMismatch):
            attention_config(*arguments)
    with pytest.raises(KernelContractMismatch, match="129 query heads"):
        attention_config(64, "float16", 90, 129)
