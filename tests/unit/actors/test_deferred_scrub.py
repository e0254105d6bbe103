"""What waited for its step is zeroed and tallied when the step completes; copied rows reach the branch."""

from __future__ import annotations

import numpy as np

from copyhold.actors.plan import PurgeOrder
from copyhold.actors.scrubbing import Scrubber
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.commands import (
    Admit,
    AdvanceGeneration,
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
    Truncate,
)
from copyhold.kvcore.ledger import Ledger
from copyhold.namespace.records import RankEvidence

BLOCK = 16


class RankMemory:
    """A ledger and a pool behind a scrubber; every row written is full of its block's number + 1."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.pool = KVPool(1, 8, 1, 16, BLOCK)
        self.scrubber = Scrubber(self.ledger, self.pool)
        self.apply(Genesis(b"w", (GroupSpec("full", BLOCK, 8),), 4, 128, "pool"))

    def apply(self, *commands: Command) -> None:
        for command in commands:
            self.scrubber.apply(self.ledger.log_index, command)

    def admit(self, tokens: int, generation: int = 1) -> RequestHandle:
        content = np.arange(tokens, dtype="<i4").tobytes()
        transaction = self.ledger.log_index
        self.apply(Admit(transaction, Scope("a", generation, b"w"), content))
        return self.ledger.running()[-1]

    def write(self, handle: RequestHandle, value: float) -> None:
        blocks = self.ledger.table(handle)
        self.pool.k[:, blocks] = value
        self.pool.v[:, blocks] = value

    def evidence(self) -> RankEvidence:
        return self.scrubber.evidence(PurgeOrder("a", 2, "nonce"), "pool", 0, b"")


def test_a_release_that_waits_for_its_step_is_tallied_when_it_takes_effect() -> None:
    memory = RankMemory()
    request = memory.admit(40)
    memory.apply(Dispatch(1, (RowSpan(request, 0, 40),)))
    memory.write(request, 7.0)
    memory.apply(AdvanceGeneration("a", 2), Release(request, "revoke"))
    before = memory.evidence()
    assert (before.blocks_zeroed, before.inventory_after_blocks) == (0, 3)
    memory.apply(Complete(1))
    after = memory.evidence()
    assert (after.blocks_released, after.blocks_zeroed, after.nonzero_bytes) == (3, 3, 0)
    assert (after.inventory_before_blocks, after.inventory_after_blocks) == (3, 0)
    assert after.bytes_zeroed == 3 * memory.pool.block_bytes
    assert not memory.pool.k.any() and not memory.pool.v.any()


def test_a_finish_below_the_floor_is_tallied_too_and_one_above_it_is_not() -> None:
    memory = RankMemory()
    old = memory.admit(20)
    memory.apply(Dispatch(1, (RowSpan(old, 0, 20),)), AdvanceGeneration("a", 2))
    new = memory.admit(20, generation=2)
    memory.apply(Dispatch(2, (RowSpan(new, 0, 20),)))
    memory.apply(Release(old, "finish"), Release(new, "finish"), Complete(2), Complete(1))
    assert memory.evidence().blocks_zeroed == 2


def test_a_truncation_below_the_floor_that_waits_for_its_step_is_tallied() -> None:
    memory = RankMemory()
    request = memory.admit(40)
    memory.apply(Dispatch(1, (RowSpan(request, 0, 40),)), AdvanceGeneration("a", 2))
    memory.write(request, 3.0)
    memory.apply(Truncate(request, 10), Complete(1))
    assert memory.evidence().blocks_zeroed == 2
    assert memory.pool.k[:, memory.ledger.table(request)].all()


def test_the_rows_of_a_shared_tail_are_copied_before_a_branch_writes() -> None:
    memory = RankMemory()
    parent = memory.admit(20)
    memory.apply(Dispatch(1, (RowSpan(parent, 0, 20),)))
    memory.write(parent, 5.0)
    memory.apply(Complete(1, ((0, 9),)), Fork(parent, 1))
    (child,) = [handle for handle in memory.ledger.running() if handle != parent]
    memory.apply(Dispatch(2, (RowSpan(child, 20, 1),)))
    source, target = int(memory.ledger.table(parent)[1]), int(memory.ledger.table(child)[1])
    assert source != target
    k, v = memory.pool.read_rows(0, np.full(4, target), np.arange(4))
    assert (k == 5.0).all() and (v == 5.0).all()
    k, v = memory.pool.read_rows(0, np.full(12, target), np.arange(4, 16))
    assert not k.any() and not v.any()
