"""Several cache groups behind one scheduler and on one rank: what must hold of their sizes, checked when a log begins.

Owns two rules. A rank computes groups of full attention only, each in a pool of its own with the ledger's block size. The
scheduler's policies count blocks of group 0, so every other group of full attention must have room whenever group 0 has;
where that cannot be shown from the sizes, the log is refused before its first record. Windows have a policy of their own.

Why the bound holds: requests between steps and edges of the index hold rows, and both hold the same rows in every group. A
request or an edge with n blocks of group 0 holds at most n * b0 rows; edges end at multiples of every block size, so only
the last block of each request can be partly used. Requests are not forked by the scheduler; whoever forks counts for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TYPE_CHECKING

from copyhold.kvcore.commands import Command, Genesis, GroupSpec

from .errors import CacheGroupsUnfit

if TYPE_CHECKING:
    from copyhold.kernels.cache_pools import CachePools


def blocks_for_all(first: GroupSpec, block_size: int, max_requests: int) -> int:
    """Blocks of another size that hold whatever the blocks of ``first`` can hold, of so many requests at once."""
    rows = first.num_blocks * first.block_size
    partly_used = max_requests * (block_size - gcd(first.block_size, block_size))
    return (rows + partly_used) // block_size


def require_room(genesis: Genesis) -> None:
    """Raises: ``CacheGroupsUnfit`` for a group of full attention that could be full before group 0 is."""
    first, *others = genesis.groups
    if first.window:
        raise CacheGroupsUnfit(first.name, "the scheduler counts blocks of group 0, which has a window")
    for group in others:
        if group.window:
            continue
        needed = blocks_for_all(first, group.block_size, genesis.max_requests)
        if group.num_blocks < needed:
            raise CacheGroupsUnfit(
                group.name,
                f"{group.num_blocks} blocks of {group.block_size} can be full before the {first.num_blocks} of "
                f"{first.name} are; {needed} cannot",
            )


def require_pools(commands: Sequence[Command], pools: CachePools) -> None:
    """The log's first record fits a rank's pools. Raises: ``CacheGroupsUnfit``; nothing was applied."""
    if not commands or not isinstance(commands[0], Genesis):
        return
    groups = commands[0].groups
    if len(groups) != len(pools):
        raise CacheGroupsUnfit(groups[0].name, f"{len(groups)} groups for a rank with {len(pools)} pools")
    for group, pool in zip(groups, pools.pools, strict=True):
        if group.window:
            raise CacheGroupsUnfit(group.name, "no layer here attends through a window")
        if group.block_size != pool.block_size or group.num_blocks > pool.num_blocks:
            raise CacheGroupsUnfit(
                group.name,
                f"{group.num_blocks} blocks of {group.block_size} in a pool of {pool.num_blocks} of {pool.block_size}",
            )
