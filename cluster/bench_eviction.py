"""Hit rates of every policy on traces of requests: ``copyhold bench eviction``.

Owns the rows ``TRACE POLICY CAPACITY``: blocks hit over blocks asked, the lab's replay with the server's own policies. LRU and
the offline optimum are peers of every row and played in the same call. Targets belong to the default policy: on the
conversation trace it must close ``CLOSED`` of the distance between LRU and the optimum at the capacities named here, and
nowhere may it be below LRU; a target is cut to four places. A replay is exact, so a row has one run and no spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .bench_report import BenchReport, BenchRow, Machine, Target, bench_row, versions
from .cli_output import Progress
from .errors import UsageError
from .lab_trace import OPTIMUM, OPTIMUM_LEAF_FIRST, Trace, policies_to_play, read_trace, replay

DEFAULT_TRACES = Path("../shared/data")
CAPACITIES = (1000, 5000, 20000)
CLOSED = 0.35
_CLOSED_ON: Mapping[str, tuple[int, ...]] = {"conversation_trace": (1000, 5000)}
_SUFFIXES = (".jsonl", ".csv")


def run_eviction_bench(
    folder: Path | None, capacities: Sequence[int], policy: str | None, say: Progress
) -> BenchReport:
    """Play every trace below ``folder``, by default those that lie beside the project, if they do.

    Raises: ``UsageError`` where a folder was named and holds no trace.
    """
    machine, notes, rows = Machine(), [], []
    place = DEFAULT_TRACES if folder is None else folder
    files = sorted(file for suffix in _SUFFIXES for file in place.rglob(f"*{suffix}"))
    if not files:
        missing = f"no trace (.jsonl or .csv) under {place}"
        if folder is not None:
            raise UsageError(missing)
        notes.append(f"{missing}: there are no rows; name a folder with --traces")
    for file in files:
        rows += _rows_of(file.stem, read_trace(file, 16), capacities, policy, say)
    settings = {"traces": str(place), "capacities": list(capacities), "policy": policy, "closed": CLOSED}
    return BenchReport("eviction", versions(), machine.facts(), settings, tuple(notes), tuple(rows))


def _rows_of(
    name: str, trace: Trace, capacities: Sequence[int], policy: str | None, say: Progress
) -> list[BenchRow]:
    rows: list[BenchRow] = []
    for capacity in capacities:
        say(name, f"{capacity} blocks")
        played = {one: replay(trace, one, capacity).hit_rate for one in policies_to_play(policy)}
        lru, optimum = played["lru"], played[OPTIMUM]
        peers = {"lru": [lru], "optimum": [optimum]}
        for one, rate in played.items():
            if one in (OPTIMUM, OPTIMUM_LEAF_FIRST):
                continue
            target = None
            if one == "default":
                closed = CLOSED if capacity in _CLOSED_ON.get(name, ()) else 0.0
                target = Target(int(1e4 * (lru + closed * (optimum - lru))) / 1e4)
            rows.append(bench_row(f"{name} {one} {capacity}", "hit rate", [rate], target, peers))
    return rows
