"""Moves of the bounded check: every command a tiny ledger could be given next, and commands it must refuse.

Invariant: moves are made from the ledger's own views, so they name current handles; probes are wrong in exactly one
way each and name the refusal they must meet. Order is fixed by the state.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from . import errors, loops
from .commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    BlockHandle,
    Command,
    Complete,
    Dispatch,
    Evict,
    Fork,
    GroupSpec,
    NodeHandle,
    Publish,
    PublishTail,
    Release,
    RequestHandle,
    Reset,
    RowSpan,
    Scope,
    Truncate,
)
from .errors import LedgerRefusal
from .ledger import Ledger

NAMESPACE, WORLD = "a", b"w"
Probe = tuple[Command, tuple[type[LedgerRefusal], ...]]


class Bounds(msgspec.Struct, frozen=True):
    """How small the ledger is. Two groups: `page` rows a block (`blocks` blocks) and single rows (`singles` blocks).

    Single rows have a window of `window` rows, 0 for none. With `tails` there are no single rows, and tails are published
    and asked for.
    """

    blocks: int = 3
    singles: int = 5
    requests: int = 2
    longest: int = 3
    floors: int = 1
    prompts: tuple[tuple[int, ...], ...] = ((0, 0, 0),)
    window: int = 0
    tails: bool = False
    page: int = 2

    def groups(self) -> tuple[GroupSpec, ...]:
        """The ledger's cache groups: partial tails are for one of full attention."""
        pairs = GroupSpec("pairs", self.page, self.blocks)
        return (pairs,) if self.tails else (pairs, GroupSpec("singles", 1, self.singles, self.window))


class Running(msgspec.Struct):
    """What moves need to know of one request."""

    handle: RequestHandle
    slot: int
    valid: int
    known: int
    step: int
    transaction: int
    ending: bool


def running(ledger: Ledger) -> list[Running]:
    """Requests by slot."""
    found = []
    for slot, record in enumerate(ledger.state.requests.records.cells.tolist()):
        if record[loops.ACTIVE]:
            handle = RequestHandle(slot, record[loops.SLOT_GENERATION])
            known, valid = record[loops.NUM_TOKENS], record[loops.VALID]
            step, transaction = record[loops.FLIGHT_STEP] - 1, record[loops.TRANSACTION] - 1
            open_ = transaction if not record[loops.DISPATCHED] else -1
            found.append(Running(handle, slot, valid, known, step, open_, record[loops.ENDING] != 0))
    return found


def moves(ledger: Ledger, bounds: Bounds) -> Iterator[Command]:
    """Every command to try; some will be refused for lack of room, which is a move too."""
    state, requests = ledger.state, running(ledger)
    floor = ledger.floor(NAMESPACE)
    scope = Scope(NAMESPACE, floor, WORLD)
    leaves = tuple([leaf.handle for leaf in ledger.evictable_leaves()])
    idle = tuple([tail.handle for tail in ledger.tails() if not tail.references])
    for tail in idle:
        yield Evict((tail,))
        yield Evict((*leaves, tail))
    if len(requests) < bounds.requests:
        for prompt in bounds.prompts:
            for evict in ((), leaves) if leaves else ((),):
                yield admit(ledger, scope, prompt, evict)
                if bounds.tails:
                    yield admit(ledger, scope, prompt, evict, 1)
    yield from _dispatches(ledger, requests, leaves, bounds)
    for step in sorted({request.step for request in requests if request.step >= 0}):
        yield from _completions(ledger, step, bounds)
    for request in requests:
        if not request.ending:
            yield Release(request.handle, "cancel")
            for count in {request.known - 1, request.valid - 1} - {0, -1}:
                yield Truncate(request.handle, count)
        if floor == _generation(ledger, request):
            yield Publish((request.handle,))
            if bounds.tails and request.step < 0:
                yield PublishTail(request.handle, 1)
        if request.step < 0 and request.valid and len(requests) < bounds.requests:
            yield Fork(request.handle, 1)
        if request.transaction >= 0:
            yield Abort(request.transaction)
    for leaf in leaves:
        yield Evict((leaf,))
    for block in _idle_window_blocks(ledger):
        yield Evict((), (block,))
        for leaf in leaves[:1]:
            yield Evict((leaf,), (block,))
    if state.tree.roots:
        yield Reset(scope)
    if floor < bounds.floors:
        yield AdvanceGeneration(NAMESPACE, floor + 1)


def _idle_window_blocks(ledger: Ledger) -> tuple[BlockHandle, ...]:
    lines = ledger.evictable_window_blocks()
    return tuple([handle for line in lines for handle in line.handles(0, len(line.blocks))])


def admit(
    ledger: Ledger,
    scope: Scope,
    prompt: tuple[int, ...],
    evict: tuple[NodeHandle, ...] = (),
    tail_policy: int = 0,
) -> Admit:
    """An admission under the next transaction id."""
    tokens = np.array(prompt, dtype="<i4").tobytes()
    return Admit(ledger.state.last_transaction + 1, scope, tokens, True, evict, (), tail_policy)


def _generation(ledger: Ledger, request: Running) -> int:
    return ledger.request(request.handle).scope.generation


def _dispatches(
    ledger: Ledger, requests: list[Running], leaves: tuple[NodeHandle, ...], bounds: Bounds
) -> Iterator[Command]:
    step = ledger.state.last_step + 1
    rows = [
        RowSpan(r.handle, r.valid, min(r.known, bounds.longest) - r.valid)
        for r in requests
        if r.step < 0 and r.valid < min(r.known, bounds.longest)
    ]
    for row in rows:
        yield Dispatch(step, (row,))
        if row.count > 1:
            yield Dispatch(step, (RowSpan(row.request, row.start, 1),))
        if leaves:
            yield Dispatch(step, (row,), leaves)
        if idle := _idle_window_blocks(ledger):
            yield Dispatch(step, (row,), leaves, idle)
    if len(rows) > 1:
        yield Dispatch(step, tuple(rows))


def _completions(ledger: Ledger, step: int, bounds: Bounds) -> Iterator[Command]:
    cells = ledger.state.requests.records.cells
    slots = ledger.state.flights[step].tolist()
    ends = [int(cells[slot, loops.VALID] + cells[slot, loops.FLIGHT_COUNT]) for slot in slots]
    whole = [end == int(cells[slot, loops.NUM_TOKENS]) for slot, end in zip(slots, ends, strict=True)]
    sampling = tuple([index for index, at_end in enumerate(whole) if at_end and ends[index] < bounds.longest])
    yield Complete(step)
    if sampling:
        yield Complete(step, tuple([(index, 0) for index in sampling]))
    for index in range(len(slots)):
        yield Complete(step, (), (index,))


def probes(ledger: Ledger) -> Iterator[Probe]:
    """Commands that must be refused now, with the refusals that may meet them."""
    state, requests = ledger.state, running(ledger)
    floor = ledger.floor(NAMESPACE)
    scope = Scope(NAMESPACE, floor, WORLD)
    step = state.last_step + 1
    yield Complete(step), (errors.StepOutOfOrder,)
    yield Evict((NodeHandle(0, 0),)), (errors.RootEvicted,)
    yield Abort(state.last_transaction + 1), (errors.UnknownTransaction,)
    if floor:
        yield AdvanceGeneration(NAMESPACE, floor), (errors.NamespaceGenerationMismatch,)
        yield admit(ledger, Scope(NAMESPACE, floor - 1, WORLD), (0,)), (errors.StaleNamespaceGeneration,)
    if state.last_transaction >= 0:
        again = Admit(state.last_transaction, scope, bytes(4))
        yield again, (errors.DuplicateTransactionId,)
    for slot, record in enumerate(state.requests.records.cells.tolist()):
        yield from _slot_probes(slot, record, step)
    for request in requests:
        yield from _request_probes(state.last_step, request)
    yield from _node_probes(ledger)
    if state.windowed:
        yield from _block_probes(ledger)
    for tail in ledger.tails():
        later = NodeHandle(tail.handle.node, tail.handle.generation + 1)
        yield Evict((later,)), (errors.StaleTreeVersion,)
        if tail.references:
            yield Evict((tail.handle,)), (errors.LockedLeafEvicted,)
    if len(state.pools) > 1:
        for request in requests[:1]:
            yield PublishTail(request.handle, 1), (errors.TailsNeedOneFullGroup,)


def _slot_probes(slot: int, record: list[int], step: int) -> Iterator[Probe]:
    """Handles that were good once: of the request before this one, or of one that ended."""
    current = record[loops.SLOT_GENERATION]
    stale = RequestHandle(slot, current - 1 if record[loops.ACTIVE] else current)
    refusals = (errors.StaleRequestGeneration,)
    yield Dispatch(step, (RowSpan(stale, 0, 1),)), refusals
    yield Publish((stale,)), refusals
    yield Fork(stale, 1), refusals
    yield Truncate(stale, 1), refusals
    yield Release(stale, "cancel"), (*refusals, errors.DoubleRelease)


def _request_probes(last_step: int, request: Running) -> Iterator[Probe]:
    step, handle, valid = last_step + 1, request.handle, request.valid
    if request.step >= 0:
        yield Dispatch(step, (RowSpan(handle, valid, 1),)), (errors.RequestInFlight,)
        yield Fork(handle, 1), (errors.ForkOfUnpublishedState, errors.StaleNamespaceGeneration)
        flying = errors.RequestInFlight, errors.StaleNamespaceGeneration, errors.TailsNeedOneFullGroup
        yield PublishTail(handle, 1), flying
        yield Complete(request.step, ((9, 0),)), (errors.MalformedCommand,)
    else:
        yield Dispatch(step, (RowSpan(handle, valid + 1, 1),)), (errors.AppendOutOfOrder,)
        yield (
            Dispatch(step, (RowSpan(handle, valid, request.known - valid + 1),)),
            (errors.OutsideRequestContext,),
        )
    if request.ending:
        yield Release(handle, "cancel"), (errors.DoubleRelease,)
    else:
        yield Truncate(handle, request.known + 1), (errors.TruncateBeyondLength,)


def _block_probes(ledger: Ledger) -> Iterator[Probe]:
    """Blocks that a trim may not name."""
    state = ledger.state
    for pool in state.pools:
        for block, cells in enumerate(pool.records.cells.tolist()):
            handle = BlockHandle(state.genesis.incarnation, pool.group, block, cells[loops.GENERATION])
            later = msgspec.structs.replace(handle, generation=handle.generation + 1)
            yield Evict((), (later,)), (errors.StaleBlockGeneration,)
            if not pool.window:
                yield Evict((), (handle,)), (errors.EdgePartiallyEvicted,)
            elif cells[loops.REF]:
                yield Evict((), (handle,)), (errors.EvictLiveBlock,)
            elif not cells[loops.NODE]:
                yield Evict((), (handle,)), (errors.MalformedCommand,)


def _node_probes(ledger: Ledger) -> Iterator[Probe]:
    tree = ledger.state.tree
    for scope_id in sorted(tree.roots):
        for node in tree.subtree(scope_id):
            handle = NodeHandle(node, int(tree.generation.array[node]))
            yield Evict((NodeHandle(node, handle.generation + 1),)), (errors.StaleTreeVersion,)
            if tree.num_children[node]:
                yield Evict((handle,)), (errors.InternalNodeEvicted,)
            elif tree.lock(node):
                yield Evict((handle,)), (errors.LockedLeafEvicted,)
