"""Figures of ``copyhold bench ledger``: commands from encoded bytes to receipts, through ``Ledger.apply``.

Owns the ledger that is measured: a pool more than 90 % full and fragmented, one thread. Invariant: every sample starts at
encoded bytes and ends with a receipt that holds both digests; a sample never includes the making of its command.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Admit,
    Command,
    Complete,
    Dispatch,
    Fork,
    Genesis,
    GroupSpec,
    Release,
    RequestHandle,
    RowSpan,
    Scope,
    decode_command,
    encode_command,
    pack,
)
from copyhold.kvcore.errors import LedgerRefusal
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.warm_up import warm_up

from .bench_report import BenchReport, BenchRow, Machine, Target, bench_row, versions

BLOCK = 16
LONG_TOKENS = 32768
_WORLD = b"w" * 32
_SCOPE = Scope("bench", 1, _WORLD)
DECODING, BIG_POOL = (1, 16, 256, 1024, 4096), (1 << 10, 1 << 15, 1 << 20)
Say = Callable[[str, str], None]


class Bench:
    """One ledger and ids that rise."""

    def __init__(self, blocks: int, slots: int, longest: int, seed: int = 1) -> None:
        self.ledger = Ledger()
        self.random = np.random.default_rng(seed)
        self.blocks, self.step, self.transaction = blocks, 0, 0
        group = GroupSpec("full", BLOCK, blocks)
        self.ledger.apply(Genesis(_WORLD, (group,), slots, longest, "bench"))

    def timed_us(self, command: Command) -> tuple[float, Any]:
        """Microseconds from encoded bytes to the receipt, and the receipt."""
        record = encode_command(pack(command))
        started = time.perf_counter_ns()
        receipt = self.ledger.apply(decode_command(record))
        return (time.perf_counter_ns() - started) / 1e3, receipt

    def admit(self, tokens: int) -> Admit:
        self.transaction += 1
        content = self.random.integers(0, 50_000, tokens).astype("<i4").tobytes()
        return Admit(self.transaction, _SCOPE, content, False)

    def compute(self, *handles: RequestHandle) -> None:
        """All known rows of some requests, each sampling a token."""
        self.step += 1
        views = [self.ledger.request(handle) for handle in handles]
        rows = tuple([RowSpan(v.handle, v.valid_rows, v.num_tokens - v.valid_rows) for v in views])
        self.ledger.apply(pack(Dispatch(self.step, rows)))
        self.ledger.apply(pack(Complete(self.step, tuple([(at, 7) for at in range(len(rows))]))))

    def fill(self, keep_free: int, size: int) -> list[RequestHandle]:
        """Requests of about `size` tokens until few blocks are free; every third is then released, the rest computed.

        What is released is taken again by requests of other sizes, so that free blocks lie scattered.
        """
        held: list[RequestHandle] = []
        while self.ledger.gauge().free > keep_free + size // BLOCK:
            held.append(self.ledger.apply(self.admit(size)).request)
        for handle in held[::3]:
            self.ledger.apply(Release(handle, "finish"))
        kept = [handle for at, handle in enumerate(held) if at % 3]
        while self.ledger.gauge().free > keep_free + size // BLOCK and self.slots_left():
            tokens = int(self.random.integers(size // 2, size))
            kept.append(self.ledger.apply(self.admit(tokens)).request)
        return kept

    def slots_left(self) -> int:
        return self.ledger.state.requests.free.count

    def decode_us(self, handles: Sequence[RequestHandle], runs: int) -> list[float]:
        """Dispatch and Complete of one token for each request."""
        samples = []
        for _ in range(runs):
            self.step += 1
            valid = self.ledger.valid_rows
            rows = tuple([RowSpan(handle, int(valid[handle.slot]), 1) for handle in handles])
            first, _ = self.timed_us(Dispatch(self.step, rows))
            sampled = tuple([(at, 7) for at in range(len(rows))])
            second, _ = self.timed_us(Complete(self.step, sampled))
            samples.append(first + second)
        return samples


def run_ledger_bench(runs: int, with_peers: bool, say: Say) -> BenchReport:
    """All rows, and the peer's in the same call."""
    machine = Machine()
    warm_up()
    say("ledger", "peers")
    peers, notes = measure_peer(min(runs, 50)) if with_peers else ({}, ())
    rows = [*_long_rows(runs, say), *_audit_rows(max(runs // 10, 3), say)]
    rows += _growth_rows(runs, say)
    told = [_with_peers(row, peers) for row in rows]
    settings = {"block_size": BLOCK, "runs": runs, "long_tokens": LONG_TOKENS}
    return BenchReport("ledger", versions(), machine.facts(), settings, notes, tuple(told))


def _with_peers(row: BenchRow, peers: dict[str, dict[str, float]]) -> BenchRow:
    found = {peer: figures[row.name] for peer, figures in peers.items() if row.name in figures}
    return msgspec.structs.replace(row, peers=found) if found else row


def _at_most(bound: float) -> Target:
    return Target(bound, at_least=False)


def _long_rows(runs: int, say: Say) -> list[BenchRow]:
    """Rows of the table: a pool of 131,072 blocks, more than 90 % used beside the requests measured."""
    say("ledger", "filling 131,072 blocks")
    bench = Bench(1 << 17, 1024, LONG_TOKENS + 2048)
    small = [bench.ledger.apply(bench.admit(200)).request for _ in range(256)]
    bench.compute(*small)
    bench.fill(3 * LONG_TOKENS // BLOCK, 8192)
    used = 1 - bench.ledger.gauge().free / bench.blocks
    assert used > 0.9, f"only {used:.3f} of the pool is used"
    say("ledger", "decode step, allocate, free, fork, reject")
    allocate, free, fork, reject = [], [], [], []
    for _ in range(runs):
        elapsed, receipt = bench.timed_us(bench.admit(LONG_TOKENS))
        allocate.append(elapsed)
        bench.compute(receipt.request)
        elapsed, forked = bench.timed_us(Fork(receipt.request, 1))
        fork.append(elapsed)
        bench.ledger.apply(Release(forked.children[0], "finish"))
        free.append(bench.timed_us(Release(receipt.request, "finish"))[0])
        reject.append(_refused_us(bench, receipt.request))
    return [
        bench_row("decode step 256", "us", bench.decode_us(small, runs), _at_most(40)),
        bench_row("allocate 32k", "us", allocate, _at_most(150)),
        bench_row("free 32k", "us", free, _at_most(40)),
        bench_row("fork 32k", "us", fork, _at_most(60)),
        bench_row("reject", "us", reject, _at_most(10)),
    ]


def _refused_us(bench: Bench, stale: RequestHandle) -> float:
    record = encode_command(pack(Dispatch(bench.step + 1, (RowSpan(stale, 0, 1),))))
    started = time.perf_counter_ns()
    try:
        bench.ledger.apply(decode_command(record))
    except LedgerRefusal:
        return (time.perf_counter_ns() - started) / 1e3
    raise AssertionError("a stale handle was accepted")


def _audit_rows(runs: int, say: Say) -> list[BenchRow]:
    say("ledger", "audit of 131,072 blocks")
    bench = Bench(1 << 17, 1024, 4096)
    bench.fill(2048, 2048)
    samples = []
    for _ in range(runs):
        started = time.perf_counter_ns()
        audit(bench.ledger)
        samples.append((time.perf_counter_ns() - started) / 1e6)
    return [bench_row("audit 131k", "ms", samples, _at_most(50))]


def _growth_rows(runs: int, say: Say) -> list[BenchRow]:
    """The same decode step with more requests, and with larger pools."""
    rows = []
    for count in DECODING:
        say("ledger", f"decode step of {count}")
        bench = Bench(1 << 15, count, 256)
        handles = [bench.ledger.apply(bench.admit(33)).request for _ in range(count)]
        bench.compute(*handles)
        rows.append(bench_row(f"decode step {count}", "us", bench.decode_us(handles, min(runs, 60))))
    for blocks in BIG_POOL:
        say("ledger", f"pool of {blocks} blocks")
        size = blocks * BLOCK // 40
        bench = Bench(blocks, 80, size + BLOCK)
        handles = [bench.ledger.apply(bench.admit(33)).request for _ in range(16)]
        bench.compute(*handles)
        bench.fill(blocks // 16, size)
        rows.append(bench_row(f"pool {blocks}", "us", bench.decode_us(handles, min(runs, 60))))
    return [row for row in rows if row.name != "decode step 256"]


def measure_peer(runs: int) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
    """Medians of vLLM's block manager by row name, and notes; no figures where its environment is missing."""
    root = Path(__file__).resolve().parents[1]
    python, script = root / ".venv-peers" / "bin" / "python", root / "benchmarks" / "vllm_ledger.py"
    if not python.exists() or not script.exists():
        return {}, ("vLLM was not measured: `make bench-peers` installs it in an environment of its own",)
    done = subprocess.run(
        [str(python), str(script), str(runs)], capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {}, (f"vLLM was not measured: {last[0]}",)
    return {"vllm": json.loads(done.stdout.strip().splitlines()[-1])}, ()
