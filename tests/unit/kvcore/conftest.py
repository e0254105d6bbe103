"""A driver for ledger tests: commands with fresh ids, an oracle K/V beside the ledger, an audit after each command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Command,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    GroupSpec,
    NodeHandle,
    Publish,
    Release,
    RequestHandle,
    RowSpan,
    Scope,
)
from copyhold.kvcore.errors import LedgerRefusal
from copyhold.kvcore.ledger import Ledger

WORLD = b"w" * 32
STALE = ("stale",)
ZERO = ("zero",)


class Driver:
    """Drives one ledger. `rows[block][offset]` is what a toy device holds: the identity of the row written there."""

    def __init__(
        self,
        block_size: int = 4,
        num_blocks: int = 16,
        max_requests: int = 8,
        max_model_len: int = 128,
        turns: Any = None,
    ) -> None:
        self.ledger = Ledger(turns)
        self.block_size = block_size
        self.rows: list[list[tuple[object, ...]]] = [[STALE] * block_size for _ in range(num_blocks)]
        self.step = 0
        self.transaction = 0
        group = GroupSpec("full", block_size, num_blocks)
        self.ledger.apply(Genesis(WORLD, (group,), max_requests, max_model_len, "pool-1"))

    def tokens(self, first: int, count: int) -> list[int]:
        return list(range(first, first + count))

    def scope(self, namespace: str = "a", generation: int = 1) -> Scope:
        return Scope(namespace, generation, WORLD)

    def apply(self, command: Command) -> Any:
        receipt = self.ledger.apply(command)
        for block in getattr(receipt, "scrub", ()):
            self.rows[block] = [ZERO] * self.block_size
        audit(self.ledger)
        return receipt

    def refused(self, command: Command, refusal: type[LedgerRefusal], **fields: object) -> LedgerRefusal:
        """Applies a command that must be refused and must leave no trace."""
        before = self.trace()
        with pytest.raises(refusal) as caught:
            self.ledger.apply(command)
        assert self.trace() == before
        audit(self.ledger)
        assert {name: getattr(caught.value, name) for name in fields} == fields
        return caught.value

    def trace(self) -> tuple[bytes, bytes, int]:
        return self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index

    def admit_command(self, tokens: list[int], namespace: str = "a", **changes: Any) -> Admit:
        self.transaction += 1
        content = np.array(tokens, dtype="<i4").tobytes()
        scope = self.scope(namespace, changes.pop("generation", 1))
        return Admit(self.transaction, scope, content, changes.pop("lookup", True), **changes)

    def admit(self, tokens: list[int], namespace: str = "a", **changes: Any) -> Any:
        return self.apply(self.admit_command(tokens, namespace, **changes))

    def dispatch(self, *spans: tuple[RequestHandle, int], evict: tuple[NodeHandle, ...] = ()) -> int:
        """Dispatches `count` rows of each request; the step."""
        self.step += 1
        rows = tuple(RowSpan(handle, self.ledger.request(handle).valid_rows, n) for handle, n in spans)
        self.apply(Dispatch(self.step, rows, evict))
        self._spans = {**getattr(self, "_spans", {}), self.step: rows}
        return self.step

    def complete(
        self,
        step: int | None = None,
        sampled: tuple[tuple[int, int], ...] = (),
        discarded: tuple[int, ...] = (),
    ) -> Any:
        """The toy device writes the step's rows, discarded ones too, then the step completes."""
        step = self.step if step is None else step
        for row in self._spans[step]:
            self.write(row)
        return self.apply(Complete(step, sampled, discarded))

    def write(self, row: RowSpan) -> None:
        slot = row.request.slot
        for position in range(row.start, row.start + row.count):
            block = int(self.ledger.tables[slot, position // self.block_size])
            self.rows[block][position % self.block_size] = self.identity(row.request, position)

    def identity(self, handle: RequestHandle, position: int) -> tuple[object, ...]:
        known = self.ledger.request_tokens(handle)[: position + 1]
        return (self.ledger.request(handle).scope, tuple(known.tolist()))

    def check_reads(self, handle: RequestHandle) -> None:
        """Every row the request may read holds what the request itself would have written."""
        table = self.ledger.tables[handle.slot]
        for position in range(self.ledger.request(handle).valid_rows):
            held = self.rows[int(table[position // self.block_size])][position % self.block_size]
            assert held == self.identity(handle, position), (handle, position, held)

    def prefill(self, handle: RequestHandle, chunk: int = 10_000, sample: int | None = None) -> None:
        """Computes every known token in chunks; the last chunk may sample."""
        while True:
            view = self.ledger.request(handle)
            left = view.num_tokens - view.valid_rows
            if not left:
                return
            count = min(left, chunk)
            self.dispatch((handle, count))
            self.complete(sampled=((0, sample),) if sample is not None and count == left else ())
            if sample is not None and count == left:
                return

    def decode(self, handle: RequestHandle, token: int) -> None:
        """Computes the last known token and samples the next."""
        self.dispatch((handle, 1))
        self.complete(sampled=((0, token),))

    def publish(self, *handles: RequestHandle) -> Any:
        return self.apply(Publish(handles))

    def release(self, handle: RequestHandle, reason: str = "finish") -> Any:
        return self.apply(Release(handle, reason))

    def abort(self) -> Any:
        return self.apply(Abort(self.transaction))

    def advance(self, namespace: str, generation: int) -> Any:
        return self.apply(AdvanceGeneration(namespace, generation))

    def serve(self, tokens: list[int], namespace: str = "a", **changes: Any) -> Any:
        """Admit, prefill, publish, release; the admission's receipt."""
        receipt = self.admit(tokens, namespace, **changes)
        self.prefill(receipt.request)
        self.check_reads(receipt.request)
        self.publish(receipt.request)
        self.release(receipt.request)
        return receipt

    def evict_up_to(self, blocks: int) -> int:
        """Evicts unlocked leaves, one by one, until `blocks` are freed or none is left; blocks freed."""
        freed = 0
        while freed < blocks:
            leaves = self.ledger.evictable_leaves()
            if not leaves:
                break
            freed += self.apply(Evict((leaves[0].handle,))).freed_blocks
        return freed

    def check_quiet(self) -> None:
        """Nobody runs: everything is free or evictable, and the index holds exactly the evictable blocks."""
        gauge = self.ledger.gauge()
        assert gauge.live == gauge.reserved == 0 and gauge.free + gauge.evictable == gauge.total
        assert not self.ledger.running()


@pytest.fixture
def make_driver() -> Iterator[Callable[..., Driver]]:
    yield Driver


@pytest.fixture
def driver() -> Driver:
    return Driver()
