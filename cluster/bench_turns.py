"""Taking turns: how ``copyhold bench kernels`` times what it compares.

Owns the rule. Whatever is compared runs in one thread, call after call in turn, and a round keeps the least time of each: a
neighbour's load then meets all alike and mostly falls out. Times are CPU seconds of the thread, unless said otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from .bench_report import BenchRow, Target, bench_row

Work = Callable[[], object]
Least = Callable[[int], float]
"""The least seconds of so many calls; how work of another process takes its turns."""

REPEATS = 7


def least_of(work: Work) -> Least:
    """Turns of work in this thread."""

    def least(calls: int) -> float:
        best = float("inf")
        for _ in range(calls):
            started_s = time.thread_time()
            work()
            best = min(best, time.thread_time() - started_s)
        return best

    return least


def in_turns(works: Sequence[Least], rounds: int, repeats: int = REPEATS) -> list[list[float]]:
    """Per work, the least seconds of each round; the first call of each is not counted."""
    for work in works:
        work(1)
    found: list[list[float]] = [[] for _ in works]
    for _ in range(rounds):
        least = [float("inf")] * len(works)
        for _ in range(repeats):
            least = [min(best, work(1)) for best, work in zip(least, works, strict=True)]
        for kept, best in zip(found, least, strict=True):
            kept.append(best)
    return found


def against(
    name: str, peer: str, ours: Sequence[float], theirs: Sequence[float], target: Target, faster: bool = False
) -> list[BenchRow]:
    """Two rows: a ratio a round, and the same in ms. `faster` tells how often ours goes into theirs, else the reverse."""
    pairs = list(zip(ours, theirs, strict=True))
    ratios = [b / a if faster else a / b for a, b in pairs]
    peers: Mapping[str, Sequence[float]] = {peer: [b * 1e3 for b in theirs]}
    return [
        bench_row(name, f"of {peer}" if faster else f"x {peer}", ratios, target),
        bench_row(f"{name} ms", "ms", [a * 1e3 for a in ours], None, peers),
    ]
