"""Every policy beside a real ledger: candidates kept from receipts equal a scan, choices equal brute force, all legal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from dry_replica import BLOCK, DryReplica
from hypothesis import example, given, settings
from hypothesis import strategies as st
from local_replica import run_of

from copyhold.actors.cache_settings import LAB_POLICIES, SERVED_POLICIES, CacheSettings
from copyhold.actors.errors import NoRoom
from copyhold.actors.policies import Policy, Worth
from copyhold.kvcore.commands import NodeHandle

A, B, C = run_of(0, 9), run_of(20, 9), run_of(40, 9)
"""Two whole blocks each, and the token that the logits cap leaves to compute."""

LRU = CacheSettings(policy="lru")


def path(served: DryReplica, tokens: Sequence[int]) -> tuple[NodeHandle, ...]:
    """Edges over the whole-block part of ``tokens``."""
    (scope,) = {scope for scope, _, _ in served.ledger.paths("a")} or {None}
    assert scope is not None
    return served.ledger.probe(scope, np.asarray([*tokens, 0], dtype="<i4").tobytes()).path


def evict(served: DryReplica, needed: int, protected: Sequence[NodeHandle] = ()) -> tuple[NodeHandle, ...]:
    """Choose for a newcomer and have the ledger carry it out: an illegal choice is refused there."""
    evictor, free = served.scheduler.evictor, served.ledger.gauge().free
    victims = evictor.choose({"a": free + needed}, frozenset(protected))
    served.scheduler.evict(victims)
    assert served.ledger.gauge().free - free == victims.freed_blocks >= needed
    served.check()
    return victims.nodes


def test_the_least_recently_used_edge_goes_first():
    served = DryReplica(LRU)
    for prompt in (A, B, C, A):
        served.serve(prompt)
    order = [path(served, B), path(served, C), path(served, A)]
    for expected in order:
        assert evict(served, 1) == expected
    with pytest.raises(NoRoom):
        evict(served, 1)


def test_an_edge_is_given_whole_so_more_may_be_freed_than_was_asked():
    served = DryReplica(LRU)
    served.serve(run_of(0, 21))
    free = served.ledger.gauge().free
    evict(served, 2)
    assert served.ledger.gauge().free == free + 5


def test_children_go_before_their_parent_and_the_parent_after_its_last_child():
    served = DryReplica(LRU)
    stem = run_of(0, 8)
    for tail in (run_of(100, 9), run_of(120, 5), run_of(140, 9)):
        served.serve(stem + tail)
    (stem_node,) = path(served, stem)
    assert len(evict(served, 1)) == 1
    assert path(served, stem) == (stem_node,), "the stem outlives one of its three children"
    nodes = evict(served, 5)
    assert nodes[-1] == stem_node
    assert len(nodes) == 3


def test_a_choice_that_is_not_carried_out_changes_nothing():
    served = DryReplica(LRU)
    stem = run_of(0, 8)
    for tail in (run_of(100, 9), run_of(120, 5)):
        served.serve(stem + tail)
    evictor = served.scheduler.evictor
    first = evictor.choose({"a": served.ledger.gauge().free + 5})
    for _ in range(3):
        assert evictor.choose({"a": served.ledger.gauge().free + 5}).nodes == first.nodes
    with pytest.raises(NoRoom):
        evictor.choose({"a": 1000})
    served.check()
    assert evict(served, 5) == first.nodes


def test_a_protected_path_is_never_chosen_even_when_nothing_else_is_left():
    served = DryReplica(LRU)
    stem = run_of(0, 8)
    for tail in (run_of(100, 9), run_of(120, 9)):
        served.serve(stem + tail)
    kept = path(served, stem + run_of(100, 8))
    assert not set(evict(served, 2, kept)) & set(kept)
    with pytest.raises(NoRoom):
        evict(served, 1, kept)
    assert path(served, stem + run_of(100, 8)) == kept


def test_what_a_running_request_leases_is_never_chosen_and_is_a_candidate_again_after_it():
    served = DryReplica(LRU)
    stem = run_of(0, 8)
    served.serve(stem + run_of(100, 9))
    running = served.submit(stem + run_of(120, 9), max_new=30)
    served.step()
    evict(served, 2)
    with pytest.raises(NoRoom):
        evict(served, 1)
    assert running.entry is not None
    served.scheduler.cancel(running.entry)
    served.run()
    evict(served, 4)
    assert served.ledger.gauge().evictable == 0


def test_a_lookup_refreshes_the_whole_path_and_one_without_the_right_none():
    """K124 and K197: the declared rule is that every edge of a hit path is used, the root's own included."""
    served = DryReplica(LRU)
    for prompt in (A, B):
        served.serve(prompt)
    served.serve(A, publish=False)
    expected = path(served, B)
    assert evict(served, 1) == expected
    assert path(served, A), "the prompt that was looked up last stays"


@pytest.mark.parametrize(("recency", "last"), [("path", "stem"), ("edge", "other")])
def test_whether_hits_below_a_shared_root_keep_it_is_the_declared_rule(recency, last):
    """K197: one history under both rules; two leaves of a stem are hit three times each, something else four times."""
    served = DryReplica(CacheSettings(policy="lfu", recency=recency))
    stem, other = run_of(0, 8), run_of(60, 9)
    leaves = [[*stem, *run_of(at, 9)] for at in (100, 120)]
    for prompt, hits in ((leaves[0], 3), (leaves[1], 3), (other, 4)):
        served.serve(prompt)
        for _ in range(hits):
            served.serve(prompt, publish=False)
    first, second = path(served, leaves[0]), path(served, leaves[1])
    edges = {"stem": path(served, stem), "other": path(served, other)}
    gone = [evict(served, 1) for _ in range(4)]
    assert set(gone[:2]) == {path_of[-1:] for path_of in (first, second)}
    assert gone[3] == edges[last]


requests = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.integers(0, 2),
        st.integers(0, 20),
        st.integers(0, 3),
        st.integers(1, 12),
        st.integers(1, 6),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=25,
)


AFTER_SPLITS = [
    *[("a", 0, 0, 0, 1, 1, 0)] * 6,
    ("a", 0, 0, 0, 1, 4, 0),
    ("a", 0, 0, 0, 5, 4, 0),
    ("a", 0, 4, 0, 1, 4, 0),
    ("a", 0, 4, 0, 1, 1, 0),
]
"""A split changes the block by which the lower edge is judged; once a worse victim was chosen after one."""


@pytest.mark.parametrize("policy", sorted(SERVED_POLICIES))
@settings(max_examples=10, deadline=None)
@given(history=requests)
@example(history=AFTER_SPLITS)
def test_candidates_are_those_of_a_scan_and_choices_those_of_brute_force(policy, history):
    served = DryReplica(CacheSettings(policy=policy), num_blocks=24, max_requests=3)
    for namespace, stem, shared, own, private, max_new, steps in history:
        prompt = run_of(300 * stem, shared) + run_of(2000 + 100 * own, private)
        served.submit(prompt, namespace, max_new=max_new)
        for _ in range(steps):
            served.step()
            served.check_books()
    served.run()
    served.check()
    evictor, someone = served.scheduler.evictor, history[0][0]
    while served.ledger.gauge().evictable:
        expected = least_worth(served)
        victims = evictor.choose({someone: served.ledger.gauge().free + 1})
        view = served.ledger.node(victims.nodes[0])
        assert evictor.worth_of(view.scope.namespace, int(view.blocks[0])) == expected
        served.scheduler.evict(victims)
        served.check_books()


def least_worth(served: DryReplica) -> Worth:
    """By a scan: the least worth at the ends of every lane, over all leaves; tenants that only the pool bounds share lanes."""
    evictor = served.scheduler.evictor
    lanes: dict[tuple[str, int], list[tuple[float, Worth]]] = {}
    for leaf in served.ledger.evictable_leaves():
        name, unit = served.ledger.node(leaf.handle).scope.namespace, int(leaf.blocks[0])
        policy: Policy = evictor.policy_of(name)
        queue = "" if evictor._shares.is_open(name) else name
        lane = lanes.setdefault((queue, policy.lane(unit)), [])
        lane.append((policy.key(unit), evictor.worth_of(name, unit)))
    ends = [end for lane in lanes.values() for end in (min(lane), max(lane))]
    return min(worth for _, worth in ends)


@pytest.mark.parametrize("policy", sorted(SERVED_POLICIES))
def test_the_same_history_chooses_the_same_edges_in_the_same_order(policy):
    def digest() -> bytes:
        draw = np.random.default_rng(5)
        served = DryReplica(CacheSettings(policy=policy), num_blocks=24)
        for _ in range(60):
            stem = run_of(int(draw.integers(3)) * 50, BLOCK * int(draw.integers(1, 4)))
            served.serve(stem + run_of(200 + 30 * int(draw.integers(4)), int(draw.integers(1, 9))))
        return served.ledger.machine_digest

    assert digest() == digest()


@pytest.mark.parametrize("policy", sorted(LAB_POLICIES))
def test_every_policy_is_interchangeable_over_the_same_safety_checker(policy):
    """K122: the ledger carries out whatever any of them names, so no victim was illegal."""
    draw = np.random.default_rng(1)
    served = DryReplica(CacheSettings(policy=policy), num_blocks=20, max_requests=2)
    for _ in range(80):
        served.submit(run_of(100 * int(draw.integers(4)), int(draw.integers(1, 40))), max_new=3)
        served.step()
    served.run()
    served.check()
    assert served.scheduler.cache_report().evicted_blocks > 0
