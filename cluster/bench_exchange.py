"""All-reduce rows of ``copyhold bench kernels``: shared memory beside gloo, two ranks in processes of their own.

Wall time of one call on rank 0, median of a round; both ranks call as fast as they can, so with fewer free cores than ranks the
scheduler is part of the figure.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import numpy as np
import torch

from copyhold.kernels import exchange
from copyhold.models.collective import GlooCollective, RendezvousStore
from copyhold.models.shm_collective import ShmCollective

from .bench_report import BenchRow, Target, bench_row

_TIMEOUT_S = 60.0
_RANKS = 2
_MESSAGES = (("allreduce 4KB us", 4096, 300), ("allreduce 1MB us", 1 << 20, 40))
"""(row, bytes, calls a round)."""

Figures = dict[str, dict[str, list[float]]]
"""Microseconds of each round, by row and by what carried it."""


def exchange_rows(rounds: int) -> list[BenchRow]:
    """Sums of two messages; the small one at least 50 times faster than gloo. No rows where the loops are not supported."""
    if not exchange.supported():
        return []
    exchange.warm_up()
    context = multiprocessing.get_context("spawn")
    store = RendezvousStore.open(_TIMEOUT_S)
    other = context.Process(target=_take_part, args=(store.port, rounds))
    other.start()
    found = _take_turns(store, 0, rounds)
    other.join()
    rows = []
    for name, by in found.items():
        bound = float(np.median(by["gloo"])) / 50
        target = Target(bound, at_least=False) if "4KB" in name else None
        rows.append(bench_row(name, "us", by["shm"], target, {"gloo": by["gloo"]}))
    return rows


def _take_part(port: int, rounds: int) -> None:
    """The other rank."""
    exchange.warm_up()
    _take_turns(RendezvousStore.connect(port, _TIMEOUT_S), 1, rounds)


def _take_turns(store: RendezvousStore, rank: int, rounds: int) -> Figures:
    """Both collectives in turn over each message."""
    torch.set_num_threads(1)
    place: tuple[Any, ...] = (store, rank, _RANKS, 1, _TIMEOUT_S)
    groups = {"shm": ShmCollective(*place), "gloo": GlooCollective(*place)}
    figures: Figures = {name: {kind: [] for kind in groups} for name, _, _ in _MESSAGES}
    for name, size_bytes, calls in _MESSAGES:
        tensor = torch.zeros(size_bytes // 4)
        for _ in range(rounds):
            for kind, group in groups.items():
                times_us = []
                for _ in range(calls):
                    started_ns = time.perf_counter_ns()
                    group.all_reduce(tensor)
                    times_us.append((time.perf_counter_ns() - started_ns) / 1e3)
                figures[name][kind].append(float(np.median(times_us)))
    return figures
