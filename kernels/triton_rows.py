"""GPU kernels over K/V rows: write by slot, copy the valid rows, zero, and count bytes that are not zero.

Owns the device code only; `triton_pool` checks and launches. All but `write_rows` see the pool as planes (layer x K or V)
of tiles `[kv_heads, TILE, head_dim]`, each contiguous; offsets are int64 before they meet a stride. Zeroing and counting
take whole 32-bit words, which every tile is a multiple of. Invariant: a program writes only rows that its job names.
Contracts: K141, K143.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_rows(
    k_ptr,
    v_ptr,
    k_rows_ptr,
    v_rows_ptr,
    slots_ptr,
    k_row_stride,
    v_row_stride,
    tile_stride,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Store rows `[T, WIDTH]` (WIDTH = kv_heads x DIM) of K and V at `slots[T]` of one layer; grid `(T, chunks)`.

    A slot is `block * block_size + offset`, so `slot // TILE` is the tile whatever the block size.
    """
    at = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + at)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    ok = column < WIDTH
    inner = column // DIM * (TILE * DIM) + (slot % TILE) * DIM + column % DIM
    to = (slot // TILE).to(tl.int64) * tile_stride + inner
    k = tl.load(k_rows_ptr + at * k_row_stride + column, mask=ok)
    tl.store(k_ptr + to, k.to(k_ptr.dtype.element_ty), mask=ok)
    v = tl.load(v_rows_ptr + at * v_row_stride + column, mask=ok)
    tl.store(v_ptr + to, v.to(v_ptr.dtype.element_ty), mask=ok)


@triton.jit
def copy_rows(
    planes_ptr,
    jobs_ptr,
    plane_stride,
    tile_stride,
    TILES: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy the first `rows` rows of block `source` to block `target` in every plane.

    jobs `[n, 3]` int32: source, target, rows. WIDTH = kv_heads x TILE x DIM, a tile's elements. Grid `(n * TILES, planes)`.
    """
    job = jobs_ptr + tl.program_id(0) // TILES * 3
    part = tl.program_id(0) % TILES
    rows = tl.load(job + 2) - part * TILE
    plane = planes_ptr + tl.program_id(1).to(tl.int64) * plane_stride
    source = plane + (tl.load(job).to(tl.int64) * TILES + part) * tile_stride
    target = plane + (tl.load(job + 1).to(tl.int64) * TILES + part) * tile_stride
    if rows > 0:
        for start in range(0, WIDTH, CHUNK):
            element = start + tl.arange(0, CHUNK)
            ok = (element < WIDTH) & ((element // DIM) % TILE < rows)
            tl.store(target + element, tl.load(source + element, mask=ok), mask=ok)


@triton.jit
def zero_tiles(words_ptr, tiles_ptr, plane_stride, tile_stride, WORDS: tl.constexpr, CHUNK: tl.constexpr):
    """Zero every word of each tile in every plane; strides count words. Grid `(tiles, planes)`."""
    tile = tl.load(tiles_ptr + tl.program_id(0)).to(tl.int64)
    base = words_ptr + tl.program_id(1).to(tl.int64) * plane_stride + tile * tile_stride
    for start in range(0, WORDS, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(base + at, tl.zeros([CHUNK], tl.int32), mask=at < WORDS)


@triton.jit
def count_nonzero_bytes(
    words_ptr, tiles_ptr, counts_ptr, plane_stride, tile_stride, WORDS: tl.constexpr, CHUNK: tl.constexpr
):
    """counts `[tiles, planes]` int32: bytes other than zero of each tile, of which it has at most `4 * WORDS`."""
    tile = tl.load(tiles_ptr + tl.program_id(0)).to(tl.int64)
    base = words_ptr + tl.program_id(1).to(tl.int64) * plane_stride + tile * tile_stride
    found = tl.zeros([CHUNK], tl.int32)
    for start in range(0, WORDS, CHUNK):
        at = start + tl.arange(0, CHUNK)
        word = tl.load(base + at, mask=at < WORDS, other=0)
        found += ((word & 0xFF) != 0).to(tl.int32) + ((word & 0xFF00) != 0).to(tl.int32)
        found += ((word & 0xFF0000) != 0).to(tl.int32) + (((word >> 24) & 0xFF) != 0).to(tl.int32)
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(counts_ptr + place, tl.sum(found, 0))
