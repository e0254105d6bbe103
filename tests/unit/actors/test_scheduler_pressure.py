"""A small pool: cancelled requests give everything back, preempted ones lose nothing, nobody waits for ever."""

from __future__ import annotations

import time

import pytest
from local_replica import LocalReplica, run_of

from copyhold.actors.errors import InvalidRequest
from copyhold.kvcore.commands import Dispatch

PROMPT = run_of(1, 70)


def test_cancelling_a_waiting_request_leaves_nothing_of_it(replica):
    served: LocalReplica = replica(max_requests=1)
    running, waiting = served.submit(PROMPT, max_new=30), served.submit(run_of(200, 40), max_new=30)
    served.step()
    assert served.scheduler.counts() == (1, 1)
    served.cancel(waiting)
    served.step()
    assert served.scheduler.counts() == (1, 0)
    assert waiting.failed.kind == "cancelled"
    assert waiting.items == [waiting.failed]
    served.run()
    assert len(running.tokens) == 30
    served.check_quiet()
    assert len(served.index()) == (70 + 29) // 16


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 5], ids=["in prefill", "last chunk", "decoding"])
def test_cancelling_a_running_request_gives_its_blocks_back(replica, cold, ranks, steps):
    served: LocalReplica = replica(ranks, chunk_tokens=40)
    other = served.submit(run_of(300, 20), "b", max_new=12)
    stream = served.submit(PROMPT, max_new=30)
    for _ in range(steps):
        served.step()
    served.cancel(stream)
    served.cancel(stream)
    sent = len(stream.tokens)
    served.step()
    assert stream.failed.kind == "cancelled"
    assert len(stream.tokens) == sent
    served.check()
    served.run()
    served.cancel(stream)
    assert other.tokens == cold(run_of(300, 20), 12)
    served.check_quiet()
    assert served.serve(PROMPT, max_new=3).tokens == cold(PROMPT, 3)
    assert served.scheduler.idle


def test_a_cancel_after_the_end_changes_nothing_and_an_idle_scheduler_says_nothing(replica):
    served: LocalReplica = replica()
    stream = served.serve(PROMPT, max_new=2)
    items, index = list(stream.items), served.ledger.log_index
    served.cancel(stream)
    assert served.plan() is None
    assert (stream.items, served.ledger.log_index) == (items, index)


def test_no_more_than_max_requests_run_at_once_and_all_are_served_in_order(replica, cold):
    served: LocalReplica = replica(max_requests=2, num_blocks=64)
    prompts = [run_of(100 * n, 20) for n in range(5)]
    streams = [served.submit(prompt, max_new=5) for prompt in prompts]
    admitted: list[int] = []
    while not served.scheduler.idle:
        served.step()
        assert served.scheduler.counts()[0] <= 2
        admitted += [n for n, stream in enumerate(streams) if stream.items and n not in admitted]
    assert admitted == [0, 1, 2, 3, 4]
    assert [stream.tokens for stream in streams] == [cold(prompt, 5) for prompt in prompts]
    served.check_quiet()


def test_a_request_without_room_waits_in_bounded_time_and_evicts_nothing(replica):
    """Case B26 (a), one level up: two live sequences fill the pool, a third waits and costs nothing."""
    served: LocalReplica = replica(num_blocks=8)
    for n in range(2):
        served.submit(run_of(100 * n, 60), max_new=5, publish=False)
    served.step()
    third = served.submit(run_of(300, 33), max_new=2)
    started_s = time.monotonic()
    plan = served.plan()
    assert time.monotonic() - started_s < 0.05
    assert plan is not None
    dispatches = [command for command in plan.commands if isinstance(command, Dispatch)]
    assert [dispatch.evict for dispatch in dispatches] == [()]
    assert third.items == []
    served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
    served.run()
    assert len(third.tokens) == 2
    served.check_quiet()


def test_a_request_that_can_never_fit_is_refused_and_the_pool_is_unchanged(replica, cold):
    """Case B26 (b): no self-preemption, a typed error at once; the largest that fits is served."""
    served: LocalReplica = replica(num_blocks=8)
    served.step()
    digest, gauge = served.ledger.machine_digest, served.ledger.gauge()
    with pytest.raises(InvalidRequest, match="never fit"):
        served.submit(run_of(1, 128), max_new=2)
    assert served.ledger.machine_digest == digest
    assert served.ledger.gauge() == gauge
    assert served.scheduler.idle
    assert served.serve(run_of(1, 128), max_new=1).tokens == cold(run_of(1, 128), 1)
    assert served.serve(run_of(300, 100), max_new=29).tokens == cold(run_of(300, 100), 29)
    assert served.scheduler.preemptions == 0
    served.check_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_that_outgrow_the_pool_finish_one_after_the_other(replica, cold, ranks):
    served: LocalReplica = replica(ranks, num_blocks=8)
    prompts = [run_of(1, 60), run_of(300, 60)]
    streams = [
        served.submit(prompt, namespace, max_new=40) for prompt, namespace in zip(prompts, "ab", strict=True)
    ]
    served.run()
    assert served.scheduler.preemptions >= 1
    for stream, prompt in zip(streams, prompts, strict=True):
        assert stream.tokens == cold(prompt, 40)
        assert stream.finished.receipt.completion_tokens == 40
        assert stream.admitted.cached_tokens == 0, "the receipt is of the first admission"
    served.check_quiet()


def test_six_requests_that_share_a_prefix_all_finish_with_few_preemptions(replica, cold):
    """Case B26 (c), every length times four (the kernels' tile is sixteen rows): 10 blocks, 7 a prompt, 5 of them shared."""
    served: LocalReplica = replica(num_blocks=10)
    prompts = [run_of(1, 80) + run_of(200 + 100 * n, 32) for n in range(6)]
    streams = [served.submit(prompt, max_new=32) for prompt in prompts]
    served.run(600)
    for stream, prompt in zip(streams, prompts, strict=True):
        assert stream.tokens == cold(prompt, 32)
    assert served.scheduler.preemptions <= 20
    assert [stream.admitted.cached_tokens for stream in streams[1:]] == [80] * 5
    served.check_quiet()


@pytest.mark.parametrize("shared", [16, 17, 40])
def test_a_prompt_that_shares_only_the_start_of_a_long_cached_edge_is_served(replica, cold, shared):
    """One cached edge fills the pool and the prompt matches its first block: the rest of the edge has to go."""
    served: LocalReplica = replica(num_blocks=8)
    served.serve(run_of(1, 127), max_new=1)
    assert served.ledger.gauge().free <= 1
    prompt = run_of(1, shared) + run_of(500, 120 - shared)
    stream = served.submit(prompt, max_new=4)
    served.run(50)
    assert stream.tokens == cold(prompt, 4)
    served.check_quiet()


def test_a_cached_path_is_kept_while_other_edges_can_make_the_room(replica, cold):
    served: LocalReplica = replica(num_blocks=10)
    served.serve(run_of(1, 64), max_new=1)
    served.serve(run_of(300, 80), max_new=1)
    prompt = run_of(1, 64) + run_of(700, 60)
    stream = served.serve(prompt, max_new=4)
    assert stream.admitted.cached_tokens == 64
    assert stream.tokens == cold(prompt, 4)
    served.check_quiet()


def test_under_pressure_the_prompt_that_was_hit_last_stays_and_the_other_goes(replica):
    served: LocalReplica = replica(num_blocks=10)
    old, hit = run_of(1, 49), run_of(300, 49)
    for prompt in (hit, old, hit):
        served.serve(prompt, max_new=1)
    served.serve(run_of(600, 80), max_new=1)
    assert served.serve(hit, max_new=1).admitted.cached_tokens == 48
    assert served.serve(old, max_new=1).admitted.cached_tokens == 0
    served.check_quiet()
