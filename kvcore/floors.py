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
from .errors import MalformedCommand, NamespaceGenerationMismatch
from .state import LedgerState, block_ids, require_counter


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
    pool, tree, requests = state.pool, state.tree, state.requests
    scopes = state.scopes.raise_floor(command.namespace, command.generation)
    revoked = state.scopes.revoked
    affected = np.flatnonzero(np.isin(requests.scope.array, scopes) & (requests.active.array == 1))
    private = [state.private_leases(int(slot)) for slot in affected]
    requests.terminal.write(affected, 0)
    rooted = [int(scope_id) for scope_id in scopes if int(scope_id) in tree.roots]
    freed = 0
    scrub = []
    for scope_id in rooted:
        blocks = tree.drop_root(scope_id)
        idle = blocks[pool.ref.array[blocks] == 0]
        scrub.append(pool.give_back(idle, revoked))
        freed += len(idle)
    for blocks in private:
        dropped, _, zeroed = pool.drop(blocks, revoked)
        scrub.append(zeroed)
        freed += dropped
    unreferenced = np.flatnonzero((pool.ref.array == 0) & (pool.owner.array != 0))
    scrub.append(pool.scrub_revoked(unreferenced, revoked))
    draining = np.count_nonzero((pool.ref.array > 0) & np.isin(pool.owner.array, scopes))
    return {
        "namespace": command.namespace,
        "generation": command.generation,
        "roots_dropped": len(rooted),
        "freed_blocks": freed,
        "draining_blocks": int(draining),
        "scrub": block_ids(np.concatenate(scrub)),
    }
