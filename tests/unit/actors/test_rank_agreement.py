"""Agreement: what differs, and in which rank, decides the typed error; only full agreement is counted."""

from __future__ import annotations

import msgspec
import pytest

from copyhold.actors.agreement import Agreement
from copyhold.actors.errors import RanksDiffer, ReplicaStopped
from copyhold.actors.plan import StepEvidence, StepPlan

DIGEST, INDEX = bytes(range(16)), 12
PLAN = StepPlan("replica-0.1", 3, 10, ())


def report(number: int, **changes) -> StepEvidence:
    agreeing = StepEvidence("replica-0.1", 3, number, INDEX, DIGEST)
    return msgspec.structs.replace(agreeing, **changes)


def expecting() -> Agreement:
    agreement = Agreement()
    agreement.expect(INDEX, DIGEST)
    return agreement


def test_equal_ledgers_are_counted_with_the_scheduler_s_own():
    agreement = expecting()
    agreement.check(PLAN, [report(0), report(1)])
    agreement.check(PLAN, [report(0), report(1)])
    found = agreement.report()
    assert (found.ledgers, found.compared_steps, found.differing) == (3, 2, 0)
    assert found.compared_log_indices == 1, "the same position twice is one log index"
    assert (found.last_log_index, found.last_machine_digest) == (INDEX, DIGEST.hex())


@pytest.mark.parametrize(
    "changes",
    [
        {"log_index": INDEX - 1},
        {"log_index": INDEX + 1},
        {"machine_digest": DIGEST[::-1]},
        {"machine_digest": b""},
        {"incarnation": "replica-0.2"},
        {"step": 2},
        {"rank": 0},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_difference_names_the_rank_and_is_counted(changes: dict, rank: int):
    if changes == {"rank": rank}:
        changes = {"rank": 1 - rank}
    agreement = expecting()
    reports = [report(0), report(1)]
    reports[rank] = report(rank, **changes)
    with pytest.raises(RanksDiffer) as caught:
        agreement.check(PLAN, reports)
    assert caught.value.rank == rank
    assert caught.value.kind == "ranks_differ"
    found = agreement.report()
    assert (found.differing, found.compared_steps, found.compared_log_indices) == (1, 0, 0)


def test_a_rank_s_own_failure_is_passed_on_with_its_words():
    agreement = expecting()
    with pytest.raises(ReplicaStopped, match=r"rank 1 failed: OutOfMemory: 3 blocks") as caught:
        agreement.check(PLAN, [report(0), report(1, failure="OutOfMemory: 3 blocks")])
    assert not isinstance(caught.value, RanksDiffer)
    assert caught.value.kind == "replica_stopped"
    assert agreement.report().differing == 1
