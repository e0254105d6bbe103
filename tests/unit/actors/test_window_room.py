"""A scheduler over a ledger with a sliding window: room is made from what no boundary needs, hits at boundaries stay."""

from __future__ import annotations

import random

import pytest
from dry_replica import DryReplica
from local_replica import run_of

from copyhold.actors.cache_settings import CacheSettings
from copyhold.actors.shares import ShareSettings
from copyhold.kvcore.commands import GroupSpec

LRU = CacheSettings(policy="lru")
SLIDING = GroupSpec("sliding", 4, 24, 8)


def served_with(**options: int) -> DryReplica:
    return DryReplica(LRU, windows=(SLIDING,), **options)


def test_window_blocks_outside_every_boundary_go_before_any_edge() -> None:
    served = served_with(num_blocks=200)
    for first in (0, 100, 200):
        served.serve(run_of(first, 33), max_new=2)
        served.check()
    assert len(served.ledger.evictable_leaves()) == 3, "24 window blocks held three prompts of eight blocks"
    served.serve(run_of(300, 33), max_new=2)
    served.check()
    assert len(served.ledger.evictable_leaves()) == 4
    again = [served.serve(run_of(first, 33)).cached_tokens for first in (0, 100, 200, 300)]
    assert again == [32, 32, 32, 32]


def test_edges_go_before_the_windows_of_those_that_stay() -> None:
    served = served_with(num_blocks=200)
    for first in range(0, 1600, 100):
        served.serve(run_of(first, 17))
        served.check()
    assert served.serve(run_of(1500, 17)).cached_tokens == 16
    assert served.serve(run_of(0, 17)).cached_tokens == 0


def test_strict_isolation_refuses_windows_that_no_share_counts() -> None:
    with pytest.raises(ValueError, match="strictly isolated"):
        DryReplica(CacheSettings(policy="lru", shares=ShareSettings("strict", 8)), windows=(SLIDING,))


def test_random_traffic_ends_and_the_books_agree() -> None:
    rng = random.Random(3)
    served = DryReplica(LRU, num_blocks=60, max_requests=4, chunk_tokens=16, windows=(SLIDING,))
    stems = [run_of(first, 60) for first in (0, 100, 200)]
    streams = []
    for _ in range(60):
        tokens = [*rng.choice(stems)[: rng.randrange(1, 60)], *run_of(rng.randrange(900), rng.randrange(4))]
        streams.append(served.submit(tokens, rng.choice("ab"), max_new=rng.randrange(1, 12)))
        for _ in range(rng.randrange(4)):
            served.step()
        served.check()
    served.run()
    served.check()
    assert all(stream.ended and not stream.failure for stream in streams)
    assert served.ledger.gauge(1).evictable + served.ledger.gauge(1).free == SLIDING.num_blocks
