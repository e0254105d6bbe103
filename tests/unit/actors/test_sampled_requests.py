"""Drawn tokens belong to (seed, position): batch, chunks, cache, ranks, preemption and a retry change none of them."""

from __future__ import annotations

import msgspec
import pytest
from local_replica import LocalReplica, Stream, run_of

from copyhold.actors.errors import RanksDiffer
from copyhold.actors.plan import Draw, StepPlan, decode_plan, encode_plan
from copyhold.models.sampling import SamplingParams

PROMPT = run_of(1, 70)
NEW = 24
WARM = SamplingParams(1.0, seed=7)
FILTERED = SamplingParams(0.8, 0.95, 100, seed=-3)


def submit(
    served: LocalReplica, prompt: list[int], sampling: SamplingParams, max_new: int = NEW, **options
) -> Stream:
    stream = Stream()
    submission = served.submission(prompt, max_new=max_new, **options)
    asked = msgspec.structs.replace(submission, sampling=sampling)
    stream.entry = served.scheduler.submit(asked, stream.put)
    return stream


def serve(served: LocalReplica, prompt: list[int], sampling: SamplingParams, max_new: int = NEW) -> list[int]:
    stream = submit(served, prompt, sampling, max_new)
    served.run()
    return stream.tokens


@pytest.fixture(scope="module")
def alone(checkpoints):
    """Tokens of one request on a fresh replica with one rank."""

    def run(prompt: list[int], sampling: SamplingParams, max_new: int = NEW) -> list[int]:
        served = LocalReplica(checkpoints(1))
        try:
            return serve(served, prompt, sampling, max_new)
        finally:
            served.close()

    return run


def test_a_seed_repeats_itself_and_another_seed_does_not(replica, cold, alone):
    served: LocalReplica = replica()
    first = serve(served, PROMPT, WARM)
    assert first == serve(served, PROMPT, WARM) == alone(PROMPT, WARM)
    others = [serve(served, PROMPT, SamplingParams(1.0, seed=seed)) for seed in (8, -7, 2**63 - 1, -(2**63))]
    assert len({tuple(tokens) for tokens in (first, cold(PROMPT, NEW), *others)}) == 6
    assert serve(served, PROMPT, SamplingParams(2.0, 1.0, 1, seed=9)) == cold(PROMPT, NEW), (
        "one id is no choice"
    )
    served.check_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
def test_drawn_and_greedy_requests_of_one_batch_are_each_as_alone(replica, cold, alone, ranks):
    served: LocalReplica = replica(ranks, chunk_tokens=33, step_tokens=90)
    asked = [(PROMPT, WARM), (run_of(300, 20), FILTERED), (PROMPT, FILTERED), (run_of(600, 45), WARM)]
    drawn = [submit(served, prompt, params) for prompt, params in asked[:2]]
    greedy = [served.submit(run_of(200, 50), max_new=NEW), served.submit(PROMPT, "b", max_new=NEW)]
    for _ in range(5):
        served.step()
    drawn += [submit(served, prompt, params) for prompt, params in asked[2:]]
    served.run()
    assert [stream.tokens for stream in drawn] == [alone(prompt, params) for prompt, params in asked]
    assert [stream.tokens for stream in greedy] == [cold(run_of(200, 50), NEW), cold(PROMPT, NEW)]
    assert drawn[2].admitted.cached_tokens > 0, "the third found the first one's prefix"
    served.check_quiet()


@pytest.mark.parametrize("chunk", [7, 16, 1000])
def test_chunks_and_a_cached_prefix_change_no_draw(replica, alone, chunk):
    served: LocalReplica = replica(2, chunk_tokens=chunk)
    cold_run, warm_run = submit(served, PROMPT, FILTERED), None
    served.run()
    warm_run = submit(served, PROMPT, FILTERED)
    served.run()
    assert (cold_run.admitted.cached_tokens, warm_run.admitted.cached_tokens) == (0, 64)
    assert cold_run.tokens == warm_run.tokens == alone(PROMPT, FILTERED)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_preempted_request_draws_its_tokens_again(replica, alone, ranks):
    served: LocalReplica = replica(ranks, num_blocks=8)
    asked = [(run_of(1, 60), WARM), (run_of(300, 60), FILTERED)]
    streams = [
        submit(served, prompt, params, 40, namespace=name)
        for (prompt, params), name in zip(asked, "ab", strict=True)
    ]
    served.run()
    assert served.scheduler.preemptions >= 1
    assert [stream.tokens for stream in streams] == [alone(prompt, params, 40) for prompt, params in asked]
    served.check_quiet()


@pytest.mark.parametrize("sent", [1, 9, 23])
def test_a_retry_with_the_sent_tokens_as_prompt_goes_on_with_the_same_draws(replica, alone, sent):
    whole = alone(PROMPT, WARM)
    assert serve(replica(2), PROMPT + whole[:sent], WARM, NEW - sent) == whole[sent:]


def test_a_plan_names_its_drawn_rows_only(replica):
    served: LocalReplica = replica(chunk_tokens=40)
    served.submit(run_of(200, 20), max_new=3)
    submit(served, PROMPT, WARM, 3)
    submit(served, run_of(300, 20), FILTERED, 3)
    seen = []
    while not served.scheduler.idle:
        plan = served.plan()
        assert plan is not None and decode_plan(encode_plan(plan)) == plan
        seen.append((plan.sample, plan.draws))
        served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
    assert seen[0] == ((0, 2), (Draw(1, FILTERED),)), "the long prompt has only its first chunk behind it"
    assert seen[1] == ((0, 1, 2), (Draw(1, FILTERED), Draw(2, WARM)))
    greedy = encode_plan(StepPlan("i", 0, 0, (), (0, 1, 2)))
    assert greedy.endswith(b"\x90"), "a greedy plan says so in one byte, an empty array"


class MistakenSeed:
    """A rank that is told another seed from its third plan on."""

    def __init__(self, rank) -> None:
        self._rank, self._plans = rank, 0

    def execute(self, plan: StepPlan):
        self._plans += 1
        if self._plans > 2:
            draws = tuple(Draw(draw.index, SamplingParams(1.0, seed=99)) for draw in plan.draws)
            plan = msgspec.structs.replace(plan, draws=draws)
        return self._rank.execute(plan)


def test_ranks_that_draw_different_tokens_stop_the_replica_before_one_leaves(replica, alone):
    served: LocalReplica = replica(2, wrap=lambda number, rank: MistakenSeed(rank) if number == 1 else rank)
    stream = submit(served, PROMPT, WARM)
    with pytest.raises(RanksDiffer):
        served.run()
    assert stream.tokens == alone(PROMPT, WARM)[: len(stream.tokens)]
    assert 2 <= len(stream.tokens) < NEW
