"""Pool sizing: exact, repeatable, the minimum over ranks, and refusals that say what is missing."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.kvcore.byte_errors import (
    MemoryNotFree,
    NegativeAvailableMemory,
    PoolBelowMinimum,
    RanksDisagree,
    SplitNotWhole,
)
from copyhold.kvcore.contract_errors import EmptyInput, IdOutOfRange, SlotIdOverflow, WrongDtype
from copyhold.kvcore.sizing import GroupDemand, RankMemory, group_demand, kv_budget_bytes, size_pools

GIB = 2**30
HALF = Fraction(1, 2)
ALL = {"full": Fraction(1)}


def _demand(row_bytes: int = 1024, block_size: int = 16, name: str = "full") -> GroupDemand:
    return GroupDemand(name, block_size, row_bytes)


def test_a_neighbour_that_takes_and_returns_memory_changes_nothing() -> None:
    """Two replicas that start together are each told a share worth 64 blocks, five times over."""
    worth = 64 * 16 * 1024
    total = 16 * GIB
    share = Fraction(worth + 300_000_000, total)
    sizes = set()
    for free in (8 * GIB, 7 * GIB, 8 * GIB, 7 * GIB - 1, 6 * GIB):
        for _ in range(2):
            memory = RankMemory(total, share, 300_000_000, free)
            sizes.add(size_pools([kv_budget_bytes(0, memory)], [[_demand()]], ALL).blocks()["full"])
    assert sizes == {64}


def test_memory_that_is_not_free_is_a_refusal_with_the_shortfall() -> None:
    memory = RankMemory(16 * GIB, HALF, GIB, 6 * GIB)
    with pytest.raises(MemoryNotFree) as caught:
        kv_budget_bytes(3, memory)
    assert (caught.value.rank, caught.value.shortfall_bytes) == (3, GIB)
    with pytest.raises(NegativeAvailableMemory) as missing:
        kv_budget_bytes(0, msgspec.structs.replace(memory, held_bytes=8 * GIB + 5))
    assert missing.value.shortfall_bytes == 5
    assert kv_budget_bytes(0, msgspec.structs.replace(memory, free_bytes=7 * GIB)) == 7 * GIB


def test_the_minimum_over_uneven_ranks_is_everyones_size() -> None:
    sizing = size_pools([10 * GIB, 10 * GIB], [[_demand(2048)], [_demand(1024)]], ALL)
    (group,) = sizing.groups
    assert group.affordable_blocks == (10 * GIB // 32768, 10 * GIB // 16384)
    assert group.num_blocks == min(group.affordable_blocks)
    assert sizing.unused_bytes == (0, 5 * GIB)


def test_a_required_request_that_does_not_fit_names_rank_group_and_bytes() -> None:
    demands = [[_demand(1024)], [_demand(4096)]]
    with pytest.raises(PoolBelowMinimum) as caught:
        size_pools([2**20, 2**20], demands, ALL, required_rows=272)
    error = caught.value
    assert (error.rank, error.group, error.required_blocks, error.affordable_blocks) == (1, "full", 17, 16)
    assert error.shortfall_bytes == 65536
    assert size_pools([2**20, 2**20 + error.shortfall_bytes], demands, ALL, required_rows=272)


def test_pages_are_rounded_up_before_they_are_counted() -> None:
    sizing = size_pools([2**20], [[_demand(1000)]], ALL, granularity_bytes=4096)
    assert sizing.groups[0].block_bytes == (16384,) and sizing.blocks() == {"full": 64}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(2 * 10**7, 10**9), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 4096), st.sampled_from([1, 16, 32, 48])), min_size=1, max_size=3),
    st.data(),
)
def test_no_rank_spends_more_than_its_budget_and_one_more_block_would_not_fit(
    budgets: list[int], groups: list[tuple[int, int]], data: st.DataObject
) -> None:
    parts = [data.draw(st.integers(1, 9)) for _ in groups]
    split = {f"g{i}": Fraction(part, sum(parts)) for i, part in enumerate(parts)}
    demands = [
        [_demand(row * data.draw(st.integers(1, 3)), page, f"g{i}") for i, (row, page) in enumerate(groups)]
        for _ in budgets
    ]
    sizing = size_pools(budgets, demands, split)
    assert sizing == size_pools(list(budgets), demands, dict(reversed(list(split.items()))))
    for rank, budget in enumerate(budgets):
        assert sizing.used_bytes[rank] + sizing.unused_bytes[rank] == budget
        assert sizing.unused_bytes[rank] >= 0
    for group in sizing.groups:
        limits = [
            budget * split[group.name] < (group.num_blocks + 1) * cost
            for budget, cost in zip(budgets, group.block_bytes, strict=True)
        ]
        assert any(limits)


def test_statements_that_contradict_themselves_are_refused() -> None:
    demands = [[_demand(), _demand(name="window")]]
    for split in (
        {"full": HALF},
        {"full": HALF, "window": HALF, "x": HALF},
        {"full": HALF, "window": HALF / 2},
    ):
        with pytest.raises(SplitNotWhole):
            size_pools([GIB], demands, split)
    with pytest.raises(SplitNotWhole):
        size_pools([GIB], demands, {"full": Fraction(2), "window": Fraction(-1)})
    with pytest.raises(RanksDisagree):
        size_pools([GIB, GIB], [[_demand()], [_demand(block_size=32)]], ALL)
    with pytest.raises(RanksDisagree):
        size_pools([GIB], [[_demand()], [_demand()]], ALL)
    with pytest.raises(EmptyInput):
        size_pools([], [], ALL)
    with pytest.raises(EmptyInput):
        size_pools([GIB], [[]], {})
    with pytest.raises(WrongDtype):
        size_pools([GIB], [[_demand()]], {"full": 1.0})  # type: ignore[dict-item]
    with pytest.raises(WrongDtype):
        kv_budget_bytes(0, RankMemory(GIB, 0.5, 0, GIB))  # type: ignore[arg-type]
    with pytest.raises(IdOutOfRange):
        kv_budget_bytes(0, RankMemory(GIB, Fraction(3, 2), 0, GIB))


def test_a_pool_beyond_slot_ids_is_refused_with_its_numbers() -> None:
    with pytest.raises(SlotIdOverflow) as caught:
        size_pools([2**31 + 16], [[_demand(1)]], ALL)
    assert (caught.value.num_blocks, caught.value.block_size) == (2**27 + 1, 16)
    assert size_pools([2**31], [[_demand(1)]], ALL).blocks() == {"full": 2**27}


def test_a_layouts_demand_is_its_row(make_group: Any) -> None:
    assert group_demand(make_group()) == GroupDemand("g1", 16, 16384)
