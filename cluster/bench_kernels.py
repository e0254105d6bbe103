"""Figures of ``copyhold bench kernels``: attention, memory, linears and sums over ranks, one thread, beside their peers.

Owns the order of the sections. Every section has its file and returns rows; a new one is a line in ``run_kernels_bench``.
Invariant: a figure and its peer's were taken in turns in this call.
"""

from __future__ import annotations

import torch

from copyhold.kernels import cpu

from .bench_attention import attention_rows
from .bench_exchange import exchange_rows
from .bench_linears import linear_rows
from .bench_memory import memory_rows, read_row
from .bench_report import BenchReport, BenchRow, Machine, versions
from .bench_shared import shared_rows
from .cli_output import Progress


def run_kernels_bench(rounds: int, with_peers: bool, say: Progress) -> BenchReport:
    """All rows; `with_peers` runs vLLM's kernel too, where it is installed."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    machine = Machine()
    say("kernels", "compiling")
    for kv_dtype in ("float32", "bfloat16"):
        cpu.warm_up(kv_dtype)
    say("kernels", "memory")
    read = read_row(rounds)
    rows: list[BenchRow] = [read, *memory_rows(rounds)]
    say("kernels", "attention")
    attention, notes = attention_rows(rounds, with_peers, read.max)
    rows += attention
    say("kernels", "shared prefix")
    rows += shared_rows(rounds)
    say("kernels", "linears")
    rows += linear_rows(rounds)
    say("kernels", "sums over ranks")
    rows += exchange_rows(rounds)
    settings = {
        "threads": 1,
        "rounds": rounds,
        "clock": "CPU time of the thread; wall time for sums over ranks",
    }
    return BenchReport("kernels", versions(), machine.facts(), settings, notes, tuple(rows))
