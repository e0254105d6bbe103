"""The auditor finds every kind of damage, and a healthy ledger passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.audit import AuditViolation, audit
from copyhold.kvcore.state import LedgerState

Damage = Callable[[LedgerState], None]


def _set(column: str, index: int, value: int, part: str = "pool") -> Damage:
    def damage(state: LedgerState) -> None:
        getattr(getattr(state, part), column).array[index] = value

    return damage


def _free_list(state: LedgerState) -> None:
    state.pool.free.take_one()


def _edge_tokens(state: LedgerState) -> None:
    state.tree.tokens[1] = state.tree.tokens[1] + np.int32(1)


def _edge_blocks(state: LedgerState) -> None:
    state.tree.blocks[1] = np.concatenate([state.tree.blocks[1][:-1], state.tree.blocks[1][:1]])


def _children(state: LedgerState) -> None:
    state.tree.num_children[1] += 1


def _lost_root(state: LedgerState) -> None:
    state.tree.roots.clear()


def _tokens(state: LedgerState) -> None:
    state.requests.tokens[0, 1] += 1


def _revoked(state: LedgerState) -> None:
    state.scopes.revoked[1] = True


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a count too high": (_set("ref", 1, 5), "refcount_mismatch"),
    "a lease nobody holds": (_set("ref", 0, 2), "refcount_mismatch"),
    "a lease that skips the edge's first block": (_set("ref", 1, 2), "lock_mismatch"),
    "a block lost from the free list": (_free_list, "free_queue_mismatch"),
    "an indexed block that is not full": (_set("rows", 0, 3), "identity_on_incomplete_block"),
    "a free block that claims rows": (_set("rows", 15, 3), "slot_lost"),
    "an entry of another prefix": (_set("entry", 0, 77), "identity_conflict"),
    "a foreign owner": (_set("owner", 0, 2), "namespace_mismatch"),
    "other tokens on an edge": (_edge_tokens, "path_slot_mismatch"),
    "a block on two edges": (_edge_blocks, "slot_owned_twice"),
    "a child too many": (_children, "slot_lost"),
    "a root that is gone": (_lost_root, "slot_lost"),
    "a shifted edge": (_set("start", 1, 1, "tree"), "unaligned_boundary"),
    "rows beyond known tokens": (_set("valid_rows", 0, 99, "requests"), "table_length_drift"),
    "rows taken away": (_set("valid_rows", 0, 8, "requests"), "row_not_materialised"),
    "a changed token": (_tokens, "token_mismatch"),
    "a scope marked as revoked": (_revoked, "stale_namespace_generation"),
    "a generation out of nowhere": (_set("generation", 9, 1), "rejected_operation_changed_state"),
    "a slot that is busy and free": (_set("terminal", 5, 1, "requests"), "slot_lost"),
}


@pytest.fixture
def busy(driver: Any) -> Any:
    """Request 0 leases an edge of two blocks (0 and 1) and has a private tail."""
    driver.serve(driver.tokens(1, 8))
    driver.serve([*driver.tokens(1, 8), *driver.tokens(60, 4)])
    driver.prefill(driver.admit(driver.tokens(1, 10)).request, sample=5)
    return driver


def test_a_healthy_ledger_passes(busy: Any) -> None:
    audit(busy.ledger)


@pytest.mark.parametrize("name", sorted(DAMAGES))
def test_damage_is_found(busy: Any, name: str) -> None:
    damage, reason = DAMAGES[name]
    damage(busy.ledger.state)
    with pytest.raises(AuditViolation) as caught:
        audit(busy.ledger)
    assert any(finding.startswith(reason) for finding in caught.value.findings), caught.value.findings
