"""A floor rises: streams below it end once, their bytes are gone from every rank's memory, others are untouched."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from local_replica import LocalReplica, Stream, run_of

from copyhold.actors.errors import NamespaceRevoked
from copyhold.actors.plan import PurgeOrder
from copyhold.actors.request_book import REVOKED
from copyhold.kvcore.commands import Publish
from copyhold.namespace.certificate import EvidenceQuestion, member_faults
from copyhold.namespace.records import RankEvidence

PROMPT = run_of(1, 70)
OTHER = run_of(300, 50)


def purge(
    served: LocalReplica, namespace: str = "a", generation: int = 2, nonce: str = "n1"
) -> list[RankEvidence]:
    """Every rank's signed evidence."""
    reports = served.step(PurgeOrder(namespace, generation, nonce))
    assert reports is not None
    found = [report.purge for report in reports if report.purge is not None]
    assert len(found) == len(served.ranks)
    return found


def faults(
    served: LocalReplica, evidence: Sequence[RankEvidence], namespace: str = "a", generation: int = 2
) -> list[str]:
    return member_faults(evidence, served.member, EvidenceQuestion("n1", namespace, generation))


def bytes_of(served: LocalReplica, blocks: Sequence[int]) -> list[bytes]:
    return [served.block_bytes(rank, blocks) for rank in range(len(served.ranks))]


def cached_blocks(served: LocalReplica, namespace: str) -> list[int]:
    return sorted(set(served.index(namespace).values()))


def start_two_tenants(served: LocalReplica) -> Stream:
    """Tenant a has a cached prompt and a stream that decodes; tenant b has a cached prompt."""
    served.serve(OTHER, "b", max_new=4)
    served.serve(PROMPT, "a", max_new=4)
    stream = served.submit(PROMPT + run_of(600, 30), "a", max_new=60)
    while len(stream.tokens) < 8:
        served.step()
    return stream


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_revocation_ends_its_streams_zeroes_its_blocks_and_leaves_the_other_tenant_alone(
    replica, cold, ranks
):
    served: LocalReplica = replica(ranks, num_blocks=48)
    stream = start_two_tenants(served)
    entry = stream.entry
    assert entry is not None and entry.handle is not None
    mine = sorted(
        {*cached_blocks(served, "a"), *(h.block for h in served.ledger.block_handles(entry.handle))}
    )
    theirs = cached_blocks(served, "b")
    their_bytes = bytes_of(served, theirs)
    assert all(any(block) for block in bytes_of(served, mine))

    assert served.scheduler.advance_floor("a", 2) == 1
    assert served.index("a") == {}
    assert served.scheduler.end_below_floor() == 1
    assert stream.failed.kind == "namespace_revoked"
    sent = list(stream.items)
    evidence = purge(served)
    served.run()
    assert stream.items == sent, "nothing after the stream's end"

    assert faults(served, evidence) == []
    for rank, report in enumerate(evidence):
        assert report.rank == rank
        assert (report.nonzero_bytes, report.inventory_after_blocks) == (0, 0)
        assert report.inventory_before_blocks == len(mine)
        assert report.blocks_released == len(mine)
        assert report.blocks_zeroed == len(mine)
        assert report.bytes_zeroed == len(mine) * served.pools[rank].block_bytes
        assert report.machine_digest == served.ledger.machine_digest.hex()
    if ranks == 2:
        assert evidence[0].bytes_zeroed == 2 * evidence[1].bytes_zeroed, "two KV heads and one"
    for zeroed in bytes_of(served, mine):
        assert not any(zeroed)
    assert bytes_of(served, theirs) == their_bytes
    facts = served.scheduler.floor_facts()["a"]
    assert (
        facts.free_blocks_after - facts.free_blocks_before == evidence[0].blocks_released - facts.grown_blocks
    )
    served.check_quiet()

    again = served.serve(PROMPT, "a", generation=2, max_new=4)
    assert again.admitted.cached_tokens == 0
    assert again.tokens == cold(PROMPT, 4)
    hit = served.serve(OTHER, "b", max_new=4)
    assert hit.admitted.cached_tokens == 48
    assert hit.tokens == cold(OTHER, 4)


def test_evidence_that_was_edited_or_answers_another_question_is_found(replica):
    served: LocalReplica = replica(2)
    served.serve(PROMPT, "a", max_new=4)
    served.scheduler.advance_floor("a", 2)
    evidence = purge(served)
    assert faults(served, evidence) == []
    assert any(
        "1 nonzero" in fault
        for fault in faults(served, [msgspec.structs.replace(evidence[0], nonzero_bytes=1)])
    )
    edited = [evidence[0], msgspec.structs.replace(evidence[1], blocks_zeroed=evidence[1].blocks_zeroed + 1)]
    assert any("signature does not verify" in fault for fault in faults(served, edited))
    assert any("another nonce" in fault for fault in faults(served, purge(served, nonce="n2")))
    assert any("ranks [0]" in fault for fault in faults(served, evidence[:1]))
    swapped = [msgspec.structs.replace(report, rank=1 - report.rank) for report in evidence]
    assert len([fault for fault in faults(served, swapped) if "another key" in fault]) == 2


def test_requests_below_the_floor_go_on_until_they_are_ended_but_publish_nothing(replica, cold):
    served: LocalReplica = replica(2, num_blocks=48)
    stream = start_two_tenants(served)
    published = len(served.published)
    assert served.scheduler.advance_floor("a", 2) == 1
    sent = len(stream.tokens)
    for _ in range(30):
        plan = served.plan()
        assert plan is not None
        assert not any(isinstance(command, Publish) for command in plan.commands)
        served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
        assert served.index("a") == {}
    assert len(stream.tokens) == sent + 30
    assert stream.tokens == cold(PROMPT + run_of(600, 30), 60)[: sent + 30]
    assert len(served.published) == published
    assert served.scheduler.end_below_floor() == 1
    evidence = purge(served)
    facts = served.scheduler.floor_facts()["a"]
    assert facts.grown_blocks >= 1
    assert (
        facts.free_blocks_after - facts.free_blocks_before == evidence[0].blocks_released - facts.grown_blocks
    )
    assert faults(served, evidence) == []
    served.check_quiet()


@pytest.mark.parametrize("how", ["finishes", "is cancelled"])
def test_a_request_that_leaves_by_itself_below_the_floor_is_measured_too(replica, how):
    """Its blocks are zeroed with its release; the evidence counts them like those of requests that were ended."""
    served: LocalReplica = replica(2, num_blocks=48)
    stream = served.submit(PROMPT, "a", max_new=12)
    served.step()
    assert stream.entry is not None and stream.entry.handle is not None
    mine = [handle.block for handle in served.ledger.block_handles(stream.entry.handle)]
    assert served.scheduler.advance_floor("a", 2) == 1
    if how == "is cancelled":
        served.cancel(stream)
    served.run()
    assert served.scheduler.advance_floor("a", 2) == 0
    assert served.scheduler.end_below_floor() == 0
    evidence = purge(served)
    assert faults(served, evidence) == []
    for report in evidence:
        assert report.inventory_before_blocks == len(mine)
        assert report.blocks_released == report.blocks_zeroed >= len(mine)
    for zeroed in bytes_of(served, mine):
        assert not any(zeroed)
    facts = served.scheduler.floor_facts()["a"]
    assert (
        facts.free_blocks_after - facts.free_blocks_before == evidence[0].blocks_released - facts.grown_blocks
    )
    served.check_quiet()


def test_a_waiting_request_below_the_floor_ends_at_once_and_a_later_one_is_refused(replica):
    served: LocalReplica = replica(max_requests=1)
    served.submit(OTHER, "b", max_new=20)
    served.step()
    waiting, current = served.submit(PROMPT, "a"), served.submit(PROMPT, "a", generation=2, max_new=2)
    assert served.scheduler.advance_floor("a", 2) == 0
    assert waiting.failed.kind == "namespace_revoked"
    assert waiting.items == [waiting.failed]
    with pytest.raises(NamespaceRevoked):
        served.submit(PROMPT, "a")
    served.run()
    assert waiting.items == [waiting.failed]
    assert len(current.tokens) == 2
    served.check_quiet()


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_request_below_the_floor_that_is_preempted_ends_and_the_others_go_on(replica, cold, victim):
    """It cannot be admitted again under its own generation, so it ends as revoked; the replica serves on."""
    served: LocalReplica = replica(num_blocks=8)
    order = ["b", "a"] if victim == "a" else ["a", "b"]
    streams = {ns: served.submit(run_of(1 if ns == "a" else 300, 60), ns, max_new=40) for ns in order}
    served.step()
    assert served.scheduler.advance_floor(victim, 2) == 1
    served.run()
    assert streams[victim].failed.kind == "namespace_revoked"
    other = "b" if victim == "a" else "a"
    assert streams[other].tokens == cold(run_of(1 if other == "a" else 300, 60), 40)
    served.check_quiet()


def test_raising_the_same_or_a_lower_floor_again_changes_nothing(replica):
    served: LocalReplica = replica()
    served.serve(PROMPT, "a", max_new=1)
    served.scheduler.advance_floor("a", 3)
    served.step()
    index = served.ledger.log_index
    assert served.scheduler.advance_floor("a", 3) == 0
    assert served.scheduler.advance_floor("a", 2) == 0
    assert served.ledger.log_index == index
    assert served.plan() is None


def test_a_second_revocation_measures_the_second_generation(replica):
    served: LocalReplica = replica(2)
    for generation in (1, 2):
        served.serve(PROMPT, "a", generation=generation, max_new=1)
        held = len(cached_blocks(served, "a"))
        served.scheduler.advance_floor("a", generation + 1)
        evidence = purge(served, generation=generation + 1)
        assert faults(served, evidence, generation=generation + 1) == []
        assert {report.blocks_zeroed for report in evidence} == {5}
        assert held == 4
    served.check_quiet()


def test_free_blocks_that_still_held_the_namespace_s_bytes_are_zeroed_and_counted(replica):
    """Unpublished blocks are free at once and keep their bytes until then: that residue belongs to the evidence."""
    served: LocalReplica = replica(2)
    served.serve(PROMPT, "a", max_new=1, publish=False)
    assert served.ledger.gauge().free == 32
    residue = served.ledger.residue("a", 2)
    assert len(residue) == 5
    assert all(any(block) for block in bytes_of(served, residue))
    served.scheduler.advance_floor("a", 2)
    evidence = purge(served)
    assert {
        (report.inventory_before_blocks, report.blocks_released, report.blocks_zeroed) for report in evidence
    } == {(5, 0, 5)}
    assert faults(served, evidence) == []
    for zeroed in bytes_of(served, residue):
        assert not any(zeroed)


@pytest.mark.parametrize("ended", ["both running", "one finished"])
def test_twins_that_computed_the_same_blocks_twice_are_counted_once_each(replica, ended):
    """Both compute the prompt, one is indexed, the other leases that path besides its own blocks."""
    served: LocalReplica = replica(2, num_blocks=48)
    twins = [served.submit(PROMPT, "a", max_new=2 if ended == "one finished" and n else 60) for n in range(2)]
    for _ in range(20):
        served.step()
    held = served.ledger.residue("a", 2)
    assert len(held) >= 10
    running = served.scheduler.counts()[0]
    assert served.scheduler.advance_floor("a", 2) == running
    assert served.scheduler.end_below_floor() == running
    evidence = purge(served)
    assert faults(served, evidence) == []
    for report in evidence:
        assert (report.inventory_before_blocks, report.blocks_zeroed) == (len(held), len(held))
    for zeroed in bytes_of(served, held):
        assert not any(zeroed)
    facts = served.scheduler.floor_facts()["a"]
    assert (
        facts.free_blocks_after - facts.free_blocks_before == evidence[0].blocks_released - facts.grown_blocks
    )
    assert sum(stream.items[-1] == REVOKED for stream in twins) == running
    served.check_quiet()
