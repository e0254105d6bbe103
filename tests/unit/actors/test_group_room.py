"""Several cache groups: the scheduler's bound holds under traffic, and sizes for which it would not are refused by name."""

from __future__ import annotations

import random

import pytest
from dry_replica import BLOCK, WORLD, DryReplica
from local_replica import run_of

from copyhold.actors.cache_settings import CacheSettings
from copyhold.actors.errors import CacheGroupsUnfit
from copyhold.actors.group_room import blocks_for_all, require_pools, require_room
from copyhold.kernels.cache_pools import CachePools, as_pools
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.commands import AdvanceGeneration, Genesis, GroupSpec

LRU = CacheSettings(policy="lru")


def genesis(*groups: GroupSpec, max_requests: int = 4) -> Genesis:
    return Genesis(WORLD, groups, max_requests, 512, "one")


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (16, 20),  # the same blocks
        (32, 12),  # half of them, and half a block for each of four requests
        (8, 40),
        (48, 9),
        (24, 16),  # 320 rows, and 16 more for each request
    ],
)
def test_the_bound_is_the_rows_of_the_first_group_and_one_part_used_block_a_request(
    size: int, blocks: int
) -> None:
    assert blocks_for_all(GroupSpec("full", 16, 20), size, 4) == blocks


def test_a_group_that_could_be_full_first_is_refused() -> None:
    first = GroupSpec("full", 16, 20)
    require_room(genesis(first, GroupSpec("coarse", 32, 12), GroupSpec("sliding", 16, 3, 8)))
    with pytest.raises(CacheGroupsUnfit) as refused:
        require_room(genesis(first, GroupSpec("coarse", 32, 11)))
    assert refused.value.group == "coarse" and refused.value.kind == "unsupported_cache_groups"
    with pytest.raises(CacheGroupsUnfit, match="window"):
        require_room(genesis(GroupSpec("sliding", 16, 20, 8), first))
    with pytest.raises(CacheGroupsUnfit):
        DryReplica(LRU, num_blocks=32, windows=(GroupSpec("coarse", 2 * BLOCK, 15),))


@pytest.mark.parametrize("size", [2 * BLOCK, BLOCK // 2, 6])
def test_random_traffic_never_finds_a_further_group_full(size: int) -> None:
    rng = random.Random(size)
    first = GroupSpec("full", BLOCK, 60)
    coarse = GroupSpec("coarse", size, blocks_for_all(first, size, 4))
    served = DryReplica(LRU, num_blocks=60, max_requests=4, chunk_tokens=16, windows=(coarse,))
    stems = [run_of(number, 60) for number in (0, 100, 200)]
    streams, fullest, before = [], 0, served.scheduler.preemptions
    for _ in range(60):
        tokens = [*rng.choice(stems)[: rng.randrange(1, 60)], *run_of(rng.randrange(900), rng.randrange(4))]
        streams.append(served.submit(tokens, rng.choice("ab"), max_new=rng.randrange(1, 12)))
        for _ in range(rng.randrange(4)):
            served.step()
            fullest = max(fullest, coarse.num_blocks - served.ledger.gauge(1).free)
        served.check()
    served.run()
    served.check()
    assert all(stream.ended and not stream.failure for stream in streams)
    assert served.scheduler.evictor.report().evicted_blocks > 0, "memory was short"
    assert served.scheduler.preemptions >= before
    assert coarse.num_blocks // 2 < fullest <= coarse.num_blocks


def test_a_page_of_the_index_is_whole_in_every_group() -> None:
    """Blocks of 4 and 6 tokens: 12 of them at a time are found again."""
    served = DryReplica(LRU, num_blocks=60, windows=(GroupSpec("other", 6, 60),))
    served.serve(run_of(0, 47))
    assert served.serve(run_of(0, 47)).cached_tokens == 36
    assert served.serve(run_of(0, 30)).cached_tokens == 24
    served.check()


def pools() -> CachePools:
    return CachePools((KVPool(1, 20, 1, 16), KVPool(1, 12, 1, 16, 32)), [(0,), (1,)])


@pytest.mark.parametrize(
    "second",
    [
        GroupSpec("coarse", 16, 12),
        GroupSpec("coarse", 32, 13),
        GroupSpec("coarse", 32, 12, 8),
    ],
)
def test_a_rank_refuses_a_log_whose_groups_are_not_those_of_its_pools(second: GroupSpec) -> None:
    first = GroupSpec("full", 16, 20)
    require_pools([genesis(first, GroupSpec("coarse", 32, 12))], pools())
    with pytest.raises(CacheGroupsUnfit):
        require_pools([genesis(first, second)], pools())
    with pytest.raises(CacheGroupsUnfit, match="2 groups for a rank with 1"):
        require_pools([genesis(first, second)], as_pools(KVPool(1, 20, 1, 16)))
    require_pools([AdvanceGeneration("a", 2)], pools())
