"""Owns the K/V memory of one rank on a GPU: allocation, writing rows, copying, zeroing, counting and reading back.

Layout: one allocation `[2, layers, tiles, kv_heads, TILE, head_dim]`, K first, row-major, in float32, float16 or bfloat16.
Block `a` is the tiles `[a*q, (a+1)*q)` with `q = block_size / TILE` (K143). A tile of one head is contiguous, so that a
program reads whole cache lines along the head dim. Invariant: every launch touches only rows of blocks that were checked
to lie in the pool. The same code runs on the CPU under Triton's interpreter; `triton_backend` says when it may.
Contracts: K141, K143, K145, K232.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from . import triton_rows
from .errors import BlockOutOfRange, KernelContractMismatch, KernelInputRefused, UnsupportedKernelBlockSize
from .interface import TILE
from .triton_config import ELEMENT_BYTES, MAX_HEAD_DIM, power_of_two
from .triton_launch import launch

BlockIds = npt.NDArray[np.integer] | Iterable[int]

_ROW_CHUNK = 1024
_PLANE_CHUNK = 2048
_MAX_GRID_Y = 65_535


class TritonPool:
    """K/V rows of every layer for `num_blocks` blocks; owns its memory, zeroed at creation, unless the caller lends some.

    Raises: `UnsupportedKernelBlockSize`, `KernelContractMismatch` (no memory was taken).
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int = TILE,
        dtype: str = "bfloat16",
        device: torch.device | str = "cuda",
        memory: torch.Tensor | None = None,
    ) -> None:
        if block_size <= 0 or block_size % TILE:
            raise UnsupportedKernelBlockSize(block_size, TILE)
        if dtype not in ELEMENT_BYTES:
            raise KernelContractMismatch(f"the triton backend has no kernels for {dtype}")
        if min(num_layers, num_blocks, kv_heads, head_dim) <= 0 or 2 * num_layers > _MAX_GRID_Y:
            raise KernelContractMismatch(
                f"pool geometry: layers {num_layers}, blocks {num_blocks}, KV heads {kv_heads}, head dim {head_dim}"
            )
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise KernelContractMismatch(f"head dim {head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.tiles_per_block = block_size // TILE
        shape = (2, num_layers, num_blocks * self.tiles_per_block, kv_heads, TILE, head_dim)
        self._memory = _zeros(shape, dtype, device) if memory is None else _lent(memory, shape, dtype)
        self._planes = self._memory.view(2 * num_layers, *shape[2:])
        self._words = self._planes.view(torch.int32)

    @property
    def device(self) -> torch.device:
        return self._memory.device

    @property
    def k(self) -> torch.Tensor:
        """`[layers, tiles, kv_heads, TILE, head_dim]`"""
        return self._memory[0]

    @property
    def v(self) -> torch.Tensor:
        """`[layers, tiles, kv_heads, TILE, head_dim]`"""
        return self._memory[1]

    @property
    def total_bytes(self) -> int:
        return self._memory.nbytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return self._memory.nbytes // self.num_blocks

    def write_rows(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store rows `[T, kv_heads, head_dim]` at `slots[T]` (int64, this device) of one layer.

        Slots are trusted: `StepBatch.check` has seen them, and reading them back would stall the GPU.

        Raises: `KernelInputRefused` for shapes that do not match (nothing was written).
        """
        write_layer_rows(self.k[layer], self.v[layer], k, v, slots)

    def copy_rows(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """For each (source block, target block, rows) copy exactly the first `rows` rows, in all layers.

        Raises: `BlockOutOfRange`; `KernelInputRefused` for rows outside a block, a target named twice, or one that is
        also a source, since programs run in no order (nothing was copied).
        """
        jobs = np.array(copies, dtype=np.int64).reshape(-1, 3)
        sources, targets = self._checked(jobs[:, 0]), self._checked(jobs[:, 1])
        if jobs.size and (jobs[:, 2].min() < 0 or jobs[:, 2].max() > self.block_size):
            raise KernelInputRefused("copies", f"rows outside a block of {self.block_size}")
        if np.unique(targets).size < targets.size or np.isin(targets, sources).any():
            raise KernelInputRefused("copies", "a target is named twice or is also a source")
        width = self.kv_heads * TILE * self.head_dim
        launch(
            triton_rows.copy_rows,
            (jobs.shape[0] * self.tiles_per_block, 2 * self.num_layers),
            self._planes,
            self._index(jobs),
            self._planes.stride(0),
            self._planes.stride(1),
            TILES=self.tiles_per_block,
            WIDTH=width,
            DIM=self.head_dim,
            TILE=TILE,
            CHUNK=min(_PLANE_CHUNK, power_of_two(width)),
        )

    def zero_blocks(self, block_ids: BlockIds) -> None:
        """Write zeros over every row of these blocks, in all layers.

        Raises: `BlockOutOfRange` (nothing was zeroed).
        """
        tiles = self._tiles(block_ids)
        strides, grid, sizes = self._word_launch(tiles)
        launch(triton_rows.zero_tiles, grid, self._words, self._index(tiles), *strides, **sizes)

    def count_nonzero_bytes(self, block_ids: BlockIds) -> int:
        """Read every byte of these blocks back and count those that are not zero (a negative zero counts).

        Raises: `BlockOutOfRange`.
        """
        tiles = self._tiles(block_ids)
        strides, grid, sizes = self._word_launch(tiles)
        counts = torch.empty(grid, dtype=torch.int32, device=self.device)
        launch(
            triton_rows.count_nonzero_bytes, grid, self._words, self._index(tiles), counts, *strides, **sizes
        )
        return int(counts.sum(dtype=torch.int64))

    def read_rows(
        self, layer: int, block_ids: npt.NDArray[np.integer], offsets: npt.NDArray[np.integer]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Copies of the K and V rows at `(block_ids[i], offsets[i])` in float32, each `[rows, kv_heads, head_dim]`.

        Raises: `BlockOutOfRange`, `KernelContractMismatch` for an offset outside a block.
        """
        blocks = self._checked(block_ids)
        inner = np.asarray(offsets, dtype=np.int64)
        if inner.size and (inner.min() < 0 or inner.max() >= self.block_size):
            raise KernelContractMismatch(f"row offset outside a block of {self.block_size} rows")
        tiles = torch.from_numpy(blocks * self.tiles_per_block + inner // TILE).to(self.device)
        lanes = torch.from_numpy(inner % TILE).to(self.device)
        k, v = (plane[layer][tiles, :, lanes, :].float().cpu().numpy() for plane in self._memory)
        return k, v

    def _word_launch(
        self, tiles: npt.NDArray[np.int64]
    ) -> tuple[tuple[int, int], tuple[int, int], dict[str, int]]:
        """Strides of planes and tiles in 32-bit words, the grid, and the sizes that are compiled in."""
        strides = (self._words.stride(0), self._words.stride(1))
        sizes = {"WORDS": strides[1], "CHUNK": min(_PLANE_CHUNK, power_of_two(strides[1]))}
        return strides, (int(tiles.size), 2 * self.num_layers), sizes

    def _index(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int32)).to(self.device)

    def _tiles(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        blocks = self._checked(block_ids)
        return (blocks[:, None] * self.tiles_per_block + np.arange(self.tiles_per_block)).reshape(-1)

    def _checked(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        ids = block_ids if isinstance(block_ids, np.ndarray) else list(block_ids)
        blocks = np.asarray(ids, dtype=np.int64).reshape(-1)
        bad = blocks[(blocks < 0) | (blocks >= self.num_blocks)]
        if bad.size:
            raise BlockOutOfRange(int(bad[0]), self.num_blocks)
        return blocks


def write_layer_rows(
    k_layer: torch.Tensor, v_layer: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store rows `[T, kv_heads, head_dim]` at `slots[T]` of a layer `[tiles, kv_heads, TILE, head_dim]`.

    Raises: `KernelInputRefused` for shapes that do not match (nothing was written).
    """
    _, kv_heads, _, head_dim = k_layer.shape
    for name, rows in (("k", k), ("v", v)):
        check_rows(name, rows, (slots.shape[0], kv_heads, head_dim))
    width = kv_heads * head_dim
    chunk = min(_ROW_CHUNK, power_of_two(width))
    launch(
        triton_rows.write_rows,
        (slots.shape[0], -(-width // chunk)),
        k_layer,
        v_layer,
        k,
        v,
        slots,
        k.stride(0),
        v.stride(0),
        k_layer.stride(0),
        WIDTH=width,
        DIM=head_dim,
        TILE=TILE,
        CHUNK=chunk,
    )


def check_rows(name: str, rows: torch.Tensor, wanted: tuple[int, int, int]) -> None:
    """Refuse a tensor of another shape, or whose rows are not contiguous; rows themselves may lie apart.

    Raises: `KernelInputRefused`.
    """
    if tuple(rows.shape) != wanted or (wanted[0] and not rows[0].is_contiguous()):
        raise KernelInputRefused(name, f"shape {tuple(rows.shape)}, expected contiguous rows of {wanted}")


def _zeros(shape: tuple[int, ...], dtype: str, device: torch.device | str) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)


def _lent(memory: torch.Tensor, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The caller's memory, as it is: its content too."""
    if memory.dtype != getattr(torch, dtype) or tuple(memory.shape) != shape or not memory.is_contiguous():
        raise KernelContractMismatch(
            f"memory {tuple(memory.shape)} of {memory.dtype}, expected {shape} of {dtype}"
        )
    return memory
