"""Faults planted in one rank: each is reported by the check that should see it, and no token of that step leaves."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from local_replica import LocalReplica, Stream, run_of

from copyhold.actors.errors import RanksDiffer, ReplicaStopped
from copyhold.actors.executor import RankLike
from copyhold.actors.in_process import INCARNATION
from copyhold.actors.messages import Failed
from copyhold.actors.plan import KVAuditOrder, PurgeOrder, StepEvidence, StepPlan
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.commands import Command, Complete, Publish
from copyhold.namespace.certificate import EvidenceQuestion, member_faults
from copyhold.namespace.records import RankEvidence

PROMPT, NEW = run_of(1, 70), 12
FAULT_AT = 5
"""The step that is tampered with: the prompt's is 0, so five tokens have left by then."""


class Tampered:
    """A rank between two hands: one changes what it is told, the other what it says."""

    def __init__(
        self,
        rank: RankLike,
        told: Callable[[StepPlan], StepPlan] = lambda plan: plan,
        says: Callable[[StepEvidence], StepEvidence] = lambda evidence: evidence,
    ) -> None:
        self._rank, self._told, self._says = rank, told, says

    def execute(self, plan: StepPlan) -> StepEvidence:
        evidence = self._rank.execute(self._told(plan))
        return self._says(evidence) if plan.step == FAULT_AT else evidence


def on_rank(number: int, **hands) -> Callable[[int, RankLike], RankLike]:
    return lambda rank, inner: Tampered(inner, **hands) if rank == number else inner


def run_into_fault(served: LocalReplica) -> tuple[list[Stream], Exception]:
    """Two streams through an engine until it stops by itself."""
    engine = served.engine()
    streams = [Stream(), Stream()]
    calls = [
        engine.submit(served.submission(PROMPT, "ab"[n], max_new=NEW), stream.put)
        for n, stream in enumerate(streams)
    ]
    engine.start()
    for call, stream in zip(calls, streams, strict=True):
        call.result(10.0)
        assert stream.ended.wait(10.0)
    engine.stop(10.0)
    assert engine.failure is not None
    return streams, engine.failure


def check_withheld(streams: list[Stream], expected: list[int], kind: str, sent: int) -> None:
    for stream in streams:
        assert stream.tokens == expected[:sent]
        assert stream.failed.kind == kind
        assert sum(isinstance(item, Failed) for item in stream.items) == 1


SAYS: dict[str, Callable[[StepEvidence], StepEvidence]] = {
    "a corrupted digest": lambda said: msgspec.structs.replace(
        said, machine_digest=bytes([said.machine_digest[0] ^ 1]) + said.machine_digest[1:]
    ),
    "another log index": lambda said: msgspec.structs.replace(said, log_index=said.log_index + 1),
    "another token": lambda said: msgspec.structs.replace(
        said, tokens=(said.tokens[0] + 1, *said.tokens[1:])
    ),
    "swapped tokens": lambda said: msgspec.structs.replace(
        said, tokens=(*said.tokens[1:], said.tokens[0] + 1)
    ),
    "no token": lambda said: msgspec.structs.replace(said, tokens=()),
    "one token too many": lambda said: msgspec.structs.replace(said, tokens=(*said.tokens, 7)),
    "an older step": lambda said: msgspec.structs.replace(said, step=said.step - 1),
    "another incarnation": lambda said: msgspec.structs.replace(said, incarnation="replica-0.0"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", SAYS)
def test_a_rank_that_says_something_else_stops_the_replica(replica, cold, fault: str, rank: int):
    served: LocalReplica = replica(2, wrap=on_rank(rank, says=SAYS[fault]))
    streams, failure = run_into_fault(served)
    assert isinstance(failure, RanksDiffer)
    check_withheld(streams, cold(PROMPT, NEW), "ranks_differ", FAULT_AT)


@pytest.mark.parametrize("fault", ["no token", "one token too many"])
def test_a_single_rank_with_the_wrong_number_of_tokens_is_found_too(replica, cold, fault: str):
    served: LocalReplica = replica(1, wrap=on_rank(0, says=SAYS[fault]))
    streams, failure = run_into_fault(served)
    assert isinstance(failure, RanksDiffer)
    check_withheld(streams, cold(PROMPT, NEW), "ranks_differ", FAULT_AT)


def skipped(kind: type) -> Callable[[StepPlan], StepPlan]:
    def told(plan: StepPlan) -> StepPlan:
        kept = tuple(command for command in plan.commands if not isinstance(command, kind))
        return msgspec.structs.replace(plan, commands=kept)

    return told


def twice(kind: type) -> Callable[[StepPlan], StepPlan]:
    def told(plan: StepPlan) -> StepPlan:
        commands: list[Command] = []
        for command in plan.commands:
            commands += [command, command] if isinstance(command, kind) else [command]
        return msgspec.structs.replace(plan, commands=tuple(commands))

    return told


def other_sample(plan: StepPlan) -> StepPlan:
    """The rank is told that the last step sampled something else: its ledger differs in tokens only."""
    commands = tuple(
        Complete(command.step, tuple((row, token ^ 1) for row, token in command.sampled))
        if isinstance(command, Complete)
        else command
        for command in plan.commands
    )
    return msgspec.structs.replace(plan, commands=commands)


@pytest.mark.parametrize(
    "told", [skipped(Publish), twice(Publish), other_sample], ids=["skip", "twice", "other"]
)
def test_a_rank_that_applies_something_else_is_found_at_that_step(replica, cold, told):
    """The first Publish and the first Complete travel with the second step: one token has left."""
    served: LocalReplica = replica(2, wrap=on_rank(1, told=told))
    streams, failure = run_into_fault(served)
    assert isinstance(failure, RanksDiffer)
    assert failure.rank == 1
    check_withheld(streams, cold(PROMPT, NEW), "ranks_differ", 1)
    assert served.scheduler.agreement.report().differing == 1


def test_a_command_that_a_rank_s_ledger_refuses_stops_the_replica_with_the_refusal(replica, cold):
    served: LocalReplica = replica(1, wrap=on_rank(0, told=twice(Complete)))
    streams, failure = run_into_fault(served)
    assert isinstance(failure, ReplicaStopped)
    assert "step_out_of_order" in str(failure)
    check_withheld(streams, cold(PROMPT, NEW), "replica_stopped", 1)


def test_a_rank_refuses_a_plan_of_another_incarnation_or_position_and_applies_nothing(replica):
    served: LocalReplica = replica(1)
    served.submit(PROMPT)
    plan = served.plan()
    assert plan is not None
    rank = served.ranks[0]
    for wrong in ({"incarnation": "replica-0.0"}, {"first_log_index": 1}):
        with pytest.raises(RanksDiffer):
            rank.execute(msgspec.structs.replace(plan, **wrong))
        assert rank.ledger.log_index == 0
    served.scheduler.complete(plan, [rank.execute(plan)], 0.0)
    with pytest.raises(RanksDiffer):
        rank.execute(plan)
    assert rank.ledger.log_index == served.ledger.log_index - 2, "only Complete and Publish are not sent yet"


def test_a_rank_that_raises_ends_every_stream_with_its_reason(replica, cold):
    def says(_: StepEvidence) -> StepEvidence:
        raise ValueError("the card fell off the bus")

    streams, failure = run_into_fault(replica(2, wrap=on_rank(1, says=says)))
    assert isinstance(failure, ReplicaStopped)
    assert "the card fell off the bus" in str(failure)
    check_withheld(streams, cold(PROMPT, NEW), "replica_stopped", FAULT_AT)


def test_a_rank_that_reports_its_failure_ends_every_stream_with_it(replica, cold):
    def says(said: StepEvidence) -> StepEvidence:
        return msgspec.structs.replace(said, failure="NonFiniteLogits: row 0")

    streams, failure = run_into_fault(replica(2, wrap=on_rank(1, says=says)))
    assert "rank 1 failed: NonFiniteLogits" in str(failure)
    check_withheld(streams, cold(PROMPT, NEW), "replica_stopped", FAULT_AT)


class Forgetful(KVPool):
    """Zeroes nothing and says nothing; what it counts is still its own memory."""

    def zero_blocks(self, block_ids) -> None:
        """The planted fault."""


def evidence_of(served: LocalReplica, namespace: str) -> list[RankEvidence]:
    served.scheduler.advance_floor(namespace, 2)
    served.scheduler.end_below_floor()
    reports = served.step(PurgeOrder(namespace, 2, "n1")) or []
    return [report.purge for report in reports if report.purge is not None]


@pytest.mark.parametrize("end", ["cached", "running", "finished below the floor"])
def test_a_rank_that_skips_zeroing_is_named_by_its_own_evidence(replica, end: str):
    served: LocalReplica = replica(2, pools=lambda rank: Forgetful if rank == 1 else KVPool)
    served.submit(PROMPT, max_new=1 if end == "cached" else 4)
    served.step()
    if end == "finished below the floor":
        served.scheduler.advance_floor("a", 2)
        served.run()
    evidence = evidence_of(served, "a")
    assert evidence[0].nonzero_bytes == 0
    assert evidence[1].nonzero_bytes > 0
    faults = member_faults(evidence, served.member, EvidenceQuestion("n1", "a", 2))
    assert faults == [f"{INCARNATION} rank 1 found {evidence[1].nonzero_bytes} nonzero bytes"]


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_changed_row_in_one_rank_s_memory_is_found_by_that_rank_s_audit(replica, side: str):
    served: LocalReplica = replica(2)
    served.serve(PROMPT, max_new=2)
    ((_, tokens, blocks),) = served.ledger.paths("a")

    def differences() -> list[float]:
        ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        order = KVAuditOrder(ids, tuple(blocks.tolist()), tuple(range(len(tokens))))
        reports = [report.audit for report in served.step(order=order) or []]
        assert all(report is not None for report in reports)
        return [report.max_abs_difference for report in reports if report is not None]

    assert max(differences()) <= 1e-3
    getattr(served.pools[1], side)[1, blocks[2], 0, 5, 3] += 0.01
    sound, corrupt = differences()
    assert sound <= 1e-3 < corrupt
    getattr(served.pools[1], side)[1, blocks[2], 0, 5, 3] = np.nan
    assert differences()[1] == np.inf
