"""The engine's thread: what is handed over is answered, and every stream ends exactly once, however the engine ends."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from local_replica import LocalReplica, Stream, run_of

from copyhold.actors.engine import Engine
from copyhold.actors.errors import InvalidRequest, ReplicaStopped, TransportClosed
from copyhold.actors.executor import ChannelExecutor, RankLike
from copyhold.actors.messages import Failed, StreamItem
from copyhold.actors.plan import (
    KVAuditOrder,
    PurgeOrder,
    StepEvidence,
    StepPlan,
    decode_plan,
    encode_evidence,
)
from copyhold.actors.transport import StepListener, connect, receive_message, send_message
from copyhold.models.errors import CollectiveError
from copyhold.namespace.certificate import EvidenceQuestion, member_faults

PROMPT, WAIT_S = run_of(1, 70), 10.0


class Gate(Stream):
    """A stream that holds the engine's thread at its n-th item until it is opened: no race decides these tests."""

    def __init__(self, at_item: int) -> None:
        super().__init__()
        self._at_item = at_item
        self.reached, self.open = threading.Event(), threading.Event()

    def put(self, item: StreamItem) -> None:
        super().put(item)
        if len(self.items) == self._at_item:
            self.reached.set()
            assert self.open.wait(WAIT_S)


def ended_once(stream: Stream, kind: str) -> None:
    assert stream.failed.kind == kind
    assert sum(isinstance(item, Failed) for item in stream.items) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_streams_through_the_engine_equal_the_cold_run(replica, cold, ranks):
    served: LocalReplica = replica(ranks)
    engine = served.engine()
    engine.start()
    streams = []
    for n in range(6):
        streams.append(Stream())
        engine.submit(
            served.submission(PROMPT[: 30 + 8 * n], "ab"[n % 2], max_new=6), streams[-1].put
        ).result(WAIT_S)
    for n, stream in enumerate(streams):
        assert stream.ended.wait(WAIT_S)
        assert stream.tokens == cold(PROMPT[: 30 + 8 * n], 6)
    assert engine.failure is None
    times = engine.times()
    assert times.steps >= 6
    assert 0.0 < times.execution_s <= times.step_s
    engine.stop(WAIT_S)
    assert served.scheduler.agreement.report().ledgers == ranks + 1


def test_stopping_ends_running_and_waiting_streams_once_and_refuses_later_calls(replica):
    served: LocalReplica = replica(max_requests=1)
    engine = served.engine()
    running, waiting = Gate(4), Stream()
    engine.start()
    engine.submit(served.submission(PROMPT, max_new=200), running.put).result(WAIT_S)
    engine.submit(served.submission(PROMPT, max_new=200), waiting.put)
    assert running.reached.wait(WAIT_S)
    stopper = threading.Thread(target=engine.stop, args=(WAIT_S,))
    stopper.start()
    running.open.set()
    stopper.join(WAIT_S)
    for stream in (running, waiting):
        assert stream.ended.wait(WAIT_S)
        ended_once(stream, "replica_stopped")
    assert waiting.items == [waiting.failed]
    assert engine.failure is None, "it was asked to stop"
    for late in (engine.call(lambda: 1), engine.submit(served.submission(PROMPT), Stream().put)):
        with pytest.raises(ReplicaStopped):
            late.result(WAIT_S)
    engine.stop(WAIT_S)
    ended_once(running, "replica_stopped")


def test_a_lost_lease_ends_every_stream_before_the_next_step(replica, cold):
    served: LocalReplica = replica()
    holds = threading.Event()
    holds.set()
    engine = served.engine(holds.is_set)
    stream = Gate(6)
    engine.start()
    engine.submit(served.submission(PROMPT, max_new=200), stream.put).result(WAIT_S)
    assert stream.reached.wait(WAIT_S)
    holds.clear()
    stream.open.set()
    assert stream.ended.wait(WAIT_S)
    ended_once(stream, "replica_stopped")
    assert "lease" in stream.failed.message
    assert stream.tokens == cold(PROMPT, 5)
    assert isinstance(engine.failure, ReplicaStopped)
    with pytest.raises(ReplicaStopped, match="lease"):
        engine.submit(served.submission(PROMPT), Stream().put).result(WAIT_S)
    engine.stop(WAIT_S)


def test_a_lease_that_was_never_held_admits_nothing(replica):
    served: LocalReplica = replica()
    engine = served.engine(lambda: False)
    stream = Stream()
    call = engine.submit(served.submission(PROMPT), stream.put)
    engine.start()
    engine.stop(WAIT_S)
    assert call.done()
    assert not stream.tokens
    assert served.ledger.log_index == 1


def test_a_refused_submission_goes_to_its_caller_and_the_engine_serves_on(replica, cold):
    served: LocalReplica = replica(num_blocks=8)
    engine = served.engine()
    engine.start()
    with pytest.raises(InvalidRequest):
        engine.submit(served.submission(run_of(1, 200)), Stream().put).result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0).result(WAIT_S)
    stream = Stream()
    engine.submit(served.submission(PROMPT, max_new=3), stream.put).result(WAIT_S)
    assert stream.ended.wait(WAIT_S)
    assert stream.tokens == cold(PROMPT, 3)
    assert engine.call(lambda: threading.current_thread().name).result(WAIT_S) == "copyhold-engine"
    engine.stop(WAIT_S)


def test_a_cancel_reaches_a_running_stream_and_the_next_one_is_served(replica, cold):
    served: LocalReplica = replica()
    engine = served.engine()
    stream, after = Gate(3), Stream()
    engine.start()
    entry = engine.submit(served.submission(PROMPT, max_new=300), stream.put).result(WAIT_S)
    assert stream.reached.wait(WAIT_S)
    cancelled = engine.cancel(entry)
    stream.open.set()
    cancelled.result(WAIT_S)
    assert stream.ended.wait(WAIT_S)
    ended_once(stream, "cancelled")
    engine.submit(served.submission(PROMPT, max_new=3), after.put).result(WAIT_S)
    assert after.ended.wait(WAIT_S)
    assert after.tokens == cold(PROMPT, 3)
    assert after.admitted.cached_tokens == 64
    engine.stop(WAIT_S)


def test_audit_and_purge_go_between_two_steps_of_a_running_stream(replica, cold):
    served: LocalReplica = replica(2)
    engine = served.engine()
    stream, revoked = Gate(8), Stream()
    engine.start()
    engine.submit(served.submission(PROMPT, "b", max_new=30), stream.put)
    engine.submit(served.submission(PROMPT, "a", max_new=30), revoked.put)
    assert stream.reached.wait(WAIT_S)

    def order() -> KVAuditOrder:
        ((_, tokens, blocks),) = served.ledger.paths("b")
        return KVAuditOrder(tokens.astype("<i4").tobytes(), tuple(blocks.tolist()), (0, 17, 40))

    audited = engine.call(order)
    advanced = engine.call(lambda: served.scheduler.advance_floor("a", 2))
    ended = engine.call(served.scheduler.end_below_floor)
    purged = engine.purge(PurgeOrder("a", 2, "n1"))
    stream.open.set()
    assert (advanced.result(WAIT_S), ended.result(WAIT_S)) == (1, 1)
    evidence = [report.purge for report in purged.result(WAIT_S) if report.purge is not None]
    assert member_faults(evidence, served.member, EvidenceQuestion("n1", "a", 2)) == []
    reports = [report.audit for report in engine.audit(audited.result(WAIT_S)).result(WAIT_S)]
    assert [report.rows_compared for report in reports if report] == [6, 6]
    assert all(report and report.max_abs_difference <= 1e-3 for report in reports)
    ended_once(revoked, "namespace_revoked")
    assert stream.ended.wait(WAIT_S)
    assert stream.tokens == cold(PROMPT, 30)
    assert revoked.tokens == cold(PROMPT, 30)[: len(revoked.tokens)]
    engine.stop(WAIT_S)


class LostAtPurge:
    """A rank that is gone when it is asked for evidence."""

    def __init__(self, rank: RankLike, error: Exception) -> None:
        self._rank, self._error = rank, error

    def execute(self, plan: StepPlan) -> StepEvidence:
        if plan.purge is not None:
            raise self._error
        return self._rank.execute(plan)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TransportClosed("gone"), "transport_closed"), (ValueError("gone"), "replica_stopped")],
    ids=["channel", "rank"],
)
def test_a_rank_lost_while_it_is_asked_for_evidence_stops_the_replica(replica, cold, error, kind):
    """The plan was half carried out: nothing may follow it, although a caller has been told of the failure."""
    served: LocalReplica = replica(wrap=lambda _, rank: LostAtPurge(rank, error))
    engine = served.engine()
    stream = Gate(4)
    engine.start()
    engine.submit(served.submission(PROMPT, max_new=200), stream.put)
    assert stream.reached.wait(WAIT_S)
    purged = engine.purge(PurgeOrder("b", 2, "n1"))
    stream.open.set()
    with pytest.raises(type(error), match="gone"):
        purged.result(WAIT_S)
    assert stream.ended.wait(WAIT_S)
    ended_once(stream, kind)
    assert stream.tokens == cold(PROMPT, 3)
    assert engine.failure is not None
    engine.stop(WAIT_S)


class Dawdling:
    """An inbox whose senders lose the processor between their check and their put, until the engine has ended."""

    def __init__(self, engine: Engine) -> None:
        self._inner, self._thread = engine._inbox, engine._thread
        self.entered = threading.Event()

    def put(self, item) -> None:
        if item is not None:
            self.entered.set()
            self._thread.join(0.3)
        self._inner.put(item)

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


def test_a_call_that_races_with_the_end_is_always_answered(replica):
    engine: Engine = replica().engine()
    engine.start()
    engine.call(lambda: None).result(WAIT_S)
    inbox = Dawdling(engine)
    engine._inbox = inbox  # type: ignore[assignment]
    futures: list[Future[int]] = []
    asker = threading.Thread(target=lambda: futures.append(engine.call(lambda: 1)))
    asker.start()
    assert inbox.entered.wait(WAIT_S)
    engine.stop(WAIT_S)
    asker.join(WAIT_S)
    with pytest.raises(ReplicaStopped):
        futures[0].result(2.0)


@pytest.fixture
def listener() -> Iterator[StepListener]:
    folder = tempfile.mkdtemp(prefix="ch-")
    made = StepListener(Path(folder) / "step", 2)
    yield made
    made.close()
    shutil.rmtree(folder)


def test_over_sockets_two_ranks_serve_and_a_lost_one_ends_the_streams(replica, cold, listener):
    served: LocalReplica = replica(2)
    hang_up = threading.Event()

    def rank_loop(number: int) -> None:
        with connect(listener._path, number, WAIT_S) as sock:
            try:
                while not (number == 1 and hang_up.is_set()):
                    plan = decode_plan(receive_message(sock))
                    send_message(sock, encode_evidence(served.ranks[number].execute(plan)))
            except (TransportClosed, CollectiveError):
                return

    threads = [threading.Thread(target=rank_loop, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    listener.accept_all(WAIT_S)
    engine = Engine(served.scheduler, ChannelExecutor(listener, WAIT_S), lambda: True)
    engine.start()
    whole, cut = Stream(), Gate(6)
    engine.submit(served.submission(PROMPT, max_new=8), whole.put)
    assert whole.ended.wait(WAIT_S)
    assert whole.tokens == cold(PROMPT, 8)
    engine.submit(served.submission(PROMPT, max_new=200), cut.put)
    assert cut.reached.wait(WAIT_S)
    hang_up.set()
    cut.open.set()
    assert cut.ended.wait(WAIT_S)
    ended_once(cut, "transport_closed")
    assert cut.tokens == cold(PROMPT, 6)[: len(cut.tokens)]
    engine.stop(WAIT_S)
    served.meeting.abort()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
