"""LRU eviction beside a real ledger: the order, the protected path, parents after their last child; always legal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from local_replica import run_of

from copyhold.actors.eviction import LruEviction
from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Admit,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    GroupSpec,
    NodeHandle,
    Publish,
    Release,
    RequestHandle,
    RowSpan,
    Scope,
)
from copyhold.kvcore.ledger import Ledger

PAGE, WORLD = 4, b"w" * 32
SCOPE = Scope("a", 1, WORLD)


class Cache:
    """A ledger whose prompts are run and published at once, with the policy told as the scheduler tells it."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.ledger = Ledger()
        self.ledger.apply(Genesis(WORLD, (GroupSpec("full", PAGE, num_blocks),), 8, 256, "pool"))
        self.policy = LruEviction(num_blocks)
        self._number = 0

    def start(self, tokens: Sequence[int]) -> RequestHandle:
        self._number += 1
        content = np.asarray(tokens, dtype="<i4").tobytes()
        receipt = self.ledger.apply(Admit(self._number, SCOPE, content))
        handle, cached = receipt.request, receipt.match.runtime
        self.policy.touch(self.ledger.tables[handle.slot, : self.ledger.num_blocks[handle.slot]])
        self.ledger.apply(Dispatch(self._number, (RowSpan(handle, cached, len(tokens) - cached),)))
        self.ledger.apply(Complete(self._number))
        self.ledger.apply(Publish((handle,)))
        return handle

    def run(self, tokens: Sequence[int]) -> None:
        self.ledger.apply(Release(self.start(tokens), "finish"))

    def path(self, tokens: Sequence[int]) -> tuple[NodeHandle, ...]:
        """Edges over the whole-block part of ``tokens``."""
        return self.ledger.probe(SCOPE, np.asarray([*tokens, 0], dtype="<i4").tobytes()).path

    def evict(self, needed: int, protected: Sequence[NodeHandle] = ()) -> tuple[tuple[NodeHandle, ...], int]:
        """Choose, and have the ledger carry it out: an illegal choice is refused there."""
        victims = self.policy.choose(self.ledger, needed, frozenset(protected))
        before = self.ledger.gauge().free
        if victims.nodes:
            self.ledger.apply(Evict(victims.nodes))
        assert self.ledger.gauge().free - before == victims.freed_blocks
        audit(self.ledger)
        return victims.nodes, victims.freed_blocks


A, B, C = run_of(0, 9), run_of(20, 9), run_of(40, 9)
"""Two whole blocks each, and the token that the logits cap leaves to compute."""


def test_the_least_recently_used_edge_goes_first():
    cache = Cache()
    for prompt in (A, B, C, A):
        cache.run(prompt)
    order = [cache.path(B), cache.path(C), cache.path(A)]
    for expected in order:
        nodes, freed = cache.evict(1)
        assert nodes == expected
        assert freed == 2
    assert cache.evict(1) == ((), 0)


def test_an_edge_is_given_whole_so_more_may_be_freed_than_was_asked():
    cache = Cache()
    cache.run(run_of(0, 20))
    assert cache.evict(2)[1] == 5


def test_nothing_is_chosen_when_nothing_is_needed():
    cache = Cache()
    cache.run(A)
    assert cache.evict(0) == ((), 0)


def test_children_go_before_their_parent_and_the_parent_after_its_last_child():
    cache = Cache()
    stem = run_of(0, 8)
    for tail in (run_of(100, 8), run_of(120, 4), run_of(140, 8)):
        cache.run(stem + tail)
    stem_node = cache.path(stem)[0]
    assert len(cache.evict(1)[0]) == 1
    assert cache.path(stem) == (stem_node,), "the stem outlives one of its three children"
    nodes, freed = cache.evict(5)
    assert freed == 5
    assert nodes[-1] == stem_node
    assert len(nodes) == 3


def test_a_parent_is_as_recent_as_its_own_blocks_not_as_its_gone_children():
    cache = Cache()
    stem = run_of(0, 8)
    for prompt in (stem + run_of(100, 8), stem + run_of(120, 8), C):
        cache.run(prompt)
    (stem_node,) = cache.path(stem)
    nodes, freed = cache.evict(6)
    assert freed == 6
    assert nodes[-1] == stem_node
    assert len(cache.path(C)) == 1, "the newer prompt stayed while the older stem went"


def test_a_protected_path_is_never_chosen_even_when_nothing_else_is_left():
    cache = Cache()
    stem = run_of(0, 8)
    cache.run(stem + run_of(100, 8))
    cache.run(stem + run_of(120, 8))
    kept = cache.path(stem + run_of(100, 8))
    nodes, freed = cache.evict(50, kept)
    assert freed == 2
    assert not set(nodes) & set(kept)
    assert cache.path(stem + run_of(100, 8)) == kept


def test_what_a_running_request_leases_is_never_chosen():
    cache = Cache()
    stem = run_of(0, 8)
    cache.run(stem + run_of(100, 8))
    held = cache.start(stem + run_of(120, 8))
    _, freed = cache.evict(50)
    assert freed == 2
    assert len(cache.path(stem)) == 1
    cache.ledger.apply(Release(held, "finish"))
    assert cache.evict(50)[1] == 4


@pytest.mark.parametrize("seed", range(4))
def test_the_same_history_chooses_the_same_edges_in_the_same_order(seed: int):
    def history() -> list[tuple[NodeHandle, ...]]:
        draw = np.random.default_rng(seed)
        cache, chosen = Cache(), []
        for _ in range(25):
            stem = run_of(int(draw.integers(3)) * 50, 4 * int(draw.integers(1, 4)))
            prompt = stem + run_of(200 + int(draw.integers(4)), int(draw.integers(1, 9)))
            needed = -(-len(prompt) // PAGE) + 2 - cache.ledger.gauge().free
            chosen.append(cache.evict(max(needed, int(draw.integers(3)) - 1))[0])
            cache.run(prompt)
        return chosen

    assert history() == history()
