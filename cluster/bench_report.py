"""What a benchmark reports: rows of measured figures, the machine they were measured on, and one JSON document.

Owns the row format (docs/benchmarks.md). A row's value is the median of its runs; ``meets`` compares it with the target and
is null where there is none; ``peers`` holds only what ran in the same call. The machine's load is noted before and after,
because a figure from a busy machine is one.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from copyhold import __version__

from .cli_output import table

Samples = Mapping[str, Sequence[float]]
"""Of one subject, by the names of rows."""

_PACKAGES = ("torch", "numpy", "numba", "ray", "transformers")


class Target(msgspec.Struct, frozen=True):
    """What a median must reach: at least ``bound``, or at most."""

    bound: float
    at_least: bool = True

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


class BenchRow(msgspec.Struct, frozen=True):
    """One measured figure; ``min`` and ``max`` over ``runs``."""

    name: str
    value: float
    unit: str
    min: float
    max: float
    runs: int
    target: float | None
    meets: bool | None
    peers: Mapping[str, float]


def bench_row(
    name: str,
    unit: str,
    samples: Sequence[float],
    target: Target | None = None,
    peers: Mapping[str, Sequence[float]] | None = None,
) -> BenchRow:
    """A row from the samples of its runs, at least one; a peer's samples become their median."""
    value = statistics.median(samples)
    return BenchRow(
        name=name,
        value=_rounded(value),
        unit=unit,
        min=_rounded(min(samples)),
        max=_rounded(max(samples)),
        runs=len(samples),
        target=None if target is None else target.bound,
        meets=None if target is None else target.met_by(value),
        peers={peer: _rounded(statistics.median(those)) for peer, those in (peers or {}).items() if those},
    )


def row_peers(name: str, peers: Mapping[str, Samples]) -> dict[str, Sequence[float]]:
    """Samples of one row, of the peers that have it."""
    return {peer: figures[name] for peer, figures in peers.items() if name in figures}


class BenchReport(msgspec.Struct, frozen=True):
    """The document of one benchmark; ``ok`` says whether every row with a target meets it."""

    bench: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: tuple[str, ...]
    rows: tuple[BenchRow, ...]

    @property
    def ok(self) -> bool:
        return all(row.meets is not False for row in self.rows)

    def document(self) -> dict[str, Any]:
        """Plain values, as ``--json`` prints them."""
        return {"ok": self.ok, **msgspec.to_builtins(self)}

    def text(self) -> str:
        """The rows as aligned columns, the notes below."""
        cells = [
            (
                row.name,
                f"{row.value:g} {row.unit}",
                f"{row.min:g} to {row.max:g}",
                "" if row.target is None else f"{row.target:g}",
                {None: "", True: "meets", False: "misses"}[row.meets],
                ", ".join(f"{peer} {value:g}" for peer, value in row.peers.items()),
            )
            for row in self.rows
        ]
        lines = table(cells, ("ROW", "MEDIAN", "RANGE", "TARGET", "", "PEERS"))
        return "\n".join([lines, *(f"note: {note}" for note in self.notes)])


class Machine:
    """Where a benchmark runs; made before the first run, read after the last."""

    def __init__(self) -> None:
        self._load_before = os.getloadavg()

    def facts(self) -> dict[str, Any]:
        """Processor, memory and load; loads are the averages of the last 1, 5 and 15 minutes."""
        return {
            "system": platform.platform(),
            "processor": _processor(),
            "usable_cores": len(os.sched_getaffinity(0)),
            "memory_mib": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
            "load_before": [round(load, 2) for load in self._load_before],
            "load_after": [round(load, 2) for load in os.getloadavg()],
        }


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, as far as it is installed."""
    found = {"copyhold": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _rounded(value: float) -> float:
    """Four significant digits: no figure here is known better."""
    return float(f"{value:.4g}")
