"""Fragmentation as a taxonomy, model values, and the cost of a copy.

Owns the figures that are easily added to what they are no part of. Invariant: slack, tails, holes,
over-reservation and duplication stand beside each other and are never summed; a ratio has no bytes and, with
nothing free, no value; an expectation is marked as a model's.
Source: contracts K027 to K029, K056, K242, K244; 0x02F, 0x02G, 0x05A.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec

from .byte_errors import ExtentsExceedArena
from .byte_ledger import RectangularLedger, UniquePhysicalLedger
from .checked import Array, checked_array, checked_int
from .quantities import (
    CapacityBytes,
    ExpectedBytes,
    ExpectedSlots,
    ExternalRatio,
    PhysicalBytes,
    RequestBytes,
    RowBytes,
    TrafficBytes,
)


class Arena(msgspec.Struct, frozen=True):
    """A contiguous arena's holes, and whether a candidate fits in one of them."""

    free_bytes: int
    largest_free_bytes: int
    ratio: ExternalRatio
    contiguous_fits: bool


class ExpectedTail(msgspec.Struct, frozen=True):
    """Unused slots of a request's last block in the mean, if its rows are uniform over 1..block_size."""

    assumption: str
    slots: ExpectedSlots
    bytes: ExpectedBytes


class Fragmentation(msgspec.Struct, frozen=True):
    """Five losses with five causes. They are not parts of one sum."""

    reservation_slack: RequestBytes
    tail: PhysicalBytes
    external: ExternalRatio
    over_reservation: RequestBytes
    duplication: PhysicalBytes


class CopyCost(msgspec.Struct, frozen=True):
    """One copy-on-write of a tail: rows that move, and the block they need. `amplification` is traffic / row."""

    copied_rows: int
    payload: TrafficBytes
    read_and_write: TrafficBytes
    append: TrafficBytes
    traffic: TrafficBytes
    destination: CapacityBytes
    amplification: int
    capacity_amplification: Fraction | None


def external_ratio(free_extents_bytes: Sequence[int] | Array) -> ExternalRatio:
    """1 - largest / total over the free extents; without a free byte it has no value (K028)."""
    extents = checked_array("free_extents_bytes", free_extents_bytes).tolist()
    total = sum(extents)
    return ExternalRatio(1 - Fraction(max(extents), total) if total else None, total)


def arena(
    arena_bytes: int,
    allocated_bytes: int,
    free_extents_bytes: Sequence[int] | Array,
    candidate_bytes: int,
) -> Arena:
    """One snapshot of an arena. Raises: ExtentsExceedArena, bad input."""
    extents = checked_array("free_extents_bytes", free_extents_bytes).tolist()
    free, largest = sum(extents), max(extents, default=0)
    whole = checked_int("arena_bytes", arena_bytes)
    if checked_int("allocated_bytes", allocated_bytes) + free != whole:
        raise ExtentsExceedArena(whole, allocated_bytes, free)
    fits = checked_int("candidate_bytes", candidate_bytes) <= largest
    return Arena(free, largest, external_ratio(extents), fits)


def blocks_needed(candidate_bytes: int, block_bytes: int) -> int:
    """Interchangeable blocks that hold the candidate. Raises: bad input."""
    return -(
        -checked_int("candidate_bytes", candidate_bytes) // checked_int("block_bytes", block_bytes, least=1)
    )


def expected_tail(block_size: int, row: RowBytes) -> ExpectedTail:
    """(P - 1) / 2 slots under uniform occupancy: a model's value (K029). Raises: bad input."""
    page = checked_int("block_size", block_size, least=1)
    slots = Fraction(page - 1, 2)
    return ExpectedTail(f"uniform on 1..{page}", ExpectedSlots(slots), ExpectedBytes(slots * row.value))


def largest_tail(block_size: int, row: RowBytes) -> tuple[int, PhysicalBytes]:
    """Most slots, and bytes, that one partial block leaves unused."""
    slots = checked_int("block_size", block_size, least=1) - 1
    return slots, PhysicalBytes(slots * row.value)


def fragmentation(
    rectangle: RectangularLedger,
    storage: UniquePhysicalLedger,
    free_extents_bytes: Sequence[int] | Array,
    final_rows: Sequence[int] | Array,
    duplicated_rows: int,
    row: RowBytes,
) -> Fragmentation:
    """The taxonomy of one snapshot.

    `final_rows` [requests]: rows the requests end with, so that over-reservation is what no row will ever use;
    `duplicated_rows`: rows stored more than once with the same content. Raises: NegativeCount, bad input.
    """
    ends = int(checked_array("final_rows", final_rows).sum())
    unused = checked_int("reserved minus final rows", rectangle.reserved_rows - ends)
    return Fragmentation(
        reservation_slack=rectangle.slack,
        tail=storage.tail,
        external=external_ratio(free_extents_bytes),
        over_reservation=RequestBytes(unused * row.value),
        duplication=PhysicalBytes(checked_int("duplicated_rows", duplicated_rows) * row.value),
    )


def copy_cost(valid_tail_rows: int, block_size: int, row: RowBytes) -> CopyCost:
    """A divergence inside a shared tail: copies exactly its valid rows, then appends one (K056).

    At a boundary (no valid row) nothing is copied, and the ratio of capacity to payload has no value (K244).
    """
    page = checked_int("block_size", block_size, least=1)
    rows = checked_int("valid_tail_rows", valid_tail_rows, limit=page)
    moved = TrafficBytes(2 * rows * row.value)
    append = TrafficBytes(row.value)
    destination = CapacityBytes(page * row.value if rows else 0)
    capacity = Fraction(page, rows) if rows else None
    payload = TrafficBytes(rows * row.value)
    return CopyCost(rows, payload, moved, append, moved + append, destination, 2 * rows + 1, capacity)
