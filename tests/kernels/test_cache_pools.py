"""Pools by cache group: every layer in exactly one of them, and a step's rows have a place in each."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from copyhold.kernels.batch import GroupRows, StepBatch
from copyhold.kernels.cache_pools import CachePools, as_pools
from copyhold.kernels.errors import BlockOutOfRange, KernelContractMismatch, KernelInputRefused
from copyhold.kernels.pool import KVPool
from copyhold.models.layer_groups import divided, one_group


def two_pools() -> CachePools:
    return CachePools((KVPool(2, 5, 2, 16), KVPool(1, 3, 2, 16, 32)), [(0, 2), (1,)])


def test_a_layer_is_found_in_the_pool_of_its_group() -> None:
    pools = two_pools()
    assert pools.places == ((0, 0), (1, 0), (0, 1)) and pools.num_layers == 3
    pools.pools[1].k[0] = 3.0
    assert [group for _, _, group in pools.planes] == [0, 1, 0]
    assert [bool(k.any()) for k, _, _ in pools.planes] == [False, True, False]
    assert pools.largest_value() == 3.0
    assert pools.total_bytes == sum(pool.total_bytes for pool in pools.pools)


def test_blocks_are_zeroed_and_counted_in_every_group() -> None:
    pools = two_pools()
    for pool in pools.pools:
        pool.v[:] = 1.0
    row_bytes = 2 * 16 * 4 // 2  # two bytes of a float32 one are not zero
    assert pools.count_nonzero_bytes(((1,), (2,))) == row_bytes * (2 * 16 + 32)
    pools.zero_blocks(((1,), (2,)))
    assert pools.count_nonzero_bytes(((1,), (2,))) == 0
    assert pools.count_nonzero_bytes(((0,), (1,))) > 0
    with pytest.raises(BlockOutOfRange):
        pools.zero_blocks(((), (3,)))


@pytest.mark.parametrize(
    ("pools", "layers"),
    [
        ((), []),
        ((KVPool(2, 1, 1, 16),), [(0,)]),
        ((KVPool(1, 1, 1, 16), KVPool(1, 1, 1, 16)), [(0,), (0,)]),
        ((KVPool(1, 1, 1, 16), KVPool(1, 1, 1, 16)), [(0,), (2,)]),
        ((KVPool(1, 1, 1, 16), KVPool(1, 1, 2, 16)), [(0,), (1,)]),
        ((KVPool(1, 1, 1, 16), KVPool(1, 1, 1, 16, kv_dtype="bfloat16")), [(0,), (1,)]),
    ],
)
def test_pools_that_do_not_fit_together_are_refused(pools, layers) -> None:
    with pytest.raises(KernelContractMismatch):
        CachePools(pools, layers)


def test_a_pool_alone_is_one_group() -> None:
    pool = KVPool(3, 2, 1, 16)
    assert as_pools(pool).layers == ((0, 1, 2),) and as_pools(pool).first is pool
    assert as_pools(as_pools(pool)).first is pool


def test_layers_are_divided_in_runs() -> None:
    assert [(group.layers, group.block_size) for group in divided(5, (16, 32))] == [
        ((0, 1), 16),
        ((2, 3, 4), 32),
    ]
    assert len({group.name for group in divided(3, (16, 16, 16))}) == 3
    assert divided(4, (16,)) == one_group(4, 16)
    assert msgspec.msgpack.encode(divided(4, (16,)))


def batch_of(others: tuple[GroupRows, ...]) -> StepBatch:
    rows = np.arange(3, dtype=np.int64)
    return StepBatch(
        tokens=rows,
        positions=rows,
        slots=rows,
        seq_starts=np.array([0, 3], dtype=np.int32),
        context_lens=np.array([3], dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        logit_rows=rows[2:],
        others=others,
    )


def rows_at(slots: list[int], table: list[list[int]]) -> GroupRows:
    return GroupRows(np.array(slots, dtype=np.int64), np.array(table, dtype=np.int32))


def test_rows_with_a_place_in_every_group_pass() -> None:
    batch_of((rows_at([32, 33, 34], [[1]]),)).check_others([(2, 32)])
    batch_of(()).check_others([])


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        (rows_at([32, 33], [[1]]), "slots"),
        (rows_at([32, 33, 64], [[1]]), "slots"),
        (rows_at([32, 33, 34], [[2]]), "block_tables"),
        (rows_at([32, 33, 34], [[1], [0]]), "block_tables"),
        (rows_at([32, 33, 34], [[]]), "block_tables"),
    ],
)
def test_a_place_outside_a_group_s_pool_is_refused(rows: GroupRows, field: str) -> None:
    with pytest.raises(KernelInputRefused) as refused:
        batch_of((rows,)).check_others([(2, 32)])
    assert refused.value.field == field


@pytest.mark.parametrize("geometries", [[], [(2, 32), (2, 32)]])
def test_another_number_of_groups_is_refused(geometries: list[tuple[int, int]]) -> None:
    with pytest.raises(KernelInputRefused, match="further cache groups"):
        batch_of((rows_at([0, 1, 2], [[0]]),)).check_others(geometries)
