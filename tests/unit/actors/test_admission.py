"""When a prefix is published at all, and that nothing is evicted before somebody needs the room."""

from __future__ import annotations

import pytest
from dry_replica import DryReplica
from local_replica import run_of

from copyhold.actors.cache_settings import SERVED_POLICIES, CacheSettings
from copyhold.actors.eviction import EvictionReport

ROOMY, FULL = 64, 22
"""Blocks of a pool that holds everything, and of one that has room for the hot prompts and one request that runs."""
HOT = [run_of(100 * number, 29) for number in range(2)]
"""Two prompts of seven whole blocks each."""


def warmed(policy: str, rounds: int, num_blocks: int) -> DryReplica:
    served = DryReplica(CacheSettings(policy=policy), num_blocks=num_blocks)
    for _ in range(rounds):
        for prompt in HOT:
            served.serve(prompt, max_new=1)
    return served


@pytest.mark.parametrize("policy", sorted(SERVED_POLICIES))
def test_nothing_is_evicted_while_there_is_room(policy):
    """K194: memory that nobody needs costs nothing."""
    served = warmed(policy, 6, ROOMY)
    report = served.scheduler.cache_report()
    assert (report.evicted_blocks, report.refused_blocks) == (0, 0)
    assert served.ledger.gauge().evictable == 14


def test_the_report_of_a_cache_is_more_than_a_hit_rate():
    """K199: tokens saved, blocks held, thrown away and refused; a new figure is added here by name."""
    assert EvictionReport.__struct_fields__ == (
        "cached_tokens",
        "prompt_tokens",
        "published_blocks",
        "refused_blocks",
        "evicted_blocks",
        "evicted_unused_blocks",
        "expired_blocks",
        "pinned_blocks",
    )


def test_a_newcomer_that_would_be_the_next_victim_is_not_published():
    """K196: in a full pool of better entries nothing that was never hit is evicted, because it never got in."""
    served = warmed("cost", 12, FULL)
    for number in range(12):
        served.serve(run_of(5000 + 100 * number, 28), max_new=1)
    report = served.scheduler.cache_report()
    assert report.refused_blocks == 12 * 7
    assert report.evicted_blocks == 0
    assert [served.serve(prompt).cached_tokens for prompt in HOT] == [28, 28]
    served.check()


def test_the_same_prefix_is_published_where_there_is_room_and_refused_where_there_is_none():
    """K198: what an entry is worth depends on what is scarce when it is asked."""
    newcomer = run_of(5000, 28)
    free = DryReplica(CacheSettings(), num_blocks=ROOMY)
    free.serve(newcomer, max_new=1)
    assert free.serve(newcomer, max_new=1).cached_tokens == 24
    full = warmed("cost", 12, FULL)
    full.serve(newcomer, max_new=1)
    assert full.serve(newcomer, max_new=1).cached_tokens == 0
