"""The audit of partial tails: each hangs at a node of the tree, over one block that holds its rows and is named by them.

Invariant: reads only. Source: contracts K103, K104.
"""

from __future__ import annotations

import numpy as np

from .state import LedgerState
from .tail_table import TAILS_PER_NODE
from .tails import tail_entry


def tail_findings(state: LedgerState) -> list[str]:
    """Everything wrong with the tails."""
    tree, tails, pool = state.tree, state.tree.tails, state.pool
    findings: list[str] = []
    used = np.flatnonzero(tails.node.array).tolist()
    hung = sorted(tail for node in tails.by_node for tail in tails.by_node[node])
    if not used == hung == sorted(tails.tokens):
        return [f"slot_lost: tails {used} in records, {hung} at nodes"]
    for node in tails.by_node:
        identities = {(tails.policy.array.item(t), tails.tokens[t].tobytes()) for t in tails.at(node)}
        if len(identities) != len(tails.at(node)) or len(identities) > TAILS_PER_NODE:
            findings.append(f"identity_conflict: node {node} has {len(tails.at(node))} tails")
    for tail in used:
        node, block, own = tails.node.array.item(tail), tails.block_of(tail), tails.tokens[tail]
        rows = tails.rows.array.item(tail)
        if node not in tails.by_node or tail not in tails.by_node[node] or not tree.pages.array.item(node):
            findings.append(f"path_slot_mismatch: tail {tail} hangs nowhere")
            continue
        if not 0 < rows == len(own) < state.block_size or tails.policy.array.item(tail) <= 0:
            findings.append(f"tail_identity_without_length: tail {tail} of {rows} rows, {len(own)} tokens")
        if pool.rows.array.item(block) < rows or pool.node.array.item(block) != -tail:
            findings.append(f"row_not_materialised: tail {tail} claims {rows} rows of block {block}")
        scope_id = tree.scope.array.item(node)
        if pool.owner.array.item(block) != scope_id:
            findings.append(f"namespace_mismatch: tail {tail} holds a block another scope wrote")
        if (
            tail_entry(state, scope_id, node, own, tails.policy.array.item(tail))[0]
            != pool.entry.array[block]
        ):
            findings.append(f"identity_conflict: tail {tail} has the entry of another prefix")
    return findings
