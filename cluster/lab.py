"""The cache lab: what ``copyhold lab`` plays and prints.

Owns the bounded-identity model (request k asks for identity k mod stride; the number of requests follows from the time; every
edit plays again from an empty cache) and the comparison of policies on a trace. It models a bounded pool of identities: no
token positions, block tables, addresses, pins or kernel events, and proves nothing about an allocator (K201).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from pathlib import Path
from typing import Any

import msgspec

from copyhold.actors.cache_settings import DEFAULT_POLICY, LAB_POLICIES

from .cli_output import table
from .errors import UsageError
from .lab_plot import svg_of_curves
from .lab_trace import (
    PrefixCache,
    Replay,
    Trace,
    capacities_of_plot,
    policies_to_play,
    rates_by_capacity,
    read_trace,
    replay,
)

MOST_REQUESTS = 4096
NOT_MODELLED = "token positions, block tables, addresses, pins and kernel events"


class Step(msgspec.Struct, frozen=True):
    """One request of the bounded-identity model and the identities cached after it."""

    request: int
    identity: int
    hit: bool
    cached: tuple[int, ...]


def requests_at(time_s: float) -> int:
    """Requests that have been made by a time: 16 at the start, two a second, at most 4096."""
    return min(MOST_REQUESTS, 16 + floor(2 * time_s))


def play_identities(capacity: int, stride: int, time_s: float, policy: str) -> tuple[Step, ...]:
    """Play the cyclic requests from an empty cache. Raises: ``UsageError`` for an unknown policy."""
    if policy not in LAB_POLICIES and policy != "default":
        raise UsageError(f"--policy {policy}: policies are {', '.join(sorted(LAB_POLICIES))}")
    cache = PrefixCache(DEFAULT_POLICY if policy == "default" else policy, stride, capacity)
    steps = []
    for request in range(requests_at(time_s)):
        identity = request % stride
        hit = bool(cache.ask((identity,)))
        steps.append(Step(request, identity, hit, tuple(cache.present())))
    return tuple(steps)


def identities_report(capacity: int, stride: int, time_s: float, policy: str) -> tuple[dict[str, Any], str]:
    """The JSON document and the text of one play."""
    steps = play_identities(capacity, stride, time_s, policy)
    hits = sum(step.hit for step in steps)
    document = {
        "ok": True,
        "policy": policy,
        "capacity": capacity,
        "stride": stride,
        "time_s": time_s,
        "requests": len(steps),
        "hits": hits,
        "misses": len(steps) - hits,
        "not_modelled": NOT_MODELLED,
        "steps": msgspec.to_builtins(steps),
    }
    rows = [
        (
            str(step.request),
            str(step.identity),
            "hit" if step.hit else "miss",
            " ".join(map(str, step.cached)),
        )
        for step in steps
    ]
    summary = (
        f"{policy}, capacity {capacity}, stride {stride}: {hits} hits and {len(steps) - hits} misses in "
        f"{len(steps)} requests\n(a bounded pool of identities; it models no {NOT_MODELLED})"
    )
    return document, table(rows, ("REQUEST", "IDENTITY", "RESULT", "CACHED")) + "\n" + summary


def trace_report(
    file: Path, capacity: int, policy: str | None, block_size: int, plot: Path | None
) -> tuple[dict[str, Any], str]:
    """Play a trace through the policies; writes the plot, if one is asked for. Raises: ``UsageError``."""
    names = policies_to_play(policy)
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError(f"--plot {plot}: the plot is written as .svg")
    trace = read_trace(file, block_size)
    rows = [replay(trace, name, capacity) for name in names]
    document: dict[str, Any] = {
        "ok": True,
        "trace": file.name,
        "requests": len(trace.paths),
        "asked_blocks": trace.asked_blocks,
        "distinct_blocks": trace.num_blocks,
        "default_policy": DEFAULT_POLICY,
        "rows": msgspec.to_builtins(rows),
    }
    text = _rows_text(rows)
    if plot is not None:
        curves = _curves(trace, names, capacity, rows)
        plot.write_text(svg_of_curves(curves, f"Prefix hit rate, {file.name}"), "utf-8")
        document["plot"] = str(plot)
        document["curves"] = {name: [list(point) for point in points] for name, points in curves.items()}
        text += f"\nwrote {plot}"
    return document, text


def _curves(
    trace: Trace, names: Sequence[str], capacity: int, rows: Sequence[Replay]
) -> Mapping[str, list[tuple[int, float]]]:
    played = list(rows)
    for other in capacities_of_plot(trace, capacity):
        if other != capacity:
            played += [replay(trace, name, other) for name in names]
    curves = rates_by_capacity(played)
    return {name: sorted(points) for name, points in curves.items()}


def _rows_text(rows: Sequence[Replay]) -> str:
    shown = [
        (
            row.policy,
            f"{row.hit_rate:.4f}",
            str(row.capacity),
            str(row.evictions),
            str(row.evicted_unused_blocks),
            f"{row.seconds:.2f}",
        )
        for row in sorted(rows, key=lambda row: -row.hit_rate)
    ]
    return table(shown, ("POLICY", "HIT_RATE", "CAPACITY", "EVICTIONS", "UNUSED", "SECONDS"))
