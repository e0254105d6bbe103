"""Shares of one pool: with strict isolation nothing a neighbour does changes a tenant's hits; with elastic it may."""

from __future__ import annotations

import pytest
from dry_replica import BLOCK, DryReplica
from hypothesis import given, settings
from hypothesis import strategies as st
from local_replica import run_of

from copyhold.actors.cache_settings import SERVED_POLICIES, CacheSettings
from copyhold.actors.errors import InvalidRequest, PoolAllotted
from copyhold.actors.shares import Share, ShareSettings, parse_shares

STRICT = ShareSettings("strict", 16)

prompts = st.tuples(st.integers(0, 2), st.integers(0, 24), st.integers(0, 4), st.integers(1, 10))


def prompt_of(drawn: tuple[int, int, int, int]) -> list[int]:
    stem, shared, own, private = drawn
    return run_of(300 * stem, shared) + run_of(2000 + 100 * own, private)


def hits_of_a(policy: str, own: list, neighbours: list[list]) -> list[int | None]:
    """A's cached tokens, request by request; before each of them its neighbour starts what the list says."""
    cache = CacheSettings(policy=policy, shares=STRICT)
    served = DryReplica(cache, num_blocks=32, max_requests=40)
    hits = []
    for drawn, others in zip(own, neighbours, strict=True):
        for other, max_new, steps in others:
            served.submit(prompt_of(other), "b", max_new=max_new)
            for _ in range(steps):
                served.step()
        stream = served.submit(prompt_of(drawn), max_new=3)
        while not stream.ended:
            served.step()
            assert served.scheduler.held_blocks().get("a", 0) <= 16
            assert served.scheduler.held_blocks().get("b", 0) <= 16
        hits.append(stream.cached_tokens)
    served.run()
    served.check()
    return hits


@pytest.mark.parametrize("policy", sorted(SERVED_POLICIES))
@settings(max_examples=6, deadline=None)
@given(drawn=st.data())
def test_strict_a_tenants_hits_are_the_same_whatever_its_neighbour_does(policy, drawn):
    own = drawn.draw(st.lists(prompts, min_size=3, max_size=15))
    bursts = st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 2)), max_size=3)
    busy = drawn.draw(st.lists(bursts, min_size=len(own), max_size=len(own)))
    assert hits_of_a(policy, own, busy) == hits_of_a(policy, own, [[] for _ in own])


def test_elastic_a_neighbours_load_is_seen_in_a_tenants_hits():
    """The leak of the elastic mode, as docs/prefix-reuse.md says it."""

    def second_look(neighbour: int) -> int | None:
        served = DryReplica(CacheSettings(policy="lru"), num_blocks=32)
        served.serve(run_of(0, 33))
        for number in range(neighbour):
            served.serve(run_of(1000 + 100 * number, 33), "b")
        return served.serve(run_of(0, 33)).cached_tokens

    assert second_look(1) == 32
    assert second_look(8) == 0


def test_elastic_a_floor_keeps_blocks_that_a_neighbour_would_have_taken():
    shares = ShareSettings("elastic", named={"a": Share(8, 32)})
    served = DryReplica(CacheSettings(policy="lru", shares=shares), num_blocks=32)
    served.serve(run_of(0, 33))
    for number in range(8):
        served.serve(run_of(1000 + 100 * number, 33), "b")
        served.check()
    assert served.serve(run_of(0, 33)).cached_tokens == 32


def test_elastic_a_ceiling_makes_a_tenant_evict_its_own():
    shares = ShareSettings("elastic", named={"b": Share(0, 12)})
    served = DryReplica(CacheSettings(policy="lru", shares=shares), num_blocks=32)
    served.serve(run_of(0, 33))
    for number in range(8):
        served.serve(run_of(1000 + 100 * number, 33), "b")
        assert served.scheduler.held_blocks()["b"] <= 12
    assert served.serve(run_of(0, 33)).cached_tokens == 32
    served.check()


@pytest.mark.parametrize("isolation", ["strict", "elastic"])
def test_a_request_that_can_never_fit_its_share_is_refused_and_nothing_changes(isolation):
    shares = ShareSettings(isolation, 16, {"a": Share(8, 8)})
    served = DryReplica(CacheSettings(shares=shares), num_blocks=32)
    served.step()
    digest = served.ledger.machine_digest
    with pytest.raises(InvalidRequest, match="share of 8 blocks: it needs 9"):
        served.submit(run_of(0, 8 * BLOCK), max_new=2)
    assert served.ledger.machine_digest == digest
    assert served.scheduler.idle
    assert served.serve(run_of(0, 8 * BLOCK), max_new=1).failure == ""


def test_strict_a_namespace_without_a_share_left_is_refused_by_name():
    served = DryReplica(CacheSettings(shares=STRICT), num_blocks=40)
    for namespace in "ab":
        served.serve(run_of(0, 9), namespace)
    with pytest.raises(PoolAllotted, match="16 blocks, 8 of the pool are left") as refusal:
        served.submit(run_of(0, 9), "c")
    assert refusal.value.kind == "pool_allotted"
    assert served.scheduler.idle
    assert served.serve(run_of(0, 9), "a").cached_tokens == 8


def test_who_lacks_room_in_its_own_share_holds_up_nobody_else():
    served = DryReplica(CacheSettings(shares=STRICT), num_blocks=32)
    first = served.submit(run_of(0, 60), max_new=4)
    served.step()
    waiting = served.submit(run_of(500, 60), max_new=4)
    other = served.submit(run_of(0, 30), "b", max_new=2)
    served.step()
    assert (first.cached_tokens, waiting.cached_tokens, other.cached_tokens) == (0, None, 0)
    served.run()
    assert waiting.cached_tokens == 0
    assert not waiting.failure
    served.check()


def test_two_of_one_tenant_that_outgrow_its_share_preempt_only_that_tenant():
    served = DryReplica(CacheSettings(shares=STRICT), num_blocks=32)
    other = served.submit(run_of(0, 30), "b", max_new=30)
    streams = [served.submit(run_of(400 * number, 28), max_new=34) for number in range(2)]
    served.run()
    assert served.scheduler.preemptions >= 1
    assert [stream.failure for stream in (other, *streams)] == ["", "", ""]
    served.check()


@pytest.mark.parametrize(
    ("text", "isolation", "said"),
    [
        ("acme", "elastic", "neither"),
        ("acme=x", "elastic", "neither"),
        ("acme=1, acme=2", "elastic", "twice"),
        ("acme=3-2", "elastic", "above the ceiling"),
        ("acme=0", "elastic", "ceiling is 0"),
        ("acme=1-2", "strict", "one number"),
    ],
)
def test_shares_that_make_no_sense_are_refused(text, isolation, said):
    with pytest.raises(ValueError, match=said):
        parse_shares(text, isolation)


def test_shares_are_read():
    assert parse_shares("acme=128, bravo=64-256,", "elastic") == {
        "acme": Share(128, 128),
        "bravo": Share(64, 256),
    }
    assert parse_shares("", "strict") == {}
