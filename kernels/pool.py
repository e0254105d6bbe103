"""Owns the K/V memory of one rank: allocation, zeroing, copying, counting what is left and reading rows back.

The layout is that of `interface.py`, for all layers: K `[layers, tiles, kv_heads, head_dim, 16]`, V `[layers, tiles,
kv_heads, 16, head_dim]`. Invariant: both arrays are views of one 64-byte aligned allocation whose pages are mapped before
the constructor returns. Contracts: K143, K145, K232.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from . import cpu_rows
from .choices import KVDtype
from .errors import BlockOutOfRange, KernelContractMismatch, UnsupportedKernelBlockSize
from .interface import KV_STORAGE, TILE, Floats, kv_dtype_of, widen_rows

_ALIGNMENT_BYTES = 64

BlockIds = npt.NDArray[np.integer] | Iterable[int]


class KVPool:
    """K/V rows of every layer for `num_blocks` blocks; owns its memory, zeroed and mapped at creation.

    Raises: `UnsupportedKernelBlockSize`, `KernelContractMismatch` (no memory was taken).
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int = TILE,
        kv_dtype: KVDtype = "float32",
    ) -> None:
        if block_size <= 0 or block_size % TILE:
            raise UnsupportedKernelBlockSize(block_size, TILE)
        if min(num_layers, num_blocks, kv_heads, head_dim) <= 0:
            raise KernelContractMismatch(
                f"pool geometry must be positive: layers {num_layers}, blocks {num_blocks}, "
                f"KV heads {kv_heads}, head dim {head_dim}"
            )
        if head_dim % 8:
            raise KernelContractMismatch(f"head dim {head_dim} is not a multiple of 8")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.kv_dtype: KVDtype = kv_dtype_of(kv_dtype)
        self.tiles_per_block = block_size // TILE
        storage = KV_STORAGE[self.kv_dtype]
        plane_bytes = block_size * kv_heads * head_dim * storage.itemsize
        self._memory = _aligned_zeros((2 * num_layers, num_blocks, plane_bytes))
        shape = (2, num_layers, num_blocks * self.tiles_per_block, kv_heads, head_dim * TILE)
        values = self._memory.view(storage).reshape(shape)
        self.k = values[0].reshape(*shape[1:4], head_dim, TILE)
        """`[layers, tiles, kv_heads, head_dim, 16]`, of a type of `KV_STORAGE`"""
        self.v = values[1].reshape(*shape[1:4], TILE, head_dim)
        """`[layers, tiles, kv_heads, 16, head_dim]`"""

    @property
    def total_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self._memory.nbytes // self.num_blocks

    def zero_blocks(self, block_ids: BlockIds) -> None:
        """Write zeros over every row of these blocks, in all layers.

        Raises: `BlockOutOfRange` (nothing was zeroed).
        """
        blocks = self._checked(block_ids)
        if blocks.size:
            cpu_rows.zero_blocks(self._memory, blocks)

    def count_nonzero_bytes(self, block_ids: BlockIds) -> int:
        """Read every byte of these blocks back and count those that are not zero (a negative zero counts).

        Raises: `BlockOutOfRange`.
        """
        blocks = self._checked(block_ids)
        return int(cpu_rows.count_nonzero(self._memory, blocks)) if blocks.size else 0

    def copy_rows(self, sources: BlockIds, targets: BlockIds, rows: BlockIds) -> None:
        """Rows `[0, rows[i])` of block `sources[i]` become those of `targets[i]`, in all layers; no other row changes.

        Copies happen in the order given. Raises: `BlockOutOfRange`, `KernelContractMismatch` for more rows than a
        block has or lists of unequal length (nothing was copied).
        """
        origins, goals = self._checked(sources), self._checked(targets)
        counts = _int64s(rows)
        if not len(origins) == len(goals) == len(counts):
            raise KernelContractMismatch("copies need one source, one target and one row count each")
        if counts.size and (counts.min() < 0 or counts.max() > self.block_size):
            raise KernelContractMismatch(
                f"a copy of more rows than a block's {self.block_size}, or fewer than none"
            )
        if counts.size:
            cpu_rows.copy_rows(self.k, self.v, origins, goals, counts, self.tiles_per_block)

    def read_rows(
        self, layer: int, block_ids: npt.NDArray[np.integer], offsets: npt.NDArray[np.integer]
    ) -> tuple[Floats, Floats]:
        """Copies of the K and V rows at `(block_ids[i], offsets[i])`, each `[rows, kv_heads, head_dim]` float32.

        Raises: `BlockOutOfRange`, `KernelContractMismatch` for an offset outside a block.
        """
        blocks = self._checked(block_ids)
        inner = _int64s(offsets)
        if inner.size and (inner.min() < 0 or inner.max() >= self.block_size):
            raise KernelContractMismatch(f"row offset outside a block of {self.block_size} rows")
        tiles = blocks * self.tiles_per_block + inner // TILE
        lanes = inner % TILE
        return widen_rows(self.k[layer][tiles, :, :, lanes]), widen_rows(self.v[layer][tiles, :, lanes, :])

    def _checked(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        blocks = _int64s(block_ids)
        bad = blocks[(blocks < 0) | (blocks >= self.num_blocks)]
        if bad.size:
            raise BlockOutOfRange(int(bad[0]), self.num_blocks)
        return blocks


def split_table(blocks: npt.NDArray[np.integer], tiles_per_block: int) -> npt.NDArray[np.int64]:
    """Map block ids to tile ids along the last axis: `a` becomes `a*q .. a*q + q-1` (K143)."""
    wide = np.asarray(blocks, dtype=np.int64)
    if tiles_per_block == 1:
        return wide
    tiles = wide[..., None] * tiles_per_block + np.arange(tiles_per_block, dtype=np.int64)
    return tiles.reshape(*wide.shape[:-1], wide.shape[-1] * tiles_per_block)


def _int64s(numbers: BlockIds) -> npt.NDArray[np.int64]:
    listed = numbers if isinstance(numbers, np.ndarray) else list(numbers)
    return np.ascontiguousarray(np.asarray(listed, dtype=np.int64).reshape(-1))


def _aligned_zeros(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(count + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    memory = raw[start : start + count].reshape(shape)
    memory.fill(0)
    return memory
