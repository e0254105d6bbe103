"""Checkpoints: a whole ledger between two steps as one value, and the ledger made from it again.

Owns what a checkpoint holds: the columns, the free queues and the token ids that live state refers to; everything
else (children, sums, locks, flights) is derived again. Invariant: a checkpoint names no token of a request or an index
entry that is gone; a ledger made from one has the digests and the log index that were taken and passes the audit, or
is refused.
Source: LEDGER "Recording", "Two digests"; contracts K066, K077, K182.
"""

from __future__ import annotations

import msgspec
import numpy as np

from .audit import AuditViolation, audit
from .columns import IdStack
from .commands import Genesis, Scope
from .digest import Array, digest_bytes
from .errors import LedgerRefusal, LogCorrupt, RequestInFlight
from .ledger import Ledger
from .state import LedgerState, plan_genesis

_TALLIED = 4


class NodeContent(msgspec.Struct, frozen=True, array_like=True):
    """One tree edge: token ids (little-endian int32) and its blocks in each group (int64)."""

    node: int
    tokens: bytes
    blocks: tuple[bytes, ...]


class TailContent(msgspec.Struct, frozen=True, array_like=True):
    """One partial tail: token ids (little-endian int32); the rest is in its record."""

    tail: int
    tokens: bytes


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """A ledger before record `index`. Cells are little-endian, int64 records and int32 tables and queues.

    `held` are the scopes whose token ids are in here.
    """

    genesis: Genesis
    index: int
    committed: bytes
    machine: bytes
    counters: bytes
    block_records: tuple[bytes, ...]
    block_queues: tuple[bytes, ...]
    tallies: tuple[tuple[int, ...], ...]
    node_records: bytes
    node_queue: bytes
    nodes: tuple[NodeContent, ...]
    namespaces: tuple[tuple[str, int], ...]
    scopes: tuple[Scope, ...]
    request_records: bytes
    request_queue: bytes
    tables: tuple[bytes, ...]
    request_tokens: tuple[tuple[int, bytes], ...]
    held: tuple[Scope, ...]
    tail_records: bytes = b""
    tails: tuple[TailContent, ...] = ()


def take_checkpoint(ledger: Ledger) -> Checkpoint:
    """Everything the ledger is. Raises: RequestInFlight between a Dispatch and its Complete, LogWithoutGenesis."""
    state = ledger.state
    tree, requests = state.tree, state.requests
    flying = np.flatnonzero(requests.flight_step.array)
    if len(flying):
        raise RequestInFlight(int(flying[0]))
    nodes = np.flatnonzero(tree.pages.array).tolist()
    active = np.flatnonzero(requests.active.array).tolist()
    return Checkpoint(
        genesis=state.genesis,
        index=ledger.log_index,
        committed=ledger.committed_digest,
        machine=ledger.machine_digest,
        counters=_words(state.counters.cells),
        block_records=tuple([_words(pool.records.cells) for pool in state.pools]),
        block_queues=tuple([_queue(pool.free) for pool in state.pools]),
        tallies=tuple([tuple(pool.tally.tolist()) for pool in state.pools]),
        node_records=_words(tree.records.cells),
        node_queue=_queue(tree.free),
        nodes=tuple(
            [
                NodeContent(
                    node, _cells(tree.tokens[node]), tuple([_words(part) for part in tree.edge_blocks(node)])
                )
                for node in nodes
            ]
        ),
        namespaces=tuple([(name, state.scopes.floor_of(name)) for name in state.scopes.all_namespaces()]),
        scopes=tuple([scope for _, scope in state.scopes.all_scopes()]),
        request_records=_words(requests.records.cells),
        request_queue=_queue(requests.free),
        tables=tuple([_cells(cells.array) for cells in requests.cells]),
        request_tokens=tuple(
            [(slot, _cells(requests.tokens[slot, : int(requests.num_tokens.array[slot])])) for slot in active]
        ),
        held=held_scopes(state),
        tail_records=_words(tree.tails.records.cells),
        tails=tuple(
            [TailContent(tail, _cells(tokens)) for tail, tokens in sorted(tree.tails.tokens.items())]
        ),
    )


def held_scopes(state: LedgerState) -> tuple[Scope, ...]:
    """Scopes whose token ids the index or a running request holds, in order of first use."""
    requests = state.requests
    ids = {int(scope) for scope in requests.scope.array[requests.active.array != 0]} | set(state.tree.roots)
    return tuple([state.scopes.scope(scope_id) for scope_id in sorted(ids)])


def restore(checkpoint: Checkpoint) -> Ledger:
    """The ledger that was taken. Raises: LogCorrupt when the parts do not make one."""
    index = checkpoint.index
    try:
        state = LedgerState(plan_genesis(checkpoint.genesis))
        _fill_pools(state, checkpoint)
        _fill_scopes(state, checkpoint)
        _fill_tree(state, checkpoint)
        _fill_requests(state, checkpoint)
        _put_words(state.counters.cells, checkpoint.counters)
        _sum_again(state)
        ledger = Ledger.resumed(state, index)
        audit(ledger)
    except (ValueError, IndexError, KeyError, LedgerRefusal, AuditViolation) as error:
        raise LogCorrupt(index, f"checkpoint: {error}") from error
    if (ledger.committed_digest, ledger.machine_digest) != (checkpoint.committed, checkpoint.machine):
        raise LogCorrupt(index, "checkpoint: its digests are not those of its columns")
    return ledger


def _fill_pools(state: LedgerState, saved: Checkpoint) -> None:
    parts = zip(state.pools, saved.block_records, saved.block_queues, saved.tallies, strict=True)
    for pool, records, queue, tally in parts:
        _put_words(pool.records.cells, records)
        _put_queue(pool.free, queue)
        pool.tally[:] = np.array(tally, dtype=np.int64).reshape(_TALLIED)


def _fill_scopes(state: LedgerState, saved: Checkpoint) -> None:
    """Interned in the order of first use, so that ids are the same; floors rise to where they were."""
    for name, _ in saved.namespaces:
        state.scopes.intern_namespace(name)
    for scope in saved.scopes:
        state.scopes.intern(scope)
    for name, floor in saved.namespaces:
        if floor:
            state.scopes.raise_floor(name, floor)


def _fill_tree(state: LedgerState, saved: Checkpoint) -> None:
    tree = state.tree
    _put_words(tree.records.cells, saved.node_records)
    _put_queue(tree.free, saved.node_queue)
    for content in saved.nodes:
        tree.adopt(
            content.node,
            np.frombuffer(content.tokens, dtype="<i4").astype(np.int32),
            tuple([np.frombuffer(part, dtype="<i8").astype(np.int64) for part in content.blocks]),
        )
    tree.link([content.node for content in saved.nodes])
    if saved.tail_records:
        records = tree.tails.records
        records.grow(len(saved.tail_records) // (8 * records.cells.shape[1]))
        _put_words(records.cells, saved.tail_records)
    tree.tails.adopt(
        {content.tail: np.frombuffer(content.tokens, "<i4").astype(np.int32) for content in saved.tails}
    )


def _fill_requests(state: LedgerState, saved: Checkpoint) -> None:
    requests = state.requests
    _put_words(requests.records.cells, saved.request_records)
    _put_queue(requests.free, saved.request_queue)
    for cells, content in zip(requests.cells, saved.tables, strict=True):
        cells.array[:] = np.frombuffer(content, dtype="<i4")
    for slot, content in saved.request_tokens:
        tokens = np.frombuffer(content, dtype="<i4")
        requests.tokens[slot, : len(tokens)] = tokens


def _sum_again(state: LedgerState) -> None:
    """Both digests from the columns alone."""
    for sink in (state.sums.committed, state.sums.machine):
        total = digest_bytes(*[part.recomputed(sink) for part in state.parts()])
        sink.sums[:] = np.frombuffer(total, dtype="<u8")


def _words(values: Array) -> bytes:
    return np.ascontiguousarray(values, dtype="<i8").tobytes()


def _cells(values: Array) -> bytes:
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def _queue(stack: IdStack) -> bytes:
    return _cells(stack.column.array[: stack.count])


def _put_words(cells: Array, content: bytes) -> None:
    cells[:] = np.frombuffer(content, dtype="<i8").reshape(cells.shape)


def _put_queue(stack: IdStack, content: bytes) -> None:
    ids = np.frombuffer(content, dtype="<i4")
    cells = stack.column.array
    cells[: len(ids)] = ids
    cells[len(ids) :] = 0
    stack.count = len(ids)
