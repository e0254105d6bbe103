"""Owns the K/V memory of one rank: allocation, zeroing, counting what is left and reading rows back.

Layout: K is `[layers, tiles, kv_heads, head_dim, 16]`, so that scores of 16 tokens fill one vector without
a horizontal sum; V is `[layers, tiles, kv_heads, 16, head_dim]`. Block `a` is the tiles `[a*q, (a+1)*q)` with
`q = block_size / 16` (K143). Invariant: both arrays are views of one 64-byte aligned allocation whose pages
are mapped before the constructor returns. Contracts: K143, K145, K232.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .errors import BlockOutOfRange, KernelContractMismatch, UnsupportedKernelBlockSize

TILE = 16
"""Tokens of one kernel tile, independent of the allocator's block size."""

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
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        if block_size <= 0 or block_size % TILE:
            raise UnsupportedKernelBlockSize(block_size, TILE)
        if np.dtype(dtype) != np.float32:
            raise KernelContractMismatch(f"the cpu backend keeps K/V in float32, not {np.dtype(dtype).name}")
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
        self.dtype = np.dtype(np.float32)
        self.tiles_per_block = block_size // TILE
        shape = (2, num_layers, num_blocks * self.tiles_per_block, kv_heads, head_dim * TILE)
        self._memory = _aligned_zeros(shape)
        self.k = self._memory[0].reshape(*shape[1:4], head_dim, TILE)
        """`[layers, tiles, kv_heads, head_dim, 16]`"""
        self.v = self._memory[1].reshape(*shape[1:4], TILE, head_dim)
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
        tiles = self._tiles(block_ids)
        if tiles.size:
            self._memory[:, :, tiles] = 0

    def count_nonzero_bytes(self, block_ids: BlockIds) -> int:
        """Read every byte of these blocks back and count those that are not zero (a negative zero counts).

        Raises: `BlockOutOfRange`.
        """
        tiles = self._tiles(block_ids)
        found = 0
        for layer in range(self.num_layers if tiles.size else 0):
            found += sum(int(np.count_nonzero(part[layer, tiles].view(np.uint8))) for part in self._memory)
        return found

    def read_rows(
        self, layer: int, block_ids: npt.NDArray[np.integer], offsets: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Copies of the K and V rows at `(block_ids[i], offsets[i])`, each `[rows, kv_heads, head_dim]`.

        Raises: `BlockOutOfRange`, `KernelContractMismatch` for an offset outside a block.
        """
        blocks = self._checked(block_ids)
        inner = np.asarray(offsets, dtype=np.int64)
        if inner.size and (inner.min() < 0 or inner.max() >= self.block_size):
            raise KernelContractMismatch(f"row offset outside a block of {self.block_size} rows")
        tiles = blocks * self.tiles_per_block + inner // TILE
        lanes = inner % TILE
        return self.k[layer][tiles, :, :, lanes].copy(), self.v[layer][tiles, :, lanes, :].copy()

    def _checked(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        ids = block_ids if isinstance(block_ids, np.ndarray) else list(block_ids)
        blocks = np.asarray(ids, dtype=np.int64).reshape(-1)
        bad = blocks[(blocks < 0) | (blocks >= self.num_blocks)]
        if bad.size:
            raise BlockOutOfRange(int(bad[0]), self.num_blocks)
        return blocks

    def _tiles(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        return split_table(self._checked(block_ids), self.tiles_per_block)


def split_table(blocks: npt.NDArray[np.integer], tiles_per_block: int) -> npt.NDArray[np.int64]:
    """Map block ids to tile ids along the last axis: `a` becomes `a*q .. a*q + q-1` (K143)."""
    wide = np.asarray(blocks, dtype=np.int64)
    if tiles_per_block == 1:
        return wide
    tiles = wide[..., None] * tiles_per_block + np.arange(tiles_per_block, dtype=np.int64)
    return tiles.reshape(*wide.shape[:-1], wide.shape[-1] * tiles_per_block)


def _aligned_zeros(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.empty(count * 4 + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    memory = raw[start : start + count * 4].view(np.float32).reshape(shape)
    memory.fill(0)
    return memory
