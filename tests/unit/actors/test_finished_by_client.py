"""A client that has what it wanted ends its request well: blocks go, the prefix stays, the receipt says what was taken."""

from __future__ import annotations

import pytest
from local_replica import LocalReplica, Stream, run_of

from copyhold.actors.errors import InvalidRequest
from copyhold.kvcore.commands import Release

PROMPT = run_of(1, 70)


def finish(served: LocalReplica, stream: Stream, completion_tokens: int) -> None:
    assert stream.entry is not None
    served.scheduler.finish(stream.entry, completion_tokens)


def step_until_sent(served: LocalReplica, stream: Stream, tokens: int) -> None:
    while len(stream.tokens) < tokens:
        served.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_running_request_ends_as_stopped_with_the_next_plan(replica, cold, ranks):
    served: LocalReplica = replica(ranks)
    stream, other = served.submit(PROMPT, max_new=40), served.submit(run_of(300, 20), "b", max_new=30)
    step_until_sent(served, stream, 12)
    finish(served, stream, 10)
    finish(served, stream, 10)
    plan = served.plan()
    assert plan is not None
    assert [command.reason for command in plan.commands if isinstance(command, Release)] == ["finish"]
    served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
    assert stream.finished.reason == stream.finished.receipt.finish_reason == "stop"
    assert stream.finished.receipt.completion_tokens == 10
    assert stream.finished.receipt.time_to_first_token_ms > 0
    assert len(stream.tokens) == 12, "nothing is sent after it"
    served.run()
    assert other.tokens == cold(run_of(300, 20), 30)
    served.check_quiet()
    again = served.serve(PROMPT + stream.tokens[:10], max_new=4)
    assert again.admitted.cached_tokens == 64
    assert again.tokens == cold(PROMPT, 14)[10:]
    assert served.worst_audit() <= 1e-3


def test_a_step_in_flight_may_still_send_before_it_ends(replica):
    served: LocalReplica = replica()
    stream = served.submit(PROMPT, max_new=40)
    step_until_sent(served, stream, 5)
    plan = served.plan()
    assert plan is not None
    finish(served, stream, 5)
    served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
    served.run()
    assert len(stream.tokens) == 6 and stream.finished.receipt.completion_tokens == 5
    served.check_quiet()


def test_a_request_that_comes_to_its_own_end_first_keeps_it(replica):
    served: LocalReplica = replica()
    stream = served.submit(PROMPT, max_new=6)
    step_until_sent(served, stream, 5)
    plan = served.plan()
    assert plan is not None
    finish(served, stream, 4)
    served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
    finish(served, stream, 4)
    served.run()
    assert (stream.finished.reason, stream.finished.receipt.completion_tokens) == ("length", 6)
    served.check_quiet()


def test_a_preempted_request_ends_without_running_again(replica, cold):
    served: LocalReplica = replica(num_blocks=8)
    first, second = served.submit(run_of(1, 60), max_new=40), served.submit(run_of(300, 60), "b", max_new=40)
    while not served.scheduler.preemptions:
        served.step()
    assert second.entry is not None and second.entry.handle is None
    sent = list(second.tokens)
    finish(served, second, 3)
    served.step()
    assert served.scheduler.counts() == (1, 0)
    assert second.finished.receipt.completion_tokens == 3 and second.tokens == sent
    served.run()
    assert first.tokens == cold(run_of(1, 60), 40)
    served.check_quiet()


@pytest.mark.parametrize("count", [-1, 0, 6])
def test_a_count_that_was_not_sent_is_refused_and_changes_nothing(replica, cold, count):
    served: LocalReplica = replica()
    stream = served.submit(PROMPT, max_new=8)
    step_until_sent(served, stream, 5)
    with pytest.raises(InvalidRequest):
        finish(served, stream, count)
    served.run()
    assert stream.tokens == cold(PROMPT, 8) and stream.finished.reason == "length"
    served.check_quiet()
