"""Figures of ``copyhold bench prefix``: match, publish, evict and a churn of many tenants, beside vLLM and SGLang.

Owns the rows and their targets. Invariant: every sample goes through the ledger's public calls, with receipts and both digests;
prompts are token arrays when the clock starts, and peers get the same load in the same call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from copyhold.actors.cache_settings import DEFAULT_POLICY
from copyhold.actors.cost_policy import warm_up as warm_up_policy
from copyhold.actors.eviction import AHEAD
from copyhold.kvcore.commands import Evict, Publish, Release
from copyhold.kvcore.warm_up import warm_up

from .bench_churn import STEP_REQUESTS, Prefixes, play_churn
from .bench_prefix_load import (
    BLOCK,
    IN_FLIGHT,
    LONG_TOKENS,
    POOL_BLOCKS,
    TENANTS,
    make_churn,
    random_tokens,
    write_load,
)
from .bench_prefix_memory import bytes_per_block
from .bench_prefix_peers import measure_peers
from .bench_report import BenchReport, BenchRow, Machine, Samples, Target, bench_row, row_peers, versions
from .cli_output import Progress
from .svg_plot import Panel, svg_of_panels

MISS_TOKENS = 1024
PATH_NODES, LEAVES, LEAF_BLOCKS, EVICTED = 64, 5_000, 4, 1_000
DEPTHS, FAN_OUTS, TENANT_COUNTS = (1, 4, 16, 64, 256, 1024), (1, 16, 256, 4096, 16384), (1, 10, 50, 200, 800)
_TARGETS: Mapping[str, tuple[str, Target | None]] = {
    "match 32k": ("us", Target(40, at_least=False)),
    "match path 64": ("us", Target(80, at_least=False)),
    "miss": ("us", Target(5, at_least=False)),
    "publish 32k": ("us", Target(250, at_least=False)),
    "evict 1000": ("us", Target(2000, at_least=False)),
    "churn": ("req/s", Target(15_000)),
    "churn with digests": ("req/s", Target(13_000)),
    "churn hit rate": ("share", None),
    "churn, one request a step": ("req/s", None),
    "churn, default policy": ("req/s", None),
    "bytes per block": ("bytes", Target(200, at_least=False)),
}
PEER_POLICY = "lru"
"""What both peers evict by, so that hit rates are equal."""


def run_prefix_bench(runs: int, plays: int, requests: int, with_peers: bool, say: Progress) -> BenchReport:
    """All rows, the peers' in the same call."""
    machine = Machine()
    warm_up()
    warm_up_policy()
    peers: Mapping[str, Samples] = {}
    notes: tuple[str, ...] = ()
    churn, long_prompt = make_churn(requests), random_tokens(LONG_TOKENS, 7)
    if with_peers:
        say("prefix", "peers")
        with TemporaryDirectory() as folder:
            load = write_load(Path(folder), churn, long_prompt)
            peers, notes = measure_peers(load, min(runs, 50), min(plays, 3))
    say("prefix", "match, publish, evict")
    measured = {
        **_match_samples(long_prompt, runs),
        "publish 32k": _publish_samples(runs),
        "evict 1000": _evict_samples(max(3, runs // 20)),
    }
    kinds: Mapping[str, tuple[str, bool, int]] = {
        "churn": (PEER_POLICY, False, STEP_REQUESTS),
        "churn with digests": (PEER_POLICY, True, STEP_REQUESTS),
        "churn, one request a step": (PEER_POLICY, False, 1),
        "churn, default policy": (DEFAULT_POLICY, False, STEP_REQUESTS),
    }
    for name, (policy, digests, step) in kinds.items():
        say("prefix", name)
        played = [play_churn(churn, policy, digests=digests, step_requests=step) for _ in range(plays)]
        measured[name] = [one.requests_per_s for one in played]
        measured.setdefault("churn hit rate", [one.hit_rate for one in played])
    say("prefix", "memory")
    measured["bytes per block"] = [bytes_per_block()]
    rows = [_row(name, measured[name], peers) for name in _TARGETS]
    rows += _growth_rows(runs, say)
    settings = {
        "block_size": BLOCK,
        "runs": runs,
        "plays": plays,
        "requests": requests,
        "tenants": TENANTS,
        "pool_blocks": POOL_BLOCKS,
        "in_flight": IN_FLIGHT,
        "step_requests": STEP_REQUESTS,
        "policy": PEER_POLICY,
        "default_policy": DEFAULT_POLICY,
    }
    return BenchReport("prefix", versions(), machine.facts(), settings, notes, tuple(rows))


def growth_plot(report: BenchReport) -> str:
    """Match against depth and fan-out, and the churn against tenants, as one SVG text."""
    rows = {row.name: row.value for row in report.rows}

    def curve(name: str, places: tuple[int, ...]) -> dict[str, list[tuple[int, float]]]:
        return {"copyhold": [(place, rows[f"{name} {place}"]) for place in places]}

    return svg_of_panels(
        [
            Panel("Match of 16,384 tokens, microseconds", "edges on its path", curve("depth", DEPTHS)),
            Panel("Match of 64 tokens, microseconds", "siblings of its edge", curve("fan-out", FAN_OUTS)),
            Panel("Churn, microseconds a request", "tenants", curve("tenants", TENANT_COUNTS)),
        ]
    )


def _row(name: str, samples: list[float], peers: Mapping[str, Samples]) -> BenchRow:
    unit, target = _TARGETS[name]
    return bench_row(name, unit, samples, target, row_peers(name, peers))


def _probes(prefixes: Prefixes, prompt: np.ndarray, runs: int, hit: int) -> list[float]:
    """Microseconds from a token array to the probe of what an Admit would share."""
    samples = []
    ledger, scope = prefixes.ledger, prefixes.scopes[0]
    for _ in range(runs):
        prefixes.stir()
        started = time.perf_counter_ns()
        found = ledger.probe(scope, prompt.tobytes())
        samples.append((time.perf_counter_ns() - started) / 1e3)
        assert found.match.runtime == hit, found.match
    return samples


def _match_samples(prompt: np.ndarray, runs: int) -> dict[str, list[float]]:
    """A cached prompt of one edge and of 64, each one token longer than what is cached, and a shorter one that misses."""
    tokens = len(prompt)
    longer = np.concatenate([prompt, np.array([5], dtype=np.int32)])
    flat, deep = Prefixes(8192, tokens + BLOCK), Prefixes(8192, tokens + BLOCK)
    flat.cache(prompt)
    for node in range(1, PATH_NODES + 1):
        deep.cache(prompt[: tokens * node // PATH_NODES])
    missing = prompt[:MISS_TOKENS].copy()
    missing[0] = 31_999 - missing[0]
    return {
        "match 32k": _probes(flat, longer, runs, tokens),
        "match path 64": _probes(deep, longer, runs, tokens),
        "miss": _probes(flat, missing, runs, 0),
    }


def _publish_samples(runs: int) -> list[float]:
    """Publish of a prompt of 32k tokens that nobody has published, computed already."""
    samples = []
    prefixes = Prefixes(3 * LONG_TOKENS // BLOCK, LONG_TOKENS + BLOCK)
    for run in range(runs):
        command = Publish((prefixes.compute(random_tokens(LONG_TOKENS, 100 + run)),))
        started = time.perf_counter_ns()
        receipt = prefixes.ledger.apply(command)
        samples.append((time.perf_counter_ns() - started) / 1e3)
        assert receipt.entries[0].tokens_after == LONG_TOKENS
        prefixes.ledger.apply(Release(command.requests[0], "finish"))
        prefixes.ledger.apply(Evict(tuple([leaf.handle for leaf in prefixes.ledger.evictable_leaves()])))
    return samples


def _evict_samples(runs: int) -> list[float]:
    """Choice of the victims and their Evict, 1,000 blocks of 20,000 cached in leaves of four."""
    samples = []
    prefixes = Prefixes(LEAVES * LEAF_BLOCKS, LEAF_BLOCKS * BLOCK + BLOCK, DEFAULT_POLICY)
    for leaf in range(LEAVES):
        prefixes.cache(random_tokens(LEAF_BLOCKS * BLOCK, leaf))
    fresh = LEAVES
    for _ in range(runs):
        evictor, namespace = prefixes.evictor, prefixes.scopes[0].namespace
        assert prefixes.ledger.gauge().free == 0
        started = time.perf_counter_ns()
        victims = evictor.choose({namespace: EVICTED - LEAVES * LEAF_BLOCKS // AHEAD})
        receipt = prefixes.ledger.apply(Evict(victims.nodes))
        evictor.evicted(victims)
        samples.append((time.perf_counter_ns() - started) / 1e3)
        assert receipt.freed_blocks == EVICTED
        for _ in range(EVICTED // LEAF_BLOCKS):
            prefixes.cache(random_tokens(LEAF_BLOCKS * BLOCK, fresh))
            fresh += 1
    return samples


def _growth_rows(runs: int, say: Progress) -> Iterator[BenchRow]:
    """The same match with more edges on its path and with more siblings; the same churn with more tenants."""
    few, tokens = min(runs, 60), 16_384
    prompt = random_tokens(tokens + 1, 8)
    for depth in DEPTHS:
        say("prefix", f"depth {depth}")
        prefixes = Prefixes(4096, tokens + BLOCK)
        for node in range(1, depth + 1):
            prefixes.cache(prompt[: tokens * node // depth])
        yield bench_row(f"depth {depth}", "us", _probes(prefixes, prompt, few, tokens))
    for siblings in FAN_OUTS:
        say("prefix", f"fan-out {siblings}")
        prefixes, length = Prefixes(2 * siblings + 16, 128), 2 * BLOCK
        for leaf in range(siblings):
            prefixes.cache(random_tokens(length, leaf))
        asked = np.concatenate([random_tokens(length, siblings // 2), prompt[:32]])
        yield bench_row(f"fan-out {siblings}", "us", _probes(prefixes, asked, few, length))
    for tenants in TENANT_COUNTS:
        say("prefix", f"tenants {tenants}")
        churn = make_churn(2_000, tenants)
        played = [play_churn(churn, PEER_POLICY, digests=False) for _ in range(3)]
        yield bench_row(f"tenants {tenants}", "us", [1e6 / one.requests_per_s for one in played])
