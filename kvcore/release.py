"""Release: every reference of a request is dropped exactly once, now or at the Complete of its step.

Invariant: indexed blocks become evictable and keep their identity, others become free under a new generation;
those of a revoked scope are listed for scrubbing. A second release changes nothing and says so.
Source: LEDGER "In flight"; contracts K059, K060, K070, K211.
"""

from __future__ import annotations

from typing import Any

from .commands import Release
from .errors import DoubleRelease, ReleaseReasonMissing, StaleRequestGeneration
from .receipts import ReleaseFacts
from .requests import RELEASE_REASONS
from .state import LedgerState, scrub_ids


def plan_release(state: LedgerState, command: Release) -> tuple[int, str]:
    """(slot, reason). Raises: ReleaseReasonMissing, DoubleRelease, StaleRequestGeneration; nothing changes."""
    requests, handle = state.requests, command.request
    if command.reason not in RELEASE_REASONS:
        raise ReleaseReasonMissing(command.reason)
    slot = handle.slot
    if not 0 <= slot < requests.max_requests or handle.generation < 1:
        raise StaleRequestGeneration(slot, handle.generation)
    if int(requests.generation.array[slot]) != handle.generation:
        raise StaleRequestGeneration(slot, handle.generation)
    if not requests.active.array[slot] or requests.ending.array[slot]:
        raise DoubleRelease(slot, handle.generation)
    return slot, command.reason


def commit_release(state: LedgerState, plan: tuple[int, str]) -> dict[str, Any]:
    """Releases, or queues the release while a step is in flight; the receipt's fields."""
    slot, reason = plan
    requests = state.requests
    deferred = bool(requests.flight_step.array[slot])
    if deferred:
        requests.ending.put(slot, RELEASE_REASONS.index(reason) + 1)
        facts = ReleaseFacts(requests.handle(slot), state.scopes.scope(_scope(state, slot)), reason, 0, 0, ())
    else:
        facts = release_now(state, slot, reason)
    return {
        "request": facts.request,
        "reason": reason,
        "deferred": deferred,
        "freed_blocks": facts.freed_blocks,
        "evictable_blocks": facts.evictable_blocks,
        "scrub": facts.scrub,
        "scrub_others": facts.scrub_others,
    }


def release_now(state: LedgerState, slot: int, reason: str) -> ReleaseFacts:
    """Drops the references and frees the slot."""
    handle, scope = state.requests.handle(slot), state.scopes.scope(_scope(state, slot))
    freed, evictable, scrub = state.drop_references(slot)
    state.requests.clear(slot)
    return ReleaseFacts(handle, scope, reason, freed, evictable, *scrub_ids(scrub))


def _scope(state: LedgerState, slot: int) -> int:
    return int(state.requests.scope.array[slot])
