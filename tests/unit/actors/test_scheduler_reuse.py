"""Reuse changes nothing but the work: tokens with a cache, in a batch, over turns, on one rank and on two."""

from __future__ import annotations

import pytest
from local_replica import BLOCK, LocalReplica, Stream, run_of

from copyhold.actors.errors import InvalidRequest, NamespaceRevoked
from copyhold.actors.messages import Admitted, Finished, TokenChunk

PROMPT = run_of(1, 100)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_repeated_prompt_hits_and_gives_the_tokens_of_a_cold_run(replica, cold, ranks):
    served = replica(ranks)
    first, again = served.serve(PROMPT, max_new=12), served.serve(PROMPT, max_new=12)
    assert first.admitted.cached_tokens == 0
    assert again.admitted.cached_tokens == 96
    assert first.tokens == again.tokens == cold(PROMPT, 12)
    assert (served.scheduler.admitted_requests, served.scheduler.cached_tokens) == (2, 96)
    served.check_quiet()
    assert served.worst_audit() <= 1e-3


def test_the_cached_run_computes_only_what_was_not_cached(replica):
    served = replica()
    rows = []
    for _ in range(2):
        served.submit(PROMPT, max_new=1)
        plan = served.plan()
        rows.append([(span.start, span.count) for span in plan.commands[-1].rows])
        served.scheduler.complete(plan, served.rank_set.execute(plan), 0.0)
        served.run()
    assert rows == [[(0, 100)], [(96, 4)]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_in_one_batch_get_the_tokens_each_gets_alone(replica, cold, ranks):
    served = replica(ranks, num_blocks=64)
    prompts = [run_of(1, 70), run_of(300, 5), run_of(1, 33) + run_of(600, 20), [9], run_of(500, 48)]
    streams = [
        served.submit(prompt, namespace, max_new=6 + n)
        for n, (prompt, namespace) in enumerate(zip(prompts, "abacb", strict=True))
    ]
    served.run()
    for n, (stream, prompt) in enumerate(zip(streams, prompts, strict=True)):
        assert stream.tokens == cold(prompt, 6 + n), f"request {n}"
    served.check_quiet()


def test_the_last_sampled_token_has_no_row_so_the_next_turn_caches_one_less(replica, cold):
    served = replica()
    for new in (12, 13, 14):
        prompt = run_of(20 * new, 20)
        answer = served.serve(prompt, max_new=new).tokens
        have_rows = len(prompt) + new - 1
        turn = prompt + answer + run_of(900, 3)
        second = served.serve(turn, max_new=5)
        assert second.admitted.cached_tokens == BLOCK * (min(have_rows, len(turn) - 1) // BLOCK)
        assert second.tokens == cold(turn, 5)
    assert [20 + new - 1 for new in (12, 13)] == [31, 32], "the case has both sides of a boundary"


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_whole_cached_prompt_still_computes_its_last_token(replica, cold, length, cached):
    served = replica()
    prompt = run_of(1, length)
    first, again = served.serve(prompt, max_new=1), served.serve(prompt, max_new=1)
    longer = served.serve(prompt + run_of(900, 17), max_new=1)
    assert (first.admitted.cached_tokens, again.admitted.cached_tokens) == (0, cached)
    assert longer.admitted.cached_tokens == BLOCK * (length // BLOCK)
    assert first.tokens == again.tokens == cold(prompt, 1)
    assert longer.tokens == cold(prompt + run_of(900, 17), 1)
    served.check_quiet()


def test_namespaces_and_generations_do_not_share_and_each_hits_its_own(replica):
    served = replica()
    for _ in range(2):
        for namespace, generation in (("a", 1), ("b", 1), ("a", 2)):
            served.serve(PROMPT, namespace, generation=generation, max_new=1)
    hits = [served.serve(PROMPT, "a", generation=g, max_new=1).admitted.cached_tokens for g in (1, 2, 3)]
    assert hits == [96, 96, 0]
    blocks = [
        block
        for namespace in "ab"
        for _, _, path in served.ledger.paths(namespace)
        for block in path.tolist()
    ]
    assert len(blocks) == len(set(blocks)) == 24
    served.check_quiet()


def test_without_the_right_to_reuse_or_to_publish_nothing_is_read_or_left(replica, cold):
    served = replica()
    served.serve(PROMPT, max_new=1)
    blind = served.serve(PROMPT, max_new=4, lookup=False)
    assert blind.admitted.cached_tokens == 0
    assert blind.admitted.reason == "lookup_not_permitted"
    silent = served.serve(run_of(200, 40), max_new=4, publish=False)
    again = served.serve(run_of(200, 40), max_new=4)
    assert again.admitted.cached_tokens == 0
    assert blind.tokens == cold(PROMPT, 4)
    assert silent.tokens == again.tokens == cold(run_of(200, 40), 4)
    served.check_quiet()


def test_a_stream_is_admitted_tokens_finished_and_its_receipt_grows_with_it(replica):
    served = replica()
    stream = served.serve(PROMPT, max_new=3)
    assert [type(item) for item in stream.items] == [Admitted, TokenChunk, TokenChunk, TokenChunk, Finished]
    first, last = stream.admitted, stream.finished.receipt
    assert (first.prompt_tokens, first.cached_tokens, first.cap_tokens) == (100, 0, 99)
    assert (first.limit, first.reason) == ("indexed", "root_empty")
    assert (first.finish_reason, first.completion_tokens, first.time_to_first_token_ms) == ("running", 0, 0.0)
    assert (last.receipt_id, last.request_id) == (first.receipt_id, first.request_id)
    assert (last.finish_reason, last.completion_tokens) == ("length", 3)
    assert last.time_to_first_token_ms == 500.0


def test_a_stop_token_ends_the_stream_and_is_not_sent(replica, cold):
    served = replica()
    expected = cold(PROMPT, 8)
    stop = next(token for n, token in enumerate(expected) if n > 1 and token not in expected[:n])
    before = expected[: expected.index(stop)]
    stream = served.serve(PROMPT, max_new=8, stop=[stop])
    assert stream.tokens == before
    assert stream.finished.reason == "stop"
    assert stream.finished.receipt.completion_tokens == len(before)
    assert served.serve(PROMPT, max_new=len(before), stop=[stop]).finished.reason == "length"
    assert served.serve(PROMPT, max_new=8, stop=[expected[0]]).tokens == []
    served.check_quiet()


def test_publications_are_reported_once_per_boundary(replica):
    served = replica(chunk_tokens=40)
    served.serve(PROMPT, max_new=30)
    spans = [(before, after) for _, before, after in served.published]
    assert [after for _, after in spans] == [32, 80, 96, 112, 128]
    assert [before for before, _ in spans] == [0, 32, 80, 96, 112]


def refusal(served: LocalReplica, tokens: list[int], **options) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        served.submit(tokens, **options)
    return caught.value


def test_what_can_never_be_served_is_refused_and_nothing_is_kept(replica, cold):
    served = replica(num_blocks=8)
    digest, gauge = served.ledger.machine_digest, served.ledger.gauge()
    assert refusal(served, []).param == "prompt"
    assert refusal(served, run_of(1, 510), max_new=3).param == "max_tokens"
    assert refusal(served, run_of(1, 128), max_new=2).param == "prompt"
    assert served.scheduler.counts() == (0, 0)
    assert (served.ledger.machine_digest, served.ledger.gauge()) == (digest, gauge)
    served.scheduler.advance_floor("a", 2)
    with pytest.raises(NamespaceRevoked):
        served.submit([1, 2])
    assert served.scheduler.counts() == (0, 0)
    exact: Stream = served.serve(run_of(1, 128), generation=2, max_new=1)
    assert exact.tokens == cold(run_of(1, 128), 1)


@pytest.mark.parametrize("tokens", [[5, -1, 7], [-(2**31)]], ids=["a negative id", "the lowest id"])
def test_ids_that_no_vocabulary_has_are_refused_before_the_ledger_hears_of_them(replica, tokens):
    served = replica()
    assert refusal(served, tokens).param == "prompt"
    assert served.serve([5, 1, 7], max_new=1).finished.reason == "length"
