"""PublishTail and hits of partial tails: the rows after a request's last whole page, as an immutable entry of the index.

Invariant: a tail is entered once, with the rows that are valid then; nothing is appended under it. It is hit as a whole and only
where every one of its rows is the prompt's, by an admission that asks for its policy; policy 0 is "full blocks only" and finds
none. A lookup changes no table: the admitted request shares the block, and its first own row asks for a copy in its Dispatch's
receipt. A running request's table stays as it is. One cache group of full attention only.
Source: LEDGER "Commands", "Prefix tree over cache groups"; contracts K099, K103, K104; fact F064.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from . import loops
from .commands import PublishTail
from .digest import Array, mix_words
from .errors import MalformedCommand, RequestInFlight, TailsNeedOneFullGroup
from .publication import lease_path, publish_request
from .receipts import PrefixMatch
from .state import LedgerState, node_handles
from .tail_table import TAILS_PER_NODE

FULL_BLOCKS_ONLY = 0
_LARGEST_POLICY = (1 << 31) - 1


class TailPlan(msgspec.Struct, frozen=True):
    """The slot whose tail is published, and under which policy."""

    slot: int
    policy: int


def require_tails(state: LedgerState, policy: int) -> None:
    """Raises: MalformedCommand, TailsNeedOneFullGroup for a policy with tails in a ledger that has none; nothing changes."""
    if not 0 <= policy <= _LARGEST_POLICY:
        raise MalformedCommand("tail_policy", str(policy))
    if policy and (len(state.pools) > 1 or state.windowed):
        raise TailsNeedOneFullGroup(len(state.pools), len(state.windowed))


def extend_by_tail(
    state: LedgerState, match: PrefixMatch, node: int, last_pages: int, tokens: Array, policy: int
) -> tuple[PrefixMatch, int]:
    """A match of whole pages with the longest tail behind it, capped like the match, and that tail; 0 for none."""
    tree, first = state.tree, match.runtime
    if last_pages != tree.pages.array.item(node):
        return match, 0
    tail = tree.tails.longest(node, policy, tokens[first:])
    whole = first + (tree.tails.rows.array.item(tail) if tail else 0)
    length = min(whole, match.cap)
    if length <= first:
        return match, 0
    limit, reason = ("cap", "logits_cap") if length < whole else ("tail", "tail_ends")
    longer = msgspec.structs.replace(
        match,
        semantic=max(match.semantic, whole),
        indexed=max(match.indexed, whole),
        junction=max(match.junction, whole),
        runtime=length,
        recompute=match.prompt - length,
        limit=limit,
        reason=reason,
        tail=length - first,
    )
    return longer, tail


def tail_entry(state: LedgerState, scope_id: int, node: int, tokens: Array, policy: int) -> Array:
    """The nonzero fingerprint uint64 [1] of a tail: scope, all tokens before, its own, their number and the policy."""
    tree = state.tree
    first, scope_print = tree.end_page(node) * state.alignment, state.scopes.scope_print.array[scope_id]
    entries, _ = tree.prefix_entries(scope_print, tokens, first, tree.end_sum[node], len(tokens))
    return mix_words(entries ^ np.uint64(policy << 32 | len(tokens))) | np.uint64(1)


def plan_publish_tail(state: LedgerState, command: PublishTail) -> TailPlan:
    """Raises: MalformedCommand, TailsNeedOneFullGroup, StaleRequestGeneration, StaleNamespaceGeneration,
    RequestInFlight; nothing changes."""
    requests = state.requests
    if command.policy == FULL_BLOCKS_ONLY:
        raise MalformedCommand("policy", "0 is full blocks only")
    require_tails(state, command.policy)
    slot = requests.slot_of(command.request)
    state.scopes.require_current(state.scopes.scope(int(requests.scope.array[slot])))
    if requests.flight_step.array[slot]:
        raise RequestInFlight(slot)
    return TailPlan(slot, command.policy)


def commit_publish_tail(state: LedgerState, plan: TailPlan) -> dict[str, Any]:
    """Publishes the request's whole pages, then the rows behind them; the receipt's fields."""
    requests, tree, slot = state.requests, state.tree, plan.slot
    entry = publish_request(state, slot)
    full, rows = divmod(requests.valid_rows.array.item(slot), state.alignment)
    if not full or not rows:
        return {"entry": entry, "rows": rows, "outcome": "no_rows" if full else "no_whole_page", "tail": ()}
    node = lease_path(state, slot, full)
    if node != (entry.path[-1].node if entry.path else 0):
        entry = msgspec.structs.replace(entry, path=node_handles(tree, tree.path(node)))
    first = full * state.alignment
    tokens = requests.tokens[slot, first : first + rows].copy()
    block = int(requests.all_tables[0][slot, full])
    outcome, tail = "entered", tree.tails.same(node, plan.policy, tokens)
    if tail:
        outcome = "present"
    elif state.pool.node.array[block]:
        outcome = "block_has_a_tail"
    elif len(tree.tails.at(node)) >= TAILS_PER_NODE:
        outcome = "node_full"
    else:
        tail = tree.tails.add(node, plan.policy, tokens, block)
        scope_id = int(requests.records.cells[slot, loops.SCOPE])
        state.pool.index(
            np.array([block], dtype=np.int64), -tail, tail_entry(state, scope_id, node, tokens, plan.policy)
        )
    named = (tree.tails.handle(tail),) if tail else ()
    return {"entry": entry, "rows": rows, "outcome": outcome, "tail": named}
