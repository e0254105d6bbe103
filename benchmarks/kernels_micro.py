"""Kernels and linears alone, one thread, beside PyTorch on the same numbers: ``python benchmarks/kernels_micro.py --json``.

Owns no figure: it prints them in the format of ``copyhold bench``. Times are CPU seconds of the thread, so that a neighbour's
load moves them less than wall time; memory bandwidth is shared all the same, and the first row says how much of it was left.
The peer of attention is torch's scaled_dot_product_attention on K/V that already lie contiguous, its query groups folded into
rows, which nothing that pages can have.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from copyhold.cluster.bench_report import BenchReport, BenchRow, Machine, Target, bench_row, versions
from copyhold.cluster.cli_output import Output
from copyhold.kernels import cpu
from copyhold.kernels.pool import KVPool
from copyhold.models.linear import Linear

SMOLLM2_LINEARS = ((960, 576), (576, 576), (3072, 576), (576, 1536))
SMOLLM2_LAYERS = 30


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    cpu.warm_up()
    machine, rows = Machine(), [memory_read(options.runs)]
    rows += [
        decode("decode attention, 9/3 heads of 64, 8 x 300, 30 layers", 8, 300, 3, 3, 64, 30, options.runs),
        decode("decode attention, 32/8 heads of 128, 8 x 2048", 8, 2048, 8, 4, 128, 1, options.runs),
        prefill("prefill attention, 9/3 heads of 64, 256 over 2048", 256, 2048, options.runs),
    ]
    rows += [
        linears(dtype, count, options.runs)
        for dtype in (torch.float32, torch.bfloat16)
        for count in (1, 8, 256)
    ]
    facts, settings = machine.facts(), {"threads": 1, "clock": "CPU time of the thread"}
    report = BenchReport("kernels_micro", versions(), facts, settings, (), tuple(rows))
    Output(options.json).emit(report.document(), report.text())
    return 0 if report.ok else 1


def memory_read(runs: int) -> BenchRow:
    """A maximum over 256 MiB: what one thread can read now."""
    numbers = np.ones(1 << 26, dtype=np.float32)
    return bench_row(
        "memory read", "GB/s", [numbers.nbytes / s / 1e9 for s in timed(lambda: numbers.max(), runs)]
    )


def decode(
    name: str, batch: int, context: int, kv_heads: int, group: int, dim: int, layers: int, runs: int
) -> BenchRow:
    """One query row a sequence over all layers; K/V bytes read per second."""
    ours, theirs = attention(batch, 1, context, kv_heads, group, dim, layers)
    moved_gb = layers * batch * context * kv_heads * dim * 8 / 1e9
    peers = {"torch sdpa, contiguous": [moved_gb / s for s in timed(theirs, runs)]}
    return bench_row(name, "GB/s", [moved_gb / s for s in timed(ours, runs)], Target(15.0), peers)


def prefill(name: str, rows: int, context: int, runs: int) -> BenchRow:
    """The last rows of one context; multiply-adds of visible tokens per second, two operations each."""
    ours, theirs = attention(1, rows, context, 3, 3, 64, 1)
    work = 4 * 64 * 9 * rows * (context - rows / 2) / 1e9
    peers = {"torch sdpa, contiguous": [work / s for s in timed(theirs, runs)]}
    return bench_row(name, "GFLOP/s", [work / s for s in timed(ours, runs)], None, peers)


def attention(
    batch: int, rows: int, context: int, kv_heads: int, group: int, dim: int, layers: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The paged kernel over scattered blocks, and SDPA over contiguous K/V of the same shape."""
    rng = np.random.default_rng(0)
    blocks = -(-context // 16)
    pool = KVPool(layers, batch * blocks + 8, kv_heads, dim)
    pool.k[:] = rng.standard_normal(pool.k.shape, dtype=np.float32)
    pool.v[:] = rng.standard_normal(pool.v.shape, dtype=np.float32)
    tables = rng.permutation(pool.num_blocks)[: batch * blocks].reshape(batch, blocks).astype(np.int32)
    q = rng.standard_normal((batch * rows, kv_heads * group, dim), dtype=np.float32)
    starts = np.arange(0, batch * rows + 1, rows, dtype=np.int32)
    lens, out, scale = np.full(batch, context, dtype=np.int32), np.empty_like(q), np.float32(dim**-0.5)

    def paged() -> None:
        for layer in range(layers):
            cpu.paged_attention(q, pool.k[layer], pool.v[layer], tables, starts, lens, scale, out)

    keys, values = (torch.randn(layers, batch, kv_heads, context, dim) for _ in range(2))
    queries = torch.randn(batch, kv_heads, group * rows, dim)
    seen = torch.ones(rows, context, dtype=torch.bool).tril(context - rows).repeat(group, 1)
    mask = None if rows == 1 else seen

    def contiguous() -> None:
        for layer in range(layers):
            torch.nn.functional.scaled_dot_product_attention(queries, keys[layer], values[layer], mask)

    return paged, contiguous


def linears(dtype: torch.dtype, rows: int, runs: int) -> BenchRow:
    """All layers' products of SmolLM2, packed; the peer multiplies by plain matrices of the same order."""
    plain = [torch.randn(shape).to(dtype) for _ in range(SMOLLM2_LAYERS) for shape in SMOLLM2_LINEARS]
    inputs = [torch.randn(rows, weight.shape[1]).to(dtype) for weight in plain]
    packed = [Linear(weight) for weight in plain]

    def ours() -> None:
        for x, linear in zip(inputs, packed, strict=True):
            linear(x)

    def theirs() -> None:
        for x, weight in zip(inputs, plain, strict=True):
            torch.nn.functional.linear(x, weight)

    name = f"SmolLM2's linears without head, {rows} rows, {str(dtype).removeprefix('torch.')}"
    peers = {"torch linear": [s * 1e3 for s in timed(theirs, runs)]}
    return bench_row(name, "ms", [s * 1e3 for s in timed(ours, runs)], None, peers)


def timed(work: Callable[[], object], runs: int) -> list[float]:
    """CPU seconds of each run, after one that is not counted."""
    work()
    found = []
    for _ in range(runs):
        started_s = time.thread_time()
        work()
        found.append(time.thread_time() - started_s)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
