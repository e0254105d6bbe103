"""Partial tails through a whole replica: longer hits, the tokens of a cold run, room and shares that add up."""

from __future__ import annotations

import random

import pytest
from local_replica import run_of

from copyhold.actors.cache_settings import CacheSettings
from copyhold.actors.request_book import REVOKED, RequestBook
from copyhold.actors.shares import ShareSettings
from copyhold.kvcore.commands import Genesis, GroupSpec

TAILS = CacheSettings(tails=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_turn_hits_the_rows_behind_the_last_block(replica, cold, ranks):
    plain, served = replica(ranks), replica(ranks, cache=TAILS)
    prompt = run_of(100, 40)
    answer = served.serve(prompt, max_new=6).tokens
    assert answer == plain.serve(prompt, max_new=6).tokens == cold(prompt, 6)
    turn = [*prompt, *answer, 7, 8, 9]
    longer, shorter = served.serve(turn, max_new=6), plain.serve(turn, max_new=6)
    assert longer.tokens == shorter.tokens == cold(turn, 6)
    # The last sampled token has no row: 40 + 6 - 1 of 49, two blocks and a tail of 13 rows.
    assert (longer.admitted.cached_tokens, shorter.admitted.cached_tokens) == (45, 32)
    assert (longer.admitted.limit, longer.admitted.reason) == ("tail", "tail_ends")
    assert (shorter.admitted.limit, shorter.admitted.reason) == ("indexed", "not_indexed")
    other = [*prompt, *answer, 11, 12]
    assert served.serve(other, max_new=6).tokens == cold(other, 6)
    served.check_quiet()
    plain.check_quiet()


def test_two_at_once_share_one_tail_and_each_goes_on_in_a_copy(replica, cold):
    served = replica(cache=TAILS)
    prompt = run_of(100, 40)
    answer = served.serve(prompt, max_new=6).tokens
    turns = [[*prompt, *answer, last] for last in (7, 8, 9)]
    streams = [served.submit(turn, max_new=5) for turn in turns]
    served.run()
    for turn, stream in zip(turns, streams, strict=True):
        assert stream.admitted.cached_tokens == 45 and stream.tokens == cold(turn, 5)
    assert served.scheduler.cache_report().cached_tokens == served.scheduler.cached_tokens == 3 * 45
    served.check_quiet()


def test_without_the_setting_nothing_changes(replica):
    served = replica()
    served.serve(run_of(100, 40), max_new=6)
    assert not served.ledger.tails()


def test_who_may_not_publish_or_reuse_leaves_and_reads_no_tail(replica):
    served = replica(cache=TAILS)
    served.serve(run_of(100, 40), max_new=1, publish=False)
    assert not served.ledger.tails()
    served.serve(run_of(100, 40), max_new=1)
    assert len(served.ledger.tails()) == 1
    assert served.serve(run_of(100, 44), max_new=1, lookup=False).admitted.cached_tokens == 0
    assert served.serve(run_of(100, 44), "b", max_new=1).admitted.cached_tokens == 0
    # The blind one left a tail of its own: the whole prompt is there, and its last token is computed again.
    again = served.serve(run_of(100, 44), max_new=1).admitted
    assert (again.cached_tokens, again.reason) == (43, "logits_cap")
    served.check_quiet()


def test_random_conversations_in_a_small_pool_have_the_tokens_of_cold_runs(replica, cold):
    """Tails are evicted first, requests are preempted, and every block is accounted for."""
    served, rng = replica(num_blocks=14, max_requests=3, chunk_tokens=24, cache=TAILS), random.Random(7)
    talks: dict[int, list[int]] = {n: run_of(100 + 40 * n, rng.randrange(20, 40)) for n in range(4)}
    hits = 0
    for _ in range(8):
        chosen = rng.sample(sorted(talks), 2)
        streams = []
        for number in chosen:
            if len(talks[number]) > 90:
                talks[number] = run_of(100 + 40 * number, rng.randrange(20, 40))
            streams.append(served.submit(talks[number], "ab"[number % 2], max_new=4))
        served.run()
        for number, stream in zip(chosen, streams, strict=True):
            assert stream.tokens == cold(talks[number], 4)
            hits += stream.admitted.cached_tokens % 16 != 0
            talks[number] = [*talks[number], *stream.tokens, rng.randrange(1, 90)]
        served.check()
        gauge = served.ledger.gauge()
        assert sum(served.scheduler.held_blocks().values()) == gauge.total - gauge.free
    assert hits > 3
    served.check_quiet()


def test_a_floor_that_rises_while_a_tail_is_copied_keeps_the_books(replica):
    served = replica(cache=TAILS)
    served.serve(run_of(100, 40), max_new=1)
    stream = served.submit(run_of(100, 44), max_new=4)
    plan = served.plan()
    evidence = served.rank_set.execute(plan)
    served.scheduler.advance_floor("a", 2)
    served.scheduler.complete(plan, evidence, 1.0)
    served.scheduler.end_below_floor()
    served.run()
    assert stream.failed == REVOKED
    assert served.ledger.gauge().free == served.ledger.gauge().total
    assert served.scheduler.held_blocks()["a"] == 0


def test_what_tails_cannot_be_combined_with_is_refused():
    with pytest.raises(ValueError, match="shares"):
        CacheSettings(shares=ShareSettings("strict"), tails=True)
    groups = (GroupSpec("fine", 2, 8), GroupSpec("coarse", 4, 8))
    with pytest.raises(ValueError, match="one cache group"):
        RequestBook(Genesis(b"w", groups, 2, 16, "pool"), TAILS, None)
