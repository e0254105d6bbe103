"""Memory rows of ``copyhold bench kernels``: what one thread reads, and writing, copying and zeroing rows beside memcpy."""

from __future__ import annotations

import numpy as np

from copyhold.kernels import cpu
from copyhold.kernels.pool import KVPool

from .bench_report import BenchRow, Target, bench_row
from .bench_turns import against, in_turns, least_of

_KV_HEADS, _DIM = 8, 128
_BLOCKS, _LAYERS = 64, 4


def read_row(rounds: int) -> BenchRow:
    """A maximum over 256 MiB: what one thread can read now."""
    numbers = np.ones(1 << 26, dtype=np.float32)
    (found,) = in_turns([least_of(numbers.max)], rounds)
    return bench_row("memory read", "GB/s", [numbers.nbytes / s / 1e9 for s in found])


def memory_rows(rounds: int) -> list[BenchRow]:
    """`write`, `copy`, `zero` and a decode step's write; each as often as it goes into memcpy of the same bytes."""
    return [*_write_rows(rounds), *_block_rows(rounds)]


def _write_rows(rounds: int) -> list[BenchRow]:
    rng = np.random.default_rng(0)
    pool = KVPool(1, 64, _KV_HEADS, _DIM)
    rows = rng.standard_normal((2, 512, _KV_HEADS, _DIM), dtype=np.float32)
    blocks = rng.permutation(64)[:32]
    slots = (blocks[:, None] * 16 + np.arange(16)).reshape(-1)
    flat = np.empty_like(rows)
    ours, theirs = in_turns(
        [
            least_of(lambda: cpu.write_rows(pool.k[0], pool.v[0], rows[0], rows[1], slots)),
            least_of(lambda: np.copyto(flat, rows)),
        ],
        rounds,
    )
    few = np.arange(8) * 16 + 5
    last = rows[:, :8].copy()
    (decode,) = in_turns(
        [least_of(lambda: cpu.write_rows(pool.k[0], pool.v[0], last[0], last[1], few))], rounds, 50
    )
    return [
        *against("write", "memcpy", ours, theirs, Target(0.35), faster=True),
        bench_row("decode write us a row", "us", [s * 1e6 / 8 for s in decode], Target(2.0, at_least=False)),
    ]


def _block_rows(rounds: int) -> list[BenchRow]:
    pool = KVPool(_LAYERS, 2 * _BLOCKS, _KV_HEADS, _DIM)
    pool.k.fill(1)
    pool.v.fill(1)
    order = np.random.default_rng(0).permutation(2 * _BLOCKS)
    sources, targets, all_rows = order[:_BLOCKS], order[_BLOCKS:], np.full(_BLOCKS, 16)
    source = np.ones(_BLOCKS * pool.block_bytes, dtype=np.uint8)
    flat = np.empty_like(source)
    copy, zero, memcpy = in_turns(
        [
            least_of(lambda: pool.copy_rows(sources, targets, all_rows)),
            least_of(lambda: pool.zero_blocks(targets)),
            least_of(lambda: np.copyto(flat, source)),
        ],
        rounds,
    )
    return [
        *against("copy", "memcpy", copy, memcpy, Target(0.6), faster=True),
        *against("zero", "memcpy", zero, memcpy, Target(0.6), faster=True),
    ]
