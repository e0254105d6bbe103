"""The pool's memory: geometry, zeroing, counting what is left, and refusals that leave it alone."""

from __future__ import annotations

import numpy as np
import pytest

from copyhold.kernels.batch import StepBatch
from copyhold.kernels.errors import (
    BlockOutOfRange,
    KernelContractMismatch,
    KernelInputRefused,
    UnsupportedKernelBlockSize,
)
from copyhold.kernels.pool import KVPool, split_table


@pytest.fixture
def pool() -> KVPool:
    made = KVPool(3, 5, 2, 16, 32)
    made.k.fill(1)
    made.v.fill(2)
    return made


def test_a_new_pool_is_zero_aligned_and_of_the_stated_shape() -> None:
    made = KVPool(2, 3, 2, 64, 32)
    assert made.k.shape == (2, 6, 2, 64, 16) and made.v.shape == (2, 6, 2, 16, 64)
    assert made.k.ctypes.data % 64 == 0 and made.v.ctypes.data % 64 == 0
    assert made.count_nonzero_bytes(range(3)) == 0
    assert made.total_bytes == 3 * made.block_bytes == 2 * 2 * 96 * 2 * 64 * 4


def test_zeroing_clears_exactly_the_named_blocks_in_all_layers(pool: KVPool) -> None:
    pool.zero_blocks(np.array([1, 4]))
    assert pool.count_nonzero_bytes([1, 4]) == 0
    assert pool.count_nonzero_bytes([0]) == pool.count_nonzero_bytes([2]) > 0
    tiles = split_table(np.array([0, 2, 3]), 2)
    assert (pool.k[:, tiles] == 1).all() and (pool.v[:, tiles] == 2).all()


def test_one_byte_left_in_the_last_layer_is_found(pool: KVPool) -> None:
    pool.zero_blocks(range(5))
    pool.v[2, 7, 1, 15, 15] = np.array([1 << 8], dtype=np.uint32).view(np.float32)[0]
    assert pool.count_nonzero_bytes([3]) == 1 and pool.count_nonzero_bytes([0, 1, 2, 4]) == 0
    pool.v[2, 7, 1, 15, 15] = -0.0
    assert pool.count_nonzero_bytes([3]) == 1


def test_no_blocks_is_nothing_to_do(pool: KVPool) -> None:
    pool.zero_blocks([])
    assert pool.count_nonzero_bytes(np.empty(0, dtype=np.int32)) == 0
    assert (pool.k == 1).all()


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_outside_the_pool_is_refused_and_nothing_is_zeroed(pool: KVPool, block: int) -> None:
    with pytest.raises(BlockOutOfRange, match=f"block {block} "):
        pool.zero_blocks([0, block])
    assert (pool.k == 1).all()
    with pytest.raises(BlockOutOfRange):
        pool.count_nonzero_bytes([block])
    with pytest.raises(BlockOutOfRange):
        pool.read_rows(0, np.array([block]), np.array([0]))


def test_an_offset_outside_a_block_is_refused(pool: KVPool) -> None:
    with pytest.raises(KernelContractMismatch):
        pool.read_rows(0, np.array([0]), np.array([32]))


@pytest.mark.parametrize("block_size", [0, 8, 24, -16])
def test_a_block_size_that_is_not_whole_tiles_is_refused(block_size: int) -> None:
    with pytest.raises(UnsupportedKernelBlockSize) as refused:
        KVPool(1, 1, 1, 16, block_size)
    assert refused.value.reason == "unsupported_kernel_block_size"


@pytest.mark.parametrize(
    "geometry", [(0, 1, 1, 16), (1, 0, 1, 16), (1, 1, 0, 16), (1, 1, 1, 0), (1, 1, 1, 20)]
)
def test_a_geometry_no_kernel_computes_is_refused(geometry: tuple[int, int, int, int]) -> None:
    with pytest.raises(KernelContractMismatch):
        KVPool(*geometry)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(KernelContractMismatch, match="float64"):
        KVPool(1, 1, 1, 16, kv_dtype="float64")  # pyright: ignore[reportArgumentType]


def test_tables_split_block_by_block() -> None:
    assert split_table(np.array([[3, 0]]), 2).tolist() == [[6, 7, 0, 1]]
    assert split_table(np.array([[3, 0]]), 1).tolist() == [[3, 0]]


def good_batch() -> StepBatch:
    return StepBatch(
        tokens=np.zeros(3, dtype=np.int64),
        positions=np.array([15, 16, 0], dtype=np.int64),
        slots=np.array([31, 32, 0], dtype=np.int64),
        seq_starts=np.array([0, 2, 3], dtype=np.int32),
        context_lens=np.array([17, 1], dtype=np.int32),
        block_tables=np.array([[1, 2, 99], [0, 99, -5]], dtype=np.int32),
        logit_rows=np.array([1, 2], dtype=np.int64),
    )


def test_a_good_batch_passes_with_any_padding() -> None:
    good_batch().check(num_blocks=4, block_size=16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("positions", np.array([0, 1, 0])),
        ("positions", np.array([15, 16])),
        ("slots", np.array([31, 64, 0])),
        ("slots", np.array([31, -1, 0])),
        ("seq_starts", np.array([0, 2, 2])),
        ("seq_starts", np.array([0, 4, 3])),
        ("context_lens", np.array([1, 1])),
        ("context_lens", np.array([65, 1])),
        ("block_tables", np.array([[1, 4, 0], [0, 0, 0]])),
        ("block_tables", np.array([[1, 2, 0], [-1, 0, 0]])),
        ("block_tables", np.array([[1, 2, 0]])),
        ("logit_rows", np.array([3])),
        ("logit_rows", np.array([-1])),
    ],
)
def test_a_batch_that_would_make_a_kernel_guess_is_refused(field: str, value: np.ndarray) -> None:
    batch = good_batch()
    setattr(batch, field, value)
    with pytest.raises(KernelInputRefused, match="step batch refused"):
        batch.check(num_blocks=4, block_size=16)
