"""What each control of the ledger costs: the same load with it and without it, in turns, in one process.

Owns the rows ``price of ...``. A row's samples are differences of the two best times of one round, so that a busy moment of
the machine weighs little and meets both. Invariant: the copy that has every control is loaded as the others are
(`bench_variants`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .bench_report import BenchRow, bench_row
from .bench_variants import CONTROLS, variant

_LOADS = ("decode step 256", "allocate 32k")
_POOL_BLOCKS, _REQUESTS = 1 << 17, 1024
_EACH = 5
Rounds = dict[str, list[float]]


def price_rows(runs: int, say: Callable[[str, str], None]) -> list[BenchRow]:
    """Two rows a control and two for all of them; `peers` has what either side took."""
    sides: dict[str, Rounds] = {}
    subjects: dict[str, _Subject] = {}
    left_out = {"": (), **{name: (name,) for name in CONTROLS}, "all controls": CONTROLS}
    for name, controls in left_out.items():
        say("ledger", f"compiling without {name}" if name else "compiling")
        subjects[name] = _Subject(variant(*controls))
        sides[name] = {load: [] for load in _LOADS}
    say("ledger", "prices of controls")
    for _ in range(max(3, runs // _EACH)):
        for name, subject in subjects.items():
            for load, best in subject.round().items():
                sides[name][load].append(best)
    return [
        _row(name, load, sides[""][load], sides[name][load])
        for name in (*CONTROLS, "all controls")
        for load in _LOADS
    ]


def _row(name: str, load: str, with_it: list[float], without: list[float]) -> BenchRow:
    samples = [on - off for on, off in zip(with_it, without, strict=True)]
    label = name if name in CONTROLS else "all"
    return bench_row(f"price of {label}, {load}", "us", samples, None, {"with": with_it, "without": without})


class _Subject:
    """One variant's ledger, more than 90 % used and fragmented."""

    def __init__(self, load: ModuleType) -> None:
        self._bench: Any = load.Bench(_POOL_BLOCKS, _REQUESTS, load.LONG_TOKENS + 2048)
        self._small = self._bench.running(256, 200)
        self._bench.fill(3 * load.LONG_TOKENS // load.BLOCK, 8192)
        assert self._bench.used() > 0.9
        self.round()

    def round(self) -> dict[str, float]:
        """The best of a few samples of each load."""
        decoded = self._bench.decode_us(self._small, _EACH)
        allocated = [self._bench.long_life_us()["allocate 32k"] for _ in range(_EACH)]
        return dict(zip(_LOADS, (min(decoded), min(allocated)), strict=True))
