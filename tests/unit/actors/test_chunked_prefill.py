"""Chunked prefill under a prefix cache: chunks that end inside blocks change neither the index, the rows nor the tokens."""

from __future__ import annotations

import pytest
from local_replica import LocalReplica, Stream, digests_of, run_of

from copyhold.kvcore.commands import Dispatch

PROMPT, TAIL = run_of(1, 100), run_of(500, 4)
NEW = 6


def next_step(served: LocalReplica) -> list[tuple[int, int]]:
    """Runs one step; (start, end) of its rows."""
    plan = served.plan()
    assert plan is not None
    spans = [
        (span.start, span.start + span.count)
        for command in plan.commands
        if isinstance(command, Dispatch)
        for span in command.rows
    ]
    served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
    return spans


def whole_blocks(served: LocalReplica, rows: int) -> None:
    """The index holds exactly the blocks of PROMPT whose every row is written."""
    assert set(served.index()) == digests_of(PROMPT[:rows]), f"after {rows} rows"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(replica, cold, ranks):
    chunked, at_once = replica(ranks, chunk_tokens=24), replica(ranks)
    stream = chunked.submit(PROMPT, max_new=NEW)
    ends = []
    for rows in (24, 48, 72, 96, 100):
        ends += [end for _, end in next_step(chunked)]
        whole_blocks(chunked, rows)
    assert ends == [24, 48, 72, 96, 100]
    chunked.run()
    whole = at_once.serve(PROMPT, max_new=NEW)
    assert stream.tokens == whole.tokens == cold(PROMPT, NEW)
    assert set(chunked.index()) == set(at_once.index())
    assert len(chunked.index()) == 6
    for served in (chunked, at_once):
        assert served.worst_audit() <= 1e-3
        served.check_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_twin_between_two_chunks_and_a_cancel_after_the_third(replica, cold, ranks):
    """Case B22: the twin gets what was written by then, 48 tokens and not 64, and finishes although its twin is gone."""
    served: LocalReplica = replica(ranks, chunk_tokens=24)
    first = served.submit(PROMPT, max_new=NEW)
    assert next_step(served) == [(0, 24)]
    assert next_step(served) == [(24, 48)]
    twin = served.submit(PROMPT, max_new=NEW)
    assert next_step(served) == [(48, 72), (48, 72)]
    assert twin.admitted.cached_tokens == 48
    served.cancel(first)
    assert next_step(served) == [(72, 96)]
    assert first.failed.kind == "cancelled"
    assert first.tokens == []
    served.check()
    served.run()
    assert twin.tokens == cold(PROMPT, NEW)
    last = served.serve(PROMPT + TAIL, max_new=NEW)
    assert last.admitted.cached_tokens == 96
    assert last.tokens == cold(PROMPT + TAIL, NEW)
    assert served.worst_audit() <= 1e-3
    served.check_quiet()

    reference: LocalReplica = replica(ranks)
    reference.serve(PROMPT, max_new=NEW)
    assert reference.serve(PROMPT + TAIL, max_new=NEW).admitted.cached_tokens == 96
    assert set(served.index()) == set(reference.index())
    assert digests_of(PROMPT) <= set(served.index())


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 33, 99])
def test_every_chunk_length_gives_the_same_index_and_tokens(replica, cold, chunk):
    served = replica(chunk_tokens=chunk)
    assert served.serve(PROMPT, max_new=NEW).tokens == cold(PROMPT, NEW)
    assert set(served.index()) == digests_of(PROMPT)
    assert served.serve(PROMPT[:50] + TAIL, max_new=2).admitted.cached_tokens == 48
    served.check_quiet()


def test_a_step_s_token_budget_is_shared_and_decoding_goes_first(replica, cold):
    served: LocalReplica = replica(chunk_tokens=24, step_tokens=30)
    decoding = served.submit(run_of(700, 3), max_new=20)
    next_step(served)
    long: list[Stream] = [served.submit(run_of(1 + 100 * n, 60), "b", max_new=2) for n in range(2)]
    assert next_step(served) == [(3, 4), (0, 24), (0, 5)]
    while not served.scheduler.idle:
        assert sum(end - start for start, end in next_step(served)) <= 30
    assert decoding.tokens == cold(run_of(700, 3), 20)
    assert [stream.tokens for stream in long] == [cold(run_of(1 + 100 * n, 60), 2) for n in range(2)]
