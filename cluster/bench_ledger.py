"""Figures of ``copyhold bench ledger``: commands from encoded bytes to receipts, through ``Ledger.apply``.

Owns the rows and their targets. Invariant: the table's rows are measured on a pool that is more than 90 % used and
fragmented; the peer runs in the same call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from copyhold.kvcore.audit import audit
from copyhold.kvcore.warm_up import warm_up

from .bench_controls import price_rows
from .bench_load import BLOCK, GROWTH_TOKENS, LONG_TOKENS, SHORT_TOKENS, Bench
from .bench_report import BenchReport, BenchRow, Machine, Samples, Target, bench_row, row_peers, versions
from .bench_vllm import measure_vllm
from .cli_output import Progress
from .svg_plot import Panel, svg_of_panels

DECODING, BIG_POOLS = (1, 16, 256, 1024, 4096), (1 << 10, 1 << 15, 1 << 20)
_TARGETS_US = {
    "decode step 256": 40,
    "allocate 32k": 150,
    "free 32k": 40,
    "fork 32k": 60,
    "reject": 10,
}
_PEER_RUNS, _GROWTH_RUNS = 50, 60
_POOL_BLOCKS, _REQUESTS = 1 << 17, 1024


def run_ledger_bench(runs: int, with_peers: bool, with_controls: bool, say: Progress) -> BenchReport:
    """All rows, the peer's in the same call, and what each control costs."""
    machine = Machine()
    warm_up()
    peers: dict[str, Samples] = {}
    notes: tuple[str, ...] = ()
    if with_peers:
        say("ledger", "peers")
        peers, notes = measure_vllm(min(runs, _PEER_RUNS), DECODING, BIG_POOLS)
    measured = {**_long_samples(runs, say), **_growth_samples(min(runs, _GROWTH_RUNS), say)}
    rows = [_row(name, samples, peers) for name, samples in measured.items()]
    rows.insert(len(_TARGETS_US), _audit_row(max(runs // 10, 3), say))
    if with_controls:
        rows += price_rows(runs, say)
    settings = {"block_size": BLOCK, "runs": runs, "long_tokens": LONG_TOKENS, "blocks": _POOL_BLOCKS}
    return BenchReport("ledger", versions(), machine.facts(), settings, notes, tuple(rows))


def growth_plot(report: BenchReport) -> str:
    """Both growth tables of a report as one SVG text."""
    rows = {row.name: row for row in report.rows}
    decoding = _curves(rows, "decode step", DECODING)
    pools = _curves(rows, "pool", BIG_POOLS)
    return svg_of_panels(
        [
            Panel("Decode step, microseconds", "running requests, one token each", decoding),
            Panel("Decode step of 16 requests, microseconds", "blocks of the pool", pools),
        ]
    )


def _curves(
    rows: Mapping[str, BenchRow], name: str, places: tuple[int, ...]
) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for place in places:
        row = rows[f"{name} {place}"]
        for curve, value in {"copyhold": row.value, **row.peers}.items():
            curves.setdefault(curve, []).append((place, value))
    return curves


def _row(name: str, samples: list[float], peers: Mapping[str, Samples]) -> BenchRow:
    bound = _TARGETS_US.get(name)
    target = None if bound is None else Target(bound, at_least=False)
    return bench_row(name, "us", samples, target, row_peers(name, peers))


def _long_samples(runs: int, say: Progress) -> dict[str, list[float]]:
    """A pool of 131,072 blocks, more than 90 % used beside the requests measured."""
    say("ledger", f"filling {_POOL_BLOCKS} blocks")
    bench = Bench(_POOL_BLOCKS, _REQUESTS, LONG_TOKENS + 2048)
    small = bench.running(256, SHORT_TOKENS)
    bench.fill(3 * LONG_TOKENS // BLOCK, 8192)
    assert bench.used() > 0.9, f"only {bench.used():.3f} of the pool is used"
    say("ledger", "decode step, allocate, free, fork, reject")
    lives = [bench.long_life_us() for _ in range(runs)]
    found: dict[str, list[float]] = {"decode step 256": []}
    found |= {name: [life[name] for life in lives] for name in _TARGETS_US if name in lives[0]}
    found["decode step 256"] = bench.decode_us(small, runs)
    bench.fill(LONG_TOKENS // BLOCK // 2, 1024)
    found["refuse 32k"] = [bench.refused_us(bench.admit(LONG_TOKENS)) for _ in range(runs)]
    return found


def _audit_row(runs: int, say: Progress) -> BenchRow:
    say("ledger", f"audit of {_POOL_BLOCKS} blocks")
    bench = Bench(_POOL_BLOCKS, _REQUESTS, 4096)
    bench.fill(2048, 2048)
    samples = []
    for _ in range(runs):
        started = time.perf_counter_ns()
        audit(bench.ledger)
        samples.append((time.perf_counter_ns() - started) / 1e6)
    return bench_row("audit 131k", "ms", samples, Target(50, at_least=False))


def _growth_samples(runs: int, say: Progress) -> dict[str, list[float]]:
    """The same decode step with more requests, and with larger pools."""
    found: dict[str, list[float]] = {}
    for count in DECODING:
        if f"decode step {count}" in _TARGETS_US:
            continue
        say("ledger", f"decode step of {count}")
        bench = Bench(1 << 15, count, 256)
        found[f"decode step {count}"] = bench.decode_us(bench.running(count, GROWTH_TOKENS), runs)
    for blocks in BIG_POOLS:
        say("ledger", f"pool of {blocks} blocks")
        size = blocks * BLOCK // 40
        bench = Bench(blocks, 80, size + BLOCK)
        handles = bench.running(16, GROWTH_TOKENS)
        bench.fill(blocks // 16, size)
        found[f"pool {blocks}"] = bench.decode_us(handles, runs)
    return found
