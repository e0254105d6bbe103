"""The ledger that ``copyhold bench ledger`` measures, and the loads it is put under.

Owns the clock: every sample starts at encoded bytes and ends with a receipt that holds both digests; a sample never includes
the making of its command. One thread, ids that rise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

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

BLOCK = 16
LONG_TOKENS = 32768
SHORT_TOKENS, GROWTH_TOKENS = 200, 33
"""Of a request that decodes: in the step of 256, and in steps and pools that grow."""

_WORLD = b"w" * 32
_SCOPE = Scope("bench", 1, _WORLD)


class Bench:
    """One ledger of one cache group."""

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

    def refused_us(self, command: Command) -> float:
        """Microseconds from encoded bytes to the refusal."""
        record = encode_command(pack(command))
        started = time.perf_counter_ns()
        try:
            self.ledger.apply(decode_command(record))
        except LedgerRefusal:
            return (time.perf_counter_ns() - started) / 1e3
        raise AssertionError(f"accepted: {type(command).__name__}")

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
        """Requests of about `size` tokens until few blocks are free; every third is then released, the rest stay.

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

    def used(self) -> float:
        """Share of the pool that is not free."""
        return 1 - self.ledger.gauge().free / self.blocks

    def running(self, count: int, tokens: int) -> list[RequestHandle]:
        """Requests that decode: all their tokens but the last are computed."""
        handles = [self.ledger.apply(self.admit(tokens)).request for _ in range(count)]
        self.compute(*handles)
        return handles

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

    def long_life_us(self) -> dict[str, float]:
        """One long request: its admission, fork, release and a command for it that comes too late."""
        allocated, receipt = self.timed_us(self.admit(LONG_TOKENS))
        self.compute(receipt.request)
        forked, branches = self.timed_us(Fork(receipt.request, 1))
        self.ledger.apply(Release(branches.children[0], "finish"))
        freed, _ = self.timed_us(Release(receipt.request, "finish"))
        late = self.refused_us(Dispatch(self.step + 1, (RowSpan(receipt.request, 0, 1),)))
        return {"allocate 32k": allocated, "fork 32k": forked, "free 32k": freed, "reject": late}
