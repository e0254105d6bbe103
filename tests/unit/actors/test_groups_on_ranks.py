"""Two cache groups on ranks: the same tokens, copies and zeroing in both memories, evidence and audits over both."""

from __future__ import annotations

import numpy as np
import pytest
from local_replica import LocalReplica, Stream, run_of

from copyhold.actors.errors import CacheGroupsUnfit
from copyhold.actors.plan import PurgeOrder
from copyhold.actors.scrubbing import Scrubber
from copyhold.kernels.cache_pools import CachePools
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
from copyhold.namespace.certificate import EvidenceQuestion, member_faults
from copyhold.namespace.records import RankEvidence

PROMPT = run_of(1, 70)
TWO = {"other_block_sizes": (32,)}


class RankMemory:
    """A ledger and two pools behind a scrubber: blocks of 16 in the first, of 32 in the second."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.pools = CachePools((KVPool(1, 8, 1, 16), KVPool(1, 8, 1, 16, 32)), [(0,), (1,)])
        self.scrubber = Scrubber(self.ledger, self.pools)
        groups = (GroupSpec("full", 16, 8), GroupSpec("coarse", 32, 8))
        self.apply(Genesis(b"w", groups, 4, 128, "pool"))

    def apply(self, *commands: Command) -> None:
        for command in commands:
            self.scrubber.apply(self.ledger.log_index, command)

    def admit(self, tokens: int) -> RequestHandle:
        content = np.arange(tokens, dtype="<i4").tobytes()
        self.apply(Admit(self.ledger.log_index, Scope("a", 1, b"w"), content))
        return self.ledger.running()[-1]

    def write(self, handle: RequestHandle, value: float) -> None:
        for group, pool in enumerate(self.pools.pools):
            tiles = self.ledger.table(handle, group)[:, None] * pool.tiles_per_block
            for part in (pool.k, pool.v):
                part[:, (tiles + np.arange(pool.tiles_per_block)).reshape(-1)] = value

    def evidence(self) -> RankEvidence:
        return self.scrubber.evidence(PurgeOrder("a", 2, "nonce"), "pool", 0, b"")

    def bytes_left(self) -> list[int]:
        return [pool.count_nonzero_bytes(range(pool.num_blocks)) for pool in self.pools.pools]


def test_a_revocation_zeroes_and_counts_both_groups() -> None:
    memory = RankMemory()
    request = memory.admit(40)
    memory.apply(Dispatch(1, (RowSpan(request, 0, 40),)))
    memory.write(request, 7.0)
    memory.apply(AdvanceGeneration("a", 2))
    assert memory.evidence().inventory_before_blocks == 3 + 2
    memory.apply(Release(request, "revoke"), Complete(1))
    found = memory.evidence()
    assert (found.blocks_released, found.blocks_zeroed, found.inventory_after_blocks) == (5, 5, 0)
    assert found.bytes_zeroed == sum(
        count * pool.block_bytes for count, pool in zip((3, 2), memory.pools.pools, strict=True)
    )
    assert found.nonzero_bytes == 0 and memory.bytes_left() == [0, 0]


def test_bytes_that_stay_in_the_second_group_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RankMemory()
    request = memory.admit(40)
    memory.apply(Dispatch(1, (RowSpan(request, 0, 40),)), Complete(1))
    memory.write(request, 7.0)
    honest = KVPool.zero_blocks

    def forgets(pool: KVPool, block_ids) -> None:
        if pool.block_size == 16:
            honest(pool, block_ids)

    monkeypatch.setattr(KVPool, "zero_blocks", forgets)
    memory.apply(AdvanceGeneration("a", 2), Release(request, "revoke"))
    assert memory.evidence().nonzero_bytes > 0 and memory.bytes_left()[0] == 0


def test_a_truncation_below_the_floor_that_waits_for_its_step_is_tallied_in_both_groups() -> None:
    memory = RankMemory()
    request = memory.admit(70)
    memory.apply(Dispatch(1, (RowSpan(request, 0, 70),)), AdvanceGeneration("a", 2))
    memory.write(request, 3.0)
    memory.apply(Truncate(request, 20), Complete(1))
    assert memory.evidence().blocks_zeroed == 3 + 2
    memory.apply(Release(request, "revoke"))
    assert memory.evidence().blocks_zeroed == 5 + 3 and memory.bytes_left() == [0, 0]


def test_shared_tails_are_copied_in_each_group_s_own_rows() -> None:
    memory = RankMemory()
    parent = memory.admit(36)
    memory.apply(Dispatch(1, (RowSpan(parent, 0, 36),)))
    memory.write(parent, 5.0)
    memory.apply(Complete(1, ((0, 9),)), Fork(parent, 1))
    (child,) = [handle for handle in memory.ledger.running() if handle != parent]
    memory.apply(Dispatch(2, (RowSpan(child, 36, 1),)))
    for group, (last, pool) in enumerate(zip((2, 1), memory.pools.pools, strict=True)):
        source, target = (
            int(memory.ledger.table(parent, group)[last]),
            int(memory.ledger.table(child, group)[last]),
        )
        assert source != target
        k, v = pool.read_rows(0, np.full(4, target), np.arange(4))
        assert (k == 5.0).all() and (v == 5.0).all()
        left = np.arange(4, pool.block_size)
        k, v = pool.read_rows(0, np.full(len(left), target), left)
        assert not k.any() and not v.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_groups_give_the_tokens_of_one_and_stored_rows_equal_a_cold_run(
    replica, cold, ranks: int
) -> None:
    served: LocalReplica = replica(ranks, num_blocks=24, chunk_tokens=21, **TWO)
    prompts = [PROMPT, PROMPT[:50] + run_of(200, 30), run_of(400, 60), PROMPT]
    streams = [served.serve(prompt, max_new=6) for prompt in prompts]
    together = [served.submit(prompt, max_new=6) for prompt in prompts]
    served.run()
    for stream, prompt in zip((*streams, *together), (*prompts, *prompts), strict=True):
        assert stream.tokens == cold(prompt, 6)
    assert streams[3].admitted.cached_tokens == 64
    assert served.worst_audit() < 1e-5
    served.check_quiet()


def test_an_audit_sees_one_wrong_value_in_the_second_group(replica) -> None:
    served: LocalReplica = replica(1, **TWO)
    served.serve(PROMPT)
    ((_, _, blocks),) = served.ledger.paths("a", 1)
    second = served.rank_set.group_pools[0].pools[1]
    second.v[0, 2 * int(blocks[1]) + 1, 0, 5, 3] += 0.5
    assert served.worst_audit() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", ["hydragen", "chunk"])
def test_each_group_reads_its_own_shared_prefix(replica, cold, mode) -> None:
    served: LocalReplica = replica(1, shared_prefix=mode, **TWO)
    served.serve(PROMPT)
    streams = [served.submit(PROMPT, max_new=4) for _ in range(3)]
    served.run()
    assert all(stream.tokens == cold(PROMPT, 4) for stream in streams)
    first, second = (reads.report() for reads in served.ranks[0].group_reads)
    assert first.steps == second.steps and first.steps[mode] > 0
    assert first.physical_rows < first.logical_rows and second.samples > 0
    assert second.max_abs_difference < 1e-5


def start_and_revoke(served: LocalReplica) -> tuple[Stream, list[RankEvidence]]:
    """A stream of tenant a that decodes when its floor rises; every rank's evidence after that."""
    served.serve(PROMPT, "b")
    stream = served.submit(PROMPT, "a", max_new=60)
    while len(stream.tokens) < 4:
        served.step()
    served.scheduler.advance_floor("a", 2)
    served.scheduler.end_below_floor()
    reports = served.step(PurgeOrder("a", 2, "n1"))
    assert reports is not None
    return stream, [report.purge for report in reports if report.purge is not None]


@pytest.mark.parametrize("ranks", [1, 2])
def test_evidence_of_a_revocation_is_about_both_groups(replica, ranks: int) -> None:
    served: LocalReplica = replica(ranks, **TWO)
    stream, evidence = start_and_revoke(served)
    assert stream.failed.kind == "namespace_revoked"
    assert member_faults(evidence, served.member, EvidenceQuestion("n1", "a", 2)) == []
    for entry, pools in zip(evidence, served.rank_set.group_pools, strict=True):
        assert entry.blocks_zeroed == 5 + 3, "74 rows: blocks of 16, and of 32"
        assert entry.bytes_zeroed == 5 * pools.pools[0].block_bytes + 3 * pools.pools[1].block_bytes
    assert served.worst_audit("b") < 1e-5


def test_a_rank_with_other_pools_takes_nothing_from_the_log(replica) -> None:
    served: LocalReplica = replica(1, **TWO)
    other: LocalReplica = replica(1)
    plan = served.plan()
    assert plan is not None
    with pytest.raises(CacheGroupsUnfit):
        other.ranks[0].execute(plan)
    assert other.ranks[0].ledger.log_index == 0
