"""Dispatch and Complete: one pass over arrays for all rows of a step.

Invariant: what a dispatched step may touch stays referenced until its Complete; rows become valid only there,
and a block is sealed when its last row is. A row that would be written into a shared or indexed block gets a
copy of it first, named in the Dispatch's receipt; the source is held until the Complete. Rows named as
discarded stay unwritten territory. A truncation or release that came while the step was in flight takes
effect at the end of its Complete, and so do blocks that a window has left behind.
Source: LEDGER "In flight"; contracts K039, K042, K046, K053, K055 to K057, K211, K227, K230.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from . import loops
from .branching import truncate_now
from .commands import Complete, Dispatch, PackedComplete, PackedDispatch
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
from .pool import BlockPool
from .receipts import BlockCopy, LeftWindow, ReleaseFacts, TruncateFacts
from .release import release_now
from .requests import RELEASE_REASONS
from .state import LedgerState, require_counter
from .windows import leave_behind

_ITEM_BYTES = 8


class DispatchPlan(msgspec.Struct, frozen=True):
    """Rows int64 [rows, 4] (slot, generation, start, count); blocks each group needs."""

    step: int
    rows: Array
    needed_blocks: tuple[int, ...]
    evictions: EvictionPlan


class CompletePlan(msgspec.Struct, frozen=True):
    """A step in flight: its slots in dispatch order and each row's outcome, int64 [rows] (see `loops`)."""

    step: int
    slots: Array
    outcomes: Array


def plan_dispatch(state: LedgerState, command: Dispatch | PackedDispatch) -> DispatchPlan:
    """Raises a refusal for the first faulty row of the first failing check; nothing changes."""
    rows, requests = _rows_of(command), state.requests
    if not len(rows):
        raise MalformedCommand("rows", "empty")
    if command.step <= state.last_step:
        raise StepOutOfOrder(command.step, state.last_step)
    require_counter("step", command.step)
    state.serial += 1
    fault, at = loops.check_rows(
        rows, requests.records.cells, requests.marks, state.serial, requests.max_model_len
    )
    if fault != loops.FITS:
        raise _row_refusal(state, fault, *rows[at].tolist())
    evictions = plan_evictions(state, command.evict, command.trim)
    return DispatchPlan(command.step, rows, _plan_room(state, rows, evictions), evictions)


def _plan_room(state: LedgerState, rows: Array, evictions: EvictionPlan) -> tuple[int, ...]:
    """Blocks each group needs. Raises: OutOfMemory for the first group that lacks them."""
    counts = []
    for pool, named in zip(state.pools, evictions.freed, strict=True):
        needed, free = needed_blocks(state, rows, pool), pool.free.count
        if needed > free + named:
            raise OutOfMemory(needed, free, named, pool.group)
        counts.append(needed)
    return tuple(counts)


def needed_blocks(state: LedgerState, rows: Array, pool: BlockPool) -> int:
    """Blocks of one group that rows int64 [rows, 4] need: growth of their tables and copies of shared tails."""
    requests, group = state.requests, pool.group
    return loops.needed_blocks(
        rows,
        requests.records.cells,
        pool.records.cells,
        requests.cells[group].array,
        requests.widths[group],
        pool.block_size,
        group,
        pool.copied,
    )


def commit_dispatch(state: LedgerState, plan: DispatchPlan) -> dict[str, Any]:
    """Evicts, grows tables, copies shared tails, pins the requests; the receipt's fields."""
    requests = state.requests
    evicted = commit_evictions(state, plan.evictions)
    fresh, scrub = [], []
    copies: list[BlockCopy] = []
    for group, needed in enumerate(plan.needed_blocks):
        taken, scrubbed, copied = _grow(state, plan.rows, group, needed)
        fresh.append(taken)
        scrub.append(tuple(scrubbed.tolist()))
        copies += [BlockCopy(group, *copy) for copy in copied.tolist()]
    loops.pin_rows(plan.rows, requests.records.cells, plan.step, state.pool.spaces, state.sums.all)
    state.flights[plan.step] = plan.rows[:, 0].copy()
    state.step_counter.put(0, plan.step + 1)
    return {
        "step": plan.step,
        "new_blocks": state.handles(tuple(fresh)),
        "scrub": scrub[0],
        "scrub_others": tuple(scrub[1:]),
        "evicted": evicted,
        "copies": tuple(copies),
    }


def _grow(state: LedgerState, rows: Array, group: int, needed: int) -> tuple[Array, Array, Array]:
    """Gives the rows their blocks of one group; ((block, generation) pairs, blocks to scrub, copies)."""
    pool, requests = state.pools[group], state.requests
    fresh = np.empty((needed, 2), dtype=np.int64)
    scrub, copies = np.empty(needed, dtype=np.int64), np.empty((needed, 3), dtype=np.int64)
    if needed == 0:
        return fresh, scrub, copies
    scrubbed, copied = loops.grow_tables(
        rows,
        requests.records.cells,
        pool.records.cells,
        requests.cells[group].array,
        requests.widths[group],
        pool.free.column.array,
        pool.free.count,
        pool.block_size,
        group,
        fresh,
        scrub,
        copies,
        pool.spaces,
        state.sums.all,
        pool.tally,
    )
    pool.free.count -= needed
    return fresh, scrub[:scrubbed], copies[:copied]


def plan_complete(state: LedgerState, command: Complete | PackedComplete) -> CompletePlan:
    """Raises a refusal for a step that is not in flight or a sample that fits no row; nothing changes."""
    slots = state.flights.get(command.step)
    if slots is None:
        raise StepOutOfOrder(command.step, state.last_step)
    samples, discarded = _samples_of(command)
    outcomes = np.empty(len(slots), dtype=np.int64)
    cells = state.requests.records.cells
    fault, at = loops.read_outcomes(slots, cells, samples, discarded, outcomes)
    if fault == loops.BAD_DISCARD:
        raise MalformedCommand("discarded", f"row {int(discarded[at])} of {len(slots)}")
    if fault != loops.COMPLETES:
        row, token = samples[at].tolist()
        raise _sample_refusal(state, fault, slots, row, token)
    return CompletePlan(command.step, slots, outcomes)


def commit_complete(state: LedgerState, plan: CompletePlan) -> dict[str, Any]:
    """Makes rows valid, appends samples, unpins, carries out what was queued; the receipt's fields."""
    requests, cells = state.requests, state.requests.records.cells
    # What a window leaves behind waits for one step more, so that all rows of this one can be published before.
    starts = cells[plan.slots, loops.VALID] if state.windowed else plan.slots
    freed: list[Array] = []
    for group, pool in enumerate(state.pools):
        sources = np.empty(len(plan.slots), dtype=np.int64)
        count = loops.fill_blocks(
            plan.slots,
            plan.outcomes,
            cells,
            pool.records.cells,
            requests.cells[group].array,
            requests.widths[group],
            pool.block_size,
            group,
            sources,
            pool.spaces,
            state.sums.all,
            pool.tally,
        )
        freed.append(sources[:0] if count == 0 else pool.drop(sources[:count], state.scopes.revoked)[2])
    sealed = np.empty(len(plan.slots), dtype=np.int64)
    queued = loops.finish_rows(
        plan.slots,
        plan.outcomes,
        cells,
        requests.tokens,
        state.weights,
        state.alignment,
        sealed,
        state.pool.spaces,
        state.sums.all,
    )
    del state.flights[plan.step]
    truncated, released = _carry_out(state, plan.slots) if queued else ((), ())
    facts = (*truncated, *released)
    left: tuple[LeftWindow, ...] = ()
    if state.windowed:
        left, gone = leave_behind(state, plan.slots, starts)
        freed = [np.concatenate(both) for both in zip(freed, gone, strict=True)]
    scrub = [tuple(blocks.tolist()) for blocks in freed]
    for item in facts:
        parts = (item.scrub, *item.scrub_others)
        scrub = [joined + part for joined, part in zip(scrub, parts, strict=True)]
    return {
        "step": plan.step,
        "sealed": tuple(sealed.tolist()),
        "released": released,
        "scrub": scrub[0],
        "scrub_others": tuple(scrub[1:]),
        "truncated": truncated,
        "left_window": left,
    }


def _carry_out(
    state: LedgerState, slots: Array
) -> tuple[tuple[TruncateFacts, ...], tuple[ReleaseFacts, ...]]:
    """Truncations and releases that were queued while the step was in flight, in row order."""
    truncated: list[TruncateFacts] = []
    released: list[ReleaseFacts] = []
    for slot in slots.tolist():
        cut, code = int(state.requests.cut.array[slot]), int(state.requests.ending.array[slot])
        if cut:
            truncated.append(truncate_now(state, slot, cut - 1))
        if code:
            released.append(release_now(state, slot, RELEASE_REASONS[code - 1]))
    return tuple(truncated), tuple(released)


def _rows_of(command: Dispatch | PackedDispatch) -> Array:
    if isinstance(command, PackedDispatch):
        return _packed("rows", command.rows, 4)
    rows = [(row.request.slot, row.request.generation, row.start, row.count) for row in command.rows]
    return _integers("rows", rows, 4)


def _samples_of(command: Complete | PackedComplete) -> tuple[Array, Array]:
    if isinstance(command, PackedComplete):
        samples, discarded = command.sampled, command.discarded
        return _packed("sampled", samples, 2), _packed("discarded", discarded, 1).reshape(-1)
    discarded = _integers("discarded", [(row,) for row in command.discarded], 1)
    return _integers("sampled", list(command.sampled), 2), discarded.reshape(-1)


def _packed(field: str, content: bytes, width: int) -> Array:
    if not isinstance(content, bytes):
        raise MalformedCommand(field, f"not bytes: {content!r:.60}")
    if len(content) % (width * _ITEM_BYTES):
        raise MalformedCommand(field, f"{len(content)} bytes")
    return np.frombuffer(content, dtype="<i8").astype(np.int64).reshape(-1, width)


def _integers(field: str, values: list[Any], width: int) -> Array:
    try:
        numbers = np.array(values).reshape(-1, width)
    except ValueError:
        numbers = np.empty((1, width), dtype=np.object_)
    if len(numbers) and numbers.dtype != np.int64:
        raise MalformedCommand(field, f"not rows of {width} 64-bit integers: {values[:4]}")
    return numbers.astype(np.int64)


def _row_refusal(
    state: LedgerState, fault: int, slot: int, generation: int, start: int, count: int
) -> LedgerRefusal:
    if fault == loops.STALE:
        return StaleRequestGeneration(slot, generation)
    if fault == loops.BUSY:
        return RequestInFlight(slot)
    if fault == loops.SENSELESS:
        return MalformedCommand("count", str(count))
    if fault == loops.OUT_OF_ORDER:
        return AppendOutOfOrder(slot, int(state.requests.valid_rows.array[slot]), start)
    if fault == loops.BEYOND_KNOWN:
        return OutsideRequestContext(slot, start + count, int(state.requests.num_tokens.array[slot]))
    return AppendPastCapacity(slot, start + count, state.requests.max_model_len)


def _sample_refusal(state: LedgerState, fault: int, slots: Array, row: int, token: int) -> LedgerRefusal:
    if fault == loops.BAD_TOKEN:
        return MalformedCommand("sampled", f"token {token}")
    if fault == loops.SAMPLED_DISCARD:
        return MalformedCommand("sampled", f"row {row} is discarded")
    if fault == loops.BAD_SAMPLE_ROW:
        return MalformedCommand("sampled", f"row {row} of {len(slots)}")
    slot = int(slots[row])
    record = state.requests.records.cells[slot]
    known = int(record[loops.NUM_TOKENS])
    return AppendOutOfOrder(slot, known, int(record[loops.VALID] + record[loops.FLIGHT_COUNT]))
