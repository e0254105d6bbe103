"""AdvanceGeneration: a namespace's floor rises, what lies below it leaves the index at once and drains.

Invariant: no root below a floor exists; unreferenced blocks of revoked scopes are free and scrubbed,
referenced ones stay with their running requests and are scrubbed when released. No byte of a revoked scope
stays in a free block.
Source: SECURITY "Revocation" steps 3 to 5; contracts K011, K181, K182.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .commands import AdvanceGeneration
from .digest import Array
from .errors import MalformedCommand, NamespaceGenerationMismatch
from .pool import BlockPool
from .state import LedgerState, require_counter, scrub_ids


def plan_advance(state: LedgerState, command: AdvanceGeneration) -> AdvanceGeneration:
    """Raises: MalformedCommand, NamespaceGenerationMismatch when the floor would not rise; nothing changes."""
    if not command.namespace:
        raise MalformedCommand("namespace", "empty")
    require_counter("generation", command.generation)
    floor = state.scopes.floor_of(command.namespace)
    if command.generation <= floor:
        raise NamespaceGenerationMismatch(command.namespace, command.generation, floor)
    return command


def commit_advance(state: LedgerState, command: AdvanceGeneration) -> dict[str, Any]:
    """Drops roots, frees and scrubs what nobody references; the receipt's fields."""
    tree, requests = state.tree, state.requests
    scopes = state.scopes.raise_floor(command.namespace, command.generation)
    active = requests.active.array == 1
    affected = np.flatnonzero(np.isin(requests.scope.array, scopes) & active)
    groups = range(len(state.pools))
    private = [state.private_leases(int(slot), group) for group in groups for slot in affected]
    requests.terminal.write(affected, 0)
    rooted = [int(scope_id) for scope_id in scopes if int(scope_id) in tree.roots]
    dropped = [tree.drop_root(scope_id) for scope_id in rooted]
    freed = draining = 0
    scrub: list[Array] = []
    for group, pool in enumerate(state.pools):
        leases = private[group * len(affected) : (group + 1) * len(affected)]
        more, zeroed = _drain(state, pool, [blocks[group] for blocks in dropped], leases)
        freed += more
        scrub.append(zeroed)
        held = pool.ref.array > 0
        draining += int(np.count_nonzero(held & np.isin(pool.owner.array, scopes)))
    first_scrub, other_scrub = scrub_ids(tuple(scrub))
    return {
        "namespace": command.namespace,
        "generation": command.generation,
        "roots_dropped": len(rooted),
        "freed_blocks": freed,
        "draining_blocks": draining,
        "scrub": first_scrub,
        "scrub_others": other_scrub,
    }


def _drain(
    state: LedgerState, pool: BlockPool, dropped: list[Array], leases: list[Array]
) -> tuple[int, Array]:
    """Unlists dropped blocks, frees those nobody references, drops leases on the rest; (freed, blocks to scrub)."""
    revoked = state.scopes.revoked
    freed = 0
    scrub: list[Array] = []
    for blocks in dropped:
        pool.unindex(blocks)
        idle = blocks[pool.ref.array[blocks] == 0]
        scrub.append(pool.give_back(idle, revoked))
        freed += len(idle)
    for blocks in leases:
        more, _, zeroed = pool.drop(blocks, revoked)
        scrub.append(zeroed)
        freed += more
    unreferenced = np.flatnonzero((pool.ref.array == 0) & (pool.owner.array != 0))
    scrub.append(pool.scrub_revoked(unreferenced, revoked))
    return freed, np.concatenate(scrub)
