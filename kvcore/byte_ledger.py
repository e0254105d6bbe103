"""Byte ledgers of requests and blocks: rows, reservations, request views, unique storage, savings.

Owns the exact arithmetic and the identities between the ledgers. Invariant: integers only, each figure of a
kind of its own (quantities.py), so that a view of requests is never added to storage. Requests and blocks are
vectors; the work is vectorised over them.
Source: contracts K018 to K023; 0x02A to 0x02D.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .address_errors import UnknownPhysicalId
from .byte_errors import (
    BlockCountMismatch,
    GlobalHeadsOnRank,
    QuantitiesMixed,
    ReferencesCountedAsBlocks,
    RowBytesMismatch,
    RowsDisagree,
    RowsExceedReservation,
    SharedRowsCountedAsTail,
    UndeclaredShardMultiplication,
)
from .checked import SLOT_ID_LIMIT, Array, checked_array, checked_int, same_length
from .contract_errors import EmptyInput
from .manifests import GroupLayout
from .quantities import (
    AvoidedCapacityBytes,
    BlockReferences,
    PhysicalBytes,
    RequestBytes,
    RowBytes,
    SavedPayloadBytes,
    UniqueBlocks,
)


class GroupRow(msgspec.Struct, frozen=True):
    """Geometry of one token's row in one cache group of one rank."""

    name: str
    num_layers: int
    kv_heads: int
    head_dim: int
    k_scalar_bytes: int
    v_scalar_bytes: int

    def __post_init__(self) -> None:
        for field in self.__struct_fields__[1:]:
            checked_int(field, getattr(self, field), least=1)


class RectangularLedger(msgspec.Struct, frozen=True):
    """Reference payload against what was reserved for each request."""

    requests: int
    logical_rows: int
    reserved_rows: int
    slack_rows: int
    logical: RequestBytes
    reserved: RequestBytes
    slack: RequestBytes


class RequestViewLedger(msgspec.Struct, frozen=True):
    """Every request's blocks counted alone; says nothing about storage."""

    references: BlockReferences
    rows: int
    slots: int
    tail_slots: int
    tail_slots_by_request: tuple[int, ...]
    payload: RequestBytes
    capacity: RequestBytes
    tail: RequestBytes


class UniquePhysicalLedger(msgspec.Struct, frozen=True):
    """The union of the blocks that requests name, each with its own valid rows."""

    block_ids: tuple[int, ...]
    blocks: UniqueBlocks
    rows: int
    slots: int
    tail_slots: int
    materialised: PhysicalBytes
    capacity: PhysicalBytes
    tail: PhysicalBytes


class TailView(msgspec.Struct, frozen=True):
    """Where each request's unseen slots are: valid rows of a longer sharer, or empty."""

    hidden_valid_slots: tuple[int, ...]
    empty_slots: tuple[int, ...]


class Savings(msgspec.Struct, frozen=True):
    """Two answers to two questions; they need not agree."""

    payload: SavedPayloadBytes
    capacity: AvoidedCapacityBytes


def row_bytes(group: GroupRow) -> RowBytes:
    """layers x heads x width x (K + V); a factor of two only where K and V are equally wide."""
    scalars = group.num_layers * group.kv_heads * group.head_dim
    return RowBytes(scalars * (group.k_scalar_bytes + group.v_scalar_bytes))


def rank_row_bytes(groups: Sequence[GroupRow]) -> RowBytes:
    """Sum over the groups of one rank. Raises: EmptyInput."""
    if not groups:
        raise EmptyInput("groups")
    return RowBytes(sum(row_bytes(group).value for group in groups))


def group_row(layout: GroupLayout) -> GroupRow:
    """A layout's row."""
    widths = layout.keys.scalar_bytes, layout.values.scalar_bytes
    return GroupRow(layout.name, len(layout.layers), layout.kv_heads, layout.head_dim, *widths)


def check_row_bytes(group: GroupRow, declared_bytes: int) -> RowBytes:
    """Raises: RowBytesMismatch."""
    derived = row_bytes(group)
    if checked_int("declared_bytes", declared_bytes) != derived.value:
        raise RowBytesMismatch(group.name, declared_bytes, derived.value)
    return derived


def check_local_heads(group: GroupRow, rank: int, partition: Sequence[int]) -> None:
    """The row's heads are those of this rank. Raises: GlobalHeadsOnRank, IdOutOfRange."""
    local = partition[checked_int("rank", rank, limit=len(partition))]
    if group.kv_heads != local:
        raise GlobalHeadsOnRank(rank, group.kv_heads, local)


def model_row_bytes(rank_row: RowBytes, kind: str, partition: Sequence[int]) -> RowBytes:
    """Rank row x shards. `kind` is "disjoint", "replicated" or "pipeline".

    Raises: UndeclaredShardMultiplication unless the split of heads is declared disjoint and is even.
    """
    heads = tuple(checked_array("partition", partition, least=1).tolist())
    if kind != "disjoint" or len(set(heads)) != 1:
        raise UndeclaredShardMultiplication(kind, heads)
    return RowBytes(rank_row.value * len(heads))


def rectangular_ledger(
    rows: Sequence[int] | Array, reserved_rows: Sequence[int] | Array, row: RowBytes
) -> RectangularLedger:
    """`rows` and `reserved_rows` [requests]. Raises: RowsExceedReservation, LengthMismatch, bad input."""
    held = checked_array("rows", rows, limit=SLOT_ID_LIMIT)
    reserved = checked_array("reserved_rows", reserved_rows, limit=SLOT_ID_LIMIT)
    same_length("reserved_rows", len(held), reserved)
    over = np.flatnonzero(held > reserved)
    if len(over):
        first = int(over[0])
        raise RowsExceedReservation(first, int(held[first]), int(reserved[first]))
    per_row = _per_row(row)
    logical, total = int(held.sum()), int(reserved.sum())
    figures = (RequestBytes(count * per_row) for count in (logical, total, total - logical))
    return RectangularLedger(len(held), logical, total, total - logical, *figures)


def blocks_of(rows: Array, block_size: int) -> Array:
    """ceil(rows / block_size) of each entry."""
    return -(-rows // block_size)


def request_view_ledger(
    rows: Sequence[int] | Array,
    block_size: int,
    row: RowBytes,
    table_blocks: Sequence[int] | Array | None = None,
) -> RequestViewLedger:
    """`rows` [requests]; `table_blocks` [requests], where tables exist, must be what the rows need.

    Raises: BlockCountMismatch, LengthMismatch, bad input.
    """
    held = checked_array("rows", rows, limit=SLOT_ID_LIMIT)
    page = checked_int("block_size", block_size, least=1, limit=SLOT_ID_LIMIT)
    needed = blocks_of(held, page)
    if table_blocks is not None:
        found = checked_array("table_blocks", table_blocks, limit=SLOT_ID_LIMIT)
        same_length("table_blocks", len(held), found)
        wrong = np.flatnonzero(found != needed)
        if len(wrong):
            first = int(wrong[0])
            raise BlockCountMismatch(first, int(held[first]), int(needed[first]), int(found[first]))
    tails = needed * page - held
    blocks, total, unseen, per_row = int(needed.sum()), int(held.sum()), int(tails.sum()), _per_row(row)
    figures = (RequestBytes(count * per_row) for count in (total, blocks * page, unseen))
    return RequestViewLedger(
        BlockReferences(blocks), total, blocks * page, unseen, tuple(tails.tolist()), *figures
    )


def unique_physical_ledger(
    tables: Sequence[Sequence[int] | Array],
    block_ids: Sequence[int] | Array,
    valid_rows: Sequence[int] | Array,
    block_size: int,
    row: RowBytes,
) -> UniquePhysicalLedger:
    """Storage of the blocks that `tables` [requests][blocks] name.

    `block_ids` and `valid_rows` [blocks] describe them. Raises: UnknownPhysicalId, LengthMismatch, bad input.
    """
    page = checked_int("block_size", block_size, least=1, limit=SLOT_ID_LIMIT)
    named = np.unique(_joined(tables))
    rows = _rows_of(named, block_ids, valid_rows, page)
    total, slots, per_row = int(rows.sum()), len(named) * page, _per_row(row)
    figures = (PhysicalBytes(count * per_row) for count in (total, slots, slots - total))
    ids = tuple(named.tolist())
    return UniquePhysicalLedger(ids, UniqueBlocks(len(ids)), total, slots, slots - total, *figures)


def tail_view(
    rows: Sequence[int] | Array,
    tables: Sequence[Sequence[int] | Array],
    block_ids: Sequence[int] | Array,
    valid_rows: Sequence[int] | Array,
    block_size: int,
) -> TailView:
    """Splits each request's unseen slots. Raises: BlockCountMismatch, RowsDisagree, as the ledgers do."""
    held = checked_array("rows", rows, limit=SLOT_ID_LIMIT)
    page = checked_int("block_size", block_size, least=1, limit=SLOT_ID_LIMIT)
    same_length("tables", len(held), tables)
    joined, lengths = _joined(tables), np.array([len(table) for table in tables], dtype=np.int64)
    request_view_ledger(held, page, RowBytes(0), lengths)
    owner = np.repeat(np.arange(len(held)), lengths)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    visible = np.clip(held[owner] - (np.arange(len(joined)) - first) * page, 0, page)
    valid = _rows_of(joined, block_ids, valid_rows, page)
    short = np.flatnonzero(visible > valid)
    if len(short):
        at = int(short[0])
        raise RowsDisagree(int(owner[at]), int(joined[at]), int(visible[at]), int(valid[at]))
    hidden = np.zeros(len(held), dtype=np.int64)
    np.add.at(hidden, owner, valid - visible)
    empty = lengths * page - held - hidden
    return TailView(tuple(hidden.tolist()), tuple(empty.tolist()))


def savings(view: RequestViewLedger, storage: UniquePhysicalLedger) -> Savings:
    """What sharing saved: rows that are stored once, and blocks that were not taken."""
    payload = SavedPayloadBytes(view.payload.value - storage.materialised.value)
    return Savings(payload, AvoidedCapacityBytes(view.capacity.value - storage.capacity.value))


def check_unique_blocks(claimed_blocks: int, storage: UniquePhysicalLedger, view: RequestViewLedger) -> None:
    """A count of blocks is a count of distinct ones. Raises: ReferencesCountedAsBlocks."""
    if checked_int("claimed_blocks", claimed_blocks) != storage.blocks.value:
        claim = f"{claimed_blocks} claimed, {view.references!r}"
        raise ReferencesCountedAsBlocks(claim, repr(storage.blocks))


def check_tail_claim(claimed_slots: int, storage: UniquePhysicalLedger, view: TailView) -> None:
    """A tail of storage holds no valid row. Raises: SharedRowsCountedAsTail."""
    if checked_int("claimed_slots", claimed_slots) != storage.tail_slots:
        raise SharedRowsCountedAsTail(claimed_slots, storage.tail_slots, sum(view.hidden_valid_slots))


def identities(
    rectangle: RectangularLedger, view: RequestViewLedger, storage: UniquePhysicalLedger, saved: Savings
) -> dict[str, tuple[int, int, int]]:
    """The five additive identities as (whole, part, part) in bytes; each whole is the sum of its parts."""
    return {
        "reserved = logical + slack": _triple(rectangle.reserved, rectangle.logical, rectangle.slack),
        "view capacity = payload + tail": _triple(view.capacity, view.payload, view.tail),
        "storage = materialised + tail": _triple(storage.capacity, storage.materialised, storage.tail),
        "view capacity = storage + avoided": _triple(view.capacity, storage.capacity, saved.capacity),
        "payload = materialised + saved": _triple(view.payload, storage.materialised, saved.payload),
    }


def _triple(
    whole: RequestBytes | PhysicalBytes,
    part: RequestBytes | PhysicalBytes,
    other: RequestBytes | PhysicalBytes | SavedPayloadBytes | AvoidedCapacityBytes,
) -> tuple[int, int, int]:
    return whole.value, part.value, other.value


def _per_row(row: RowBytes) -> int:
    if type(row) is not RowBytes:
        raise QuantitiesMixed("RowBytes", repr(row))
    return row.value


def _joined(tables: Sequence[Sequence[int] | Array]) -> Array:
    parts = [checked_array("tables", table, limit=SLOT_ID_LIMIT) for table in tables]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _rows_of(
    blocks: Array, block_ids: Sequence[int] | Array, valid_rows: Sequence[int] | Array, block_size: int
) -> Array:
    """Valid rows of each of `blocks`."""
    known = checked_array("block_ids", block_ids, limit=SLOT_ID_LIMIT)
    rows = checked_array("valid_rows", valid_rows, limit=block_size + 1)
    same_length("valid_rows", len(known), rows)
    order = np.argsort(known, kind="stable")
    at = np.searchsorted(known, blocks, sorter=order)
    found = order[np.minimum(at, len(known) - 1)] if len(known) else np.zeros(len(blocks), dtype=np.int64)
    absent = np.flatnonzero(known[found] != blocks) if len(known) else np.arange(len(blocks))
    if len(absent):
        raise UnknownPhysicalId("", int(blocks[absent[0]]))
    return rows[found]
