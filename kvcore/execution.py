"""Execution snapshots: which sequences of one dispatched step read the same K/V blocks, frozen with what that rests on.

Owns `ExecutionSnapshot`, how it is taken from a ledger, and its rules. A chunk is a run of rows [first_row, end_row) that the
sequences [begin, end) in tree order read from the same blocks; chunks stand in preorder. Invariant: chunks of one
sequence follow each other without gap or overlap from row 0 on; what lies behind them is the sequence's own. Identity is
not decided here: sequences share a chunk where the ledger's own receipts gave them the same blocks under the same
generations, which a scope border only lets through for content that its operator published.
Source: ChunkAttention (prefix tree), Hydragen (levels); contracts K148, K151, K153, K154, K159.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from . import execution_loops as loops
from .commands import RequestHandle
from .digest import Array, mix_words
from .execution_errors import (
    ChildOutsideParentCoverage,
    ChunkDigestMismatch,
    ChunkGap,
    CoverageNotContiguous,
    CoverageOutOfRange,
    ExecutionWithoutReceipt,
    GroupMembersDoNotSharePrefix,
    KeyCoveredTwice,
    KeyNotCovered,
    SequenceOrderChanged,
    StaleSnapshot,
    TensorContractMismatch,
    UnprotectedPath,
    ValidCountMismatch,
)
from .ledger import Ledger

FIRST_ROW, END_ROW, BEGIN, END, LEVEL = range(5)
"""Columns of `ExecutionSnapshot.chunks`."""


class ExecutionSnapshot(msgspec.Struct, frozen=True):
    """What one step may share. `chunks` int64 [n, 5] in preorder; `digests` uint64 [n], 0 for private ones."""

    log_index: int
    machine_digest: bytes
    contract: str
    handles: tuple[RequestHandle, ...]
    """The step's sequences, in the step's order."""
    order: Array
    """Position in the step of each sequence in tree order, int64 [sequences]."""
    first_rows: Array
    """First row the step computes of each sequence, in the step's order; rows before it are valid."""
    chunks: Array
    digests: Array

    @property
    def coverage(self) -> Array:
        """Sequences that read each chunk, int64 [n]."""
        return self.chunks[:, END] - self.chunks[:, BEGIN]

    def shared_rows(self, wanted: Array) -> Array:
        """Rows at the head of each sequence (in the step's order) that the chunks `wanted` (bool [n]) cover, int64.

        Wanted chunks are closed upwards: with a chunk goes its parent.
        """
        rows = np.zeros(len(self.order), dtype=np.int64)
        for chunk in self.chunks[wanted]:
            rows[self.order[chunk[BEGIN] : chunk[END]]] = chunk[END_ROW]
        return rows

    def paths(self) -> list[list[int]]:
        """Chunk numbers of each sequence from the root on, in the step's order."""
        found: list[list[int]] = [[] for _ in self.order]
        for number, chunk in enumerate(self.chunks.tolist()):
            for position in self.order[chunk[BEGIN] : chunk[END]].tolist():
                found[position].append(number)
        return found

    def require_step(self, handles: Sequence[RequestHandle], contract: str) -> None:
        """Raises: SequenceOrderChanged, TensorContractMismatch; nothing was read."""
        if contract != self.contract:
            raise TensorContractMismatch(self.contract, contract)
        if len(handles) != len(self.handles):
            raise SequenceOrderChanged(min(len(handles), len(self.handles)))
        for position, (given, own) in enumerate(zip(handles, self.handles, strict=True)):
            if given != own:
                raise SequenceOrderChanged(position)

    def require_current(self, ledger: Ledger) -> None:
        """Raises: StaleSnapshot once the ledger has applied another command."""
        if ledger.log_index != self.log_index or ledger.machine_digest != self.machine_digest:
            raise StaleSnapshot(self.log_index, ledger.log_index)

    def require_same_blocks(self, ledger: Ledger, group: int = 0) -> None:
        """Compares every reader's table of every shared chunk, for audits.

        Raises: ChunkDigestMismatch, GroupMembersDoNotSharePrefix.
        """
        tables, size = ledger.group_tables[group], ledger.state.pools[group].block_size
        slots = np.array([handle.slot for handle in self.handles], dtype=np.int64)
        for number, chunk in enumerate(self.chunks.tolist()):
            if chunk[END] - chunk[BEGIN] < 2:
                continue
            first, end = chunk[FIRST_ROW] // size, chunk[END_ROW] // size
            members = slots[self.order[chunk[BEGIN] : chunk[END]]]
            part = tables[members, first:end]
            strangers = np.flatnonzero((part != part[0]).any(axis=1))
            if len(strangers):
                raise GroupMembersDoNotSharePrefix(number, int(self.order[chunk[BEGIN] + strangers[0]]))
            if _chunk_digest(ledger, group, part[0], first) != self.digests[number]:
                raise ChunkDigestMismatch(number)


def check_chunks(chunks: Array, sequences: int) -> None:
    """Whether chunks in preorder are a tree of half-open intervals whose rows follow each other (K148, K154).

    Raises: CoverageOutOfRange, ChildOutsideParentCoverage, KeyCoveredTwice, ChunkGap.
    """
    open_chunks: list[list[int]] = []
    for number, chunk in enumerate(chunks.tolist()):
        first, end, begin, stop, level = chunk
        if not 0 <= begin < stop <= sequences:
            raise CoverageOutOfRange(number, begin, stop, sequences)
        del open_chunks[level:]
        if len(open_chunks) < level:
            raise ChildOutsideParentCoverage(number)
        if level and not (open_chunks[-1][BEGIN] <= begin and stop <= open_chunks[-1][END]):
            raise ChildOutsideParentCoverage(number)
        above = open_chunks[-1][END_ROW] if level else 0
        if first < above or end <= first:
            raise KeyCoveredTwice(begin, first)
        if first > above:
            raise ChunkGap(begin, above)
        open_chunks.append(chunk)
    for number, chunk in enumerate(chunks.tolist()):
        for earlier in chunks[:number].tolist():
            both = min(chunk[END], earlier[END]) - max(chunk[BEGIN], earlier[BEGIN])
            if both > 0 and chunk[FIRST_ROW] < earlier[END_ROW] and earlier[FIRST_ROW] < chunk[END_ROW]:
                raise KeyCoveredTwice(chunk[BEGIN], chunk[FIRST_ROW])


def coverage_of(paths: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """The half-open interval of sequences through each named chunk. Raises: CoverageNotContiguous."""
    positions: dict[str, list[int]] = {}
    for sequence, path in enumerate(paths):
        for chunk in path:
            positions.setdefault(chunk, []).append(sequence)
    for chunk, found in positions.items():
        if found != list(range(found[0], found[-1] + 1)):
            raise CoverageNotContiguous(chunk, tuple(found))
    return {chunk: (found[0], found[-1] + 1) for chunk, found in positions.items()}


def check_counts(parts: Sequence[tuple[int, int]], sequence: int, context_rows: int) -> None:
    """Whether half-open row ranges cover [0, context_rows) once, whatever their order (K148, K151).

    Raises: KeyCoveredTwice, KeyNotCovered, ValidCountMismatch (rows beyond the context).
    """
    reached = 0
    for first, end in sorted(part for part in parts if part[0] < part[1]):
        if first < reached:
            raise KeyCoveredTwice(sequence, first)
        if first > reached:
            raise KeyNotCovered(sequence, reached, context_rows)
        reached = end
    if reached < context_rows:
        raise KeyNotCovered(sequence, reached, context_rows)
    if reached > context_rows:
        raise ValidCountMismatch(sequence, reached, context_rows)


def take_snapshot(
    ledger: Ledger, handles: Sequence[RequestHandle], contract: str, group: int = 0
) -> ExecutionSnapshot:
    """What the sequences of a dispatched step share in one cache group, by the ledger as it stands.

    Only whole blocks before a sequence's first row of the step count. Private chunks are included, so that chunks and
    what follows them cover each context. Raises: StaleRequestGeneration, ExecutionWithoutReceipt, UnprotectedPath.
    """
    pool, requests = ledger.state.pools[group], ledger.state.requests
    tables = requests.all_tables[group]
    slots = np.array([requests.slot_of(handle) for handle in handles], dtype=np.int64)
    idle = np.flatnonzero(requests.flight_step.array[slots] == 0) if len(slots) else slots
    if len(idle):
        raise ExecutionWithoutReceipt(int(idle[0]))
    first_rows = requests.valid_rows.array[slots].astype(np.int64)
    # A window's blocks leave one by one, and cells that left are all alike: nothing is shared as a chunk there.
    shareable = np.zeros_like(first_rows) if pool.window else first_rows
    order, chunks = chunks_of_tables(tables, slots, shareable, pool.block_size)
    digests = np.zeros(len(chunks), dtype=np.uint64)
    readers = chunks[:, END] - chunks[:, BEGIN]
    for number in np.flatnonzero(readers > 1).tolist():
        first_row, end_row, begin = chunks[number, :END].tolist()
        first, end = first_row // pool.block_size, end_row // pool.block_size
        part = tables[slots[order[begin]], first:end]
        references = pool.ref.array[part]
        if references.min() < readers[number]:
            short = int(references.argmin())
            raise UnprotectedPath(int(part[short]), int(references[short]), int(readers[number]))
        digests[number] = _chunk_digest(ledger, group, part, first)
    return ExecutionSnapshot(
        log_index=ledger.log_index,
        machine_digest=ledger.machine_digest,
        contract=contract,
        handles=tuple(handles),
        order=order,
        first_rows=first_rows,
        chunks=chunks,
        digests=digests,
    )


def chunks_of_tables(tables: Array, slots: Array, rows: Array, block_size: int) -> tuple[Array, Array]:
    """(order int64 [sequences], chunks int64 [n, 5]) of sequences whose tables stand in `slots` of `tables`.

    Whole blocks of the first `rows` (int64 [sequences]) count. Asks no ledger, so it says nothing about who may read.
    """
    order = np.arange(len(slots), dtype=np.int64)
    chunks = np.empty((2 * len(slots), 5), dtype=np.int64)
    found = loops.chunk_tree(tables, slots, rows // block_size, order, chunks)
    chunks[:found, : loops.BEGIN] *= block_size
    return order, chunks[:found].copy()


def shares_anything(ledger: Ledger, handles: Sequence[RequestHandle], group: int = 0) -> bool:
    """Whether two sequences of a dispatched step begin with the same block: where not, a snapshot has nothing to offer."""
    requests = ledger.state.requests
    if ledger.state.pools[group].window:
        return False
    slots = np.array([handle.slot for handle in handles], dtype=np.int64)
    limits = requests.valid_rows.array[slots] // ledger.state.pools[group].block_size
    return not loops.unshared(requests.all_tables[group], slots, limits)


def _chunk_digest(ledger: Ledger, group: int, blocks: Array, first: int) -> np.uint64:
    """Accidental-error digest of a run of blocks with their generations, from logical block `first` on."""
    generations = ledger.state.pools[group].generation.array[blocks].astype(np.uint64)
    places = np.arange(first, first + len(blocks), dtype=np.uint64) << np.uint64(40)
    words = mix_words(places ^ blocks.astype(np.uint64) ^ mix_words(generations))
    return np.add.reduce(words, dtype=np.uint64)
