"""Dispatch and Complete: one pass over arrays for all rows of a step.

Invariant: what a dispatched step may touch stays referenced until its Complete; rows become valid only there,
and a block is sealed when its last row is. Rows named as discarded stay unwritten territory. A release that
came while the step was in flight takes effect at the end of its Complete.
Source: LEDGER "In flight"; contracts K039, K042, K046, K053, K211, K227, K230.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from .commands import Complete, Dispatch
from .digest import Array
from .errors import (
    AppendOutOfOrder,
    AppendPastCapacity,
    LedgerRefusal,
    MalformedCommand,
    OutOfMemory,
    OutsideRequestContext,
    RequestInFlight,
    StaleRequestGeneration,
    StepOutOfOrder,
)
from .eviction import EvictionPlan, commit_evictions, plan_evictions
from .receipts import ReleaseFacts
from .release import release_now
from .requests import RELEASE_REASONS
from .state import LedgerState, block_ids, require_counter

_LARGEST_TOKEN = (1 << 31) - 1


class DispatchPlan(msgspec.Struct, frozen=True):
    """Rows as arrays [rows]; `growth` counts the blocks each one adds to its table."""

    command: Dispatch
    slots: Array
    counts: Array
    growth: Array
    evictions: EvictionPlan


class CompletePlan(msgspec.Struct, frozen=True):
    """A step in flight as arrays [rows] in dispatch order; samples as (slots, tokens)."""

    step: int
    slots: Array
    starts: Array
    ends: Array
    kept: Array
    sampled_slots: Array
    sampled_tokens: Array


def _integers(values: list[int]) -> Array:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise MalformedCommand("rows", "beyond 64 bits") from None


def _refuse_first(faults: Array, refusal: Callable[[int], LedgerRefusal]) -> None:
    if faults.any():
        raise refusal(int(faults.argmax()))


def plan_dispatch(state: LedgerState, command: Dispatch) -> DispatchPlan:
    """Raises a refusal for the first faulty row of the first failing check; nothing changes."""
    rows, requests = command.rows, state.requests
    if not rows:
        raise MalformedCommand("rows", "empty")
    if command.step <= state.last_step:
        raise StepOutOfOrder(command.step, state.last_step)
    require_counter("step", command.step)
    slots = _integers([row.request.slot for row in rows])
    generations = _integers([row.request.generation for row in rows])
    starts = _integers([row.start for row in rows])
    counts = _integers([row.count for row in rows])
    outside = (slots < 0) | (slots >= requests.max_requests)
    inside = np.where(outside, 0, slots)
    stale = (
        outside | (requests.active.array[inside] == 0) | (requests.generation.array[inside] != generations)
    )
    _refuse_first(stale, lambda i: StaleRequestGeneration(int(slots[i]), int(generations[i])))
    busy = requests.flight_step.array[slots] != 0
    busy |= np.bincount(slots, minlength=requests.max_requests)[slots] > 1
    _refuse_first(busy, lambda i: RequestInFlight(int(slots[i])))
    senseless = (counts < 1) | (counts > requests.max_model_len + 1)
    _refuse_first(senseless, lambda i: MalformedCommand("count", str(int(counts[i]))))
    valid, known = requests.valid_rows.array[slots], requests.num_tokens.array[slots]
    _refuse_first(starts != valid, lambda i: AppendOutOfOrder(int(slots[i]), int(valid[i]), int(starts[i])))
    ends = starts + counts
    _refuse_first(ends > known, lambda i: OutsideRequestContext(int(slots[i]), int(ends[i]), int(known[i])))
    longest = requests.max_model_len
    _refuse_first(ends > longest, lambda i: AppendPastCapacity(int(slots[i]), int(ends[i]), longest))
    blocks = requests.num_blocks.array[slots].astype(np.int64)
    growth = np.maximum(-(-ends // state.block_size) - blocks, 0)
    evictions = plan_evictions(state, command.evict)
    needed, free = int(growth.sum()), state.pool.free.count
    if needed > free + evictions.num_blocks:
        raise OutOfMemory(needed, free, evictions.num_blocks)
    return DispatchPlan(command, slots, counts, growth, evictions)


def commit_dispatch(state: LedgerState, plan: DispatchPlan) -> dict[str, Any]:
    """Evicts, grows tables, pins the requests; the receipt's fields."""
    requests, slots, step = state.requests, plan.slots, plan.command.step
    evicted = commit_evictions(state, plan.evictions)
    owners, pages = _spread(requests.num_blocks.array[slots].astype(np.int64), plan.growth)
    fresh, scrub = state.pool.allocate(requests.scope.array[slots[owners]])
    requests.write_table(slots[owners], pages, fresh)
    growing = plan.growth > 0
    grown = slots[growing]
    requests.num_blocks.write(grown, requests.num_blocks.array[grown] + plan.growth[growing])
    requests.flight_step.write(slots, step + 1)
    requests.flight_row.write(slots, np.arange(1, len(slots) + 1))
    requests.flight_count.write(slots, plan.counts)
    requests.dispatched.write(slots, 1)
    state.counters.put(0, step + 1)
    return {
        "step": step,
        "new_blocks": state.block_handles(fresh),
        "scrub": block_ids(scrub),
        "evicted": evicted,
    }


def plan_complete(state: LedgerState, command: Complete) -> CompletePlan:
    """Raises a refusal for a step that is not in flight or a sample that fits no row; nothing changes."""
    requests = state.requests
    slots = np.flatnonzero(requests.flight_step.array == command.step + 1)
    if command.step < 0 or len(slots) == 0:
        raise StepOutOfOrder(command.step, state.last_step)
    slots = slots[np.argsort(requests.flight_row.array[slots], kind="stable")]
    starts = requests.valid_rows.array[slots].astype(np.int64)
    ends = starts + requests.flight_count.array[slots]
    kept = np.ones(len(slots), dtype=np.bool_)
    kept[_row_indices("discarded", command.discarded, len(slots))] = False
    rows = _row_indices("sampled", tuple([row for row, _ in command.sampled]), len(slots))
    for _, token in command.sampled:
        if not 0 <= token <= _LARGEST_TOKEN:
            raise MalformedCommand("sampled", f"token {token}")
    _refuse_first(~kept[rows], lambda i: MalformedCommand("sampled", f"row {int(rows[i])} is discarded"))
    tokens = np.array([token for _, token in command.sampled], dtype=np.int64)
    known = requests.num_tokens.array[slots[rows]]
    _refuse_first(
        ends[rows] != known,
        lambda i: AppendOutOfOrder(int(slots[rows[i]]), int(known[i]), int(ends[rows[i]])),
    )
    return CompletePlan(command.step, slots, starts, ends, kept, slots[rows], tokens)


def commit_complete(state: LedgerState, plan: CompletePlan) -> dict[str, Any]:
    """Makes rows valid, appends samples, unpins, carries out queued releases; the receipt's fields."""
    requests, page = state.requests, state.block_size
    kept, starts, ends = plan.slots[plan.kept], plan.starts[plan.kept], plan.ends[plan.kept]
    first = starts // page
    owners, pages = _spread(first, (ends - 1) // page - first + 1)
    blocks = requests.tables[kept[owners], pages]
    state.pool.rows.write(blocks, np.minimum(ends[owners] - pages * page, page))
    requests.valid_rows.write(kept, ends)
    _append_samples(state, plan.sampled_slots, plan.sampled_tokens)
    for column in (requests.flight_step, requests.flight_row, requests.flight_count):
        column.write(plan.slots, 0)
    released = _queued_releases(state, plan.slots)
    sealed = np.where(plan.kept, plan.ends // page - plan.starts // page, 0)
    return {
        "step": plan.step,
        "sealed": tuple(sealed.tolist()),
        "released": released,
        "scrub": tuple([block for facts in released for block in facts.scrub]),
    }


def _append_samples(state: LedgerState, slots: Array, tokens: Array) -> None:
    if len(slots) == 0:
        return
    requests = state.requests
    at = requests.num_tokens.array[slots].astype(np.int64)
    requests.tokens[slots, at] = tokens
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * state.weights[at]
    requests.token_print.write(slots, requests.token_print.array[slots] + terms)
    requests.num_tokens.write(slots, at + 1)


def _queued_releases(state: LedgerState, slots: Array) -> tuple[ReleaseFacts, ...]:
    codes = state.requests.ending.array[slots]
    return tuple(
        [
            release_now(state, int(slot), RELEASE_REASONS[int(code) - 1])
            for slot, code in zip(slots, codes, strict=True)
            if code
        ]
    )


def _row_indices(field: str, rows: tuple[int, ...], num_rows: int) -> Array:
    if any(not 0 <= row < num_rows for row in rows) or len(set(rows)) != len(rows):
        raise MalformedCommand(field, str(rows))
    return np.array(rows, dtype=np.int64)


def _spread(first: Array, counts: Array) -> tuple[Array, Array]:
    """Ragged ranges: for each i the numbers first[i], ..., first[i] + counts[i] - 1; (index i, number) flat."""
    owners = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    return owners, first[owners] + within
