"""Sums over ranks in processes of their own, shared memory beside gloo: ``python benchmarks/allreduce_micro.py --ranks 2``.

Owns no figure: it prints them in the format of ``copyhold bench``. Wall time of one call on rank 0, median of a run; all
ranks call as fast as they can, so with fewer free cores than ranks the scheduler is part of the figure.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from copyhold.cluster.bench_report import BenchReport, Machine, bench_row, versions
from copyhold.cluster.cli_output import Output
from copyhold.kernels import exchange
from copyhold.models.collective import GlooCollective, RendezvousStore
from copyhold.models.shm_collective import ShmCollective

TIMEOUT_S = 60.0
MESSAGES = (("4 KB", 4096, 1000), ("1 MB", 1 << 20, 100))
"""(name, bytes, calls a run)."""

Figures = dict[str, dict[str, list[float]]]
"""Microseconds of each run, by message and by what carried it."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    exchange.warm_up()
    machine, found = Machine(), measured(options.ranks, options.runs)
    rows = [
        bench_row(f"all-reduce {name}, {options.ranks} ranks", "us", by["shm"], None, {"gloo": by["gloo"]})
        for name, by in found.items()
    ]
    settings = {"threads": 1, "ranks": options.ranks, "clock": "wall time of rank 0"}
    report = BenchReport("allreduce_micro", versions(), machine.facts(), settings, (), tuple(rows))
    Output(options.json).emit(report.document(), report.text())
    return 0 if report.ok else 1


def measured(ranks: int, runs: int) -> Figures:
    """Rank 0's figures; every other rank only takes part."""
    context = multiprocessing.get_context("spawn")
    store = RendezvousStore.open(TIMEOUT_S)
    others = [
        context.Process(target=take_part, args=(store.port, rank, ranks, runs)) for rank in range(1, ranks)
    ]
    for other in others:
        other.start()
    figures = take_turns(store, 0, ranks, runs)
    for other in others:
        other.join()
    return figures


def take_part(port: int, rank: int, ranks: int, runs: int) -> None:
    """One rank in a process of its own."""
    exchange.warm_up()
    take_turns(RendezvousStore.connect(port, TIMEOUT_S), rank, ranks, runs)


def take_turns(store: RendezvousStore, rank: int, ranks: int, runs: int) -> Figures:
    """Both collectives in turn over each message, so that a neighbour's load meets both alike."""
    torch.set_num_threads(1)
    place: tuple[Any, ...] = (store, rank, ranks, 1, TIMEOUT_S)
    groups = {"shm": ShmCollective(*place), "gloo": GlooCollective(*place)}
    figures: Figures = {name: {kind: [] for kind in groups} for name, _, _ in MESSAGES}
    for name, size_bytes, calls in MESSAGES:
        tensor = torch.zeros(size_bytes // 4)
        for _ in range(runs):
            for kind, group in groups.items():
                times_us = []
                for _ in range(calls):
                    started_ns = time.perf_counter_ns()
                    group.all_reduce(tensor)
                    times_us.append((time.perf_counter_ns() - started_ns) / 1e3)
                figures[name][kind].append(float(np.median(times_us)))
    return figures


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
