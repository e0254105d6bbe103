"""Byte ledgers of the pool: blocks in use and idle, memory held, metadata, padding.

Owns the figures that concern a pool and no request. Invariant: idle capacity is capacity, bytes held are not
bytes in use, metadata is never payload, and the parts of each ledger sum to its whole.
Source: contracts K024 to K026; LEDGER "Virtual pages".
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from .byte_errors import MetadataRecordMissing, PoolDoesNotReconcile
from .checked import checked_int, checked_slots
from .quantities import HeldBytes, MetadataBytes, PaddingBytes, PhysicalBytes, RowBytes

METADATA_RECORDS = ("map", "descriptor", "hash", "tail", "free", "fixed")
"""Map entries, block descriptors, cached hashes, request tails, free-queue items, fixed bytes (count 1)."""


class PoolLedger(msgspec.Struct, frozen=True):
    """Provisioned = live + idle, in blocks and bytes; `held` is what the process keeps for all of it."""

    total_blocks: int
    live_blocks: int
    idle_blocks: int
    provisioned: PhysicalBytes
    live: PhysicalBytes
    idle: PhysicalBytes
    held: HeldBytes


class GaugeLedger(msgspec.Struct, frozen=True):
    """A pool's exclusive states in blocks and bytes."""

    blocks: dict[str, int]
    bytes: dict[str, PhysicalBytes]
    total_blocks: int
    total: PhysicalBytes


class MetadataPart(msgspec.Struct, frozen=True):
    """One kind of record: how many, how large, and where they are."""

    count: int
    record_bytes: int
    placement: str
    total: MetadataBytes


class MetadataLedger(msgspec.Struct, frozen=True):
    """All kinds of records; beside the payload, not in it."""

    parts: dict[str, MetadataPart]
    total: MetadataBytes


class PageLedger(msgspec.Struct, frozen=True):
    """Pages whose rows do not fill them."""

    pages: int
    page_bytes: int
    payload: PhysicalBytes
    padding: PaddingBytes
    total_bytes: int


def pool_ledger(
    total_blocks: int,
    live_blocks: int,
    block_size: int,
    row: RowBytes,
    held_bytes: int | None = None,
    idle_blocks: int | None = None,
) -> PoolLedger:
    """`held_bytes`: what the process keeps for the pool, its own figure where given, else the provision.

    Raises: PoolDoesNotReconcile, SlotIdOverflow, bad input.
    """
    checked_slots(total_blocks, block_size)
    total, live = checked_int("total_blocks", total_blocks), checked_int("live_blocks", live_blocks)
    idle = total - live if idle_blocks is None else checked_int("idle_blocks", idle_blocks)
    if idle < 0 or live + idle != total:
        raise PoolDoesNotReconcile(total, (live, idle))
    block_bytes = block_size * row.value
    provisioned, used, unused = (PhysicalBytes(count * block_bytes) for count in (total, live, idle))
    held = HeldBytes(total * block_bytes if held_bytes is None else held_bytes)
    return PoolLedger(total, live, idle, provisioned, used, unused, held)


def gauge_ledger(blocks: Mapping[str, int], total_blocks: int, block_bytes: int) -> GaugeLedger:
    """Bytes of exclusive states ("free", "evictable", ...). Raises: PoolDoesNotReconcile, bad input."""
    parts = {name: checked_int(name, count) for name, count in blocks.items()}
    total = checked_int("total_blocks", total_blocks)
    each = checked_int("block_bytes", block_bytes)
    if sum(parts.values()) != total:
        raise PoolDoesNotReconcile(total, tuple(parts.values()))
    figures = {name: PhysicalBytes(count * each) for name, count in parts.items()}
    return GaugeLedger(parts, figures, total, PhysicalBytes(total * each))


def metadata_ledger(
    counts: Mapping[str, int], record_bytes: Mapping[str, int], placements: Mapping[str, str]
) -> MetadataLedger:
    """Every record of `METADATA_RECORDS` with its count, size and placement ("fixed" is counted once).

    Raises: MetadataRecordMissing, bad input.
    """
    given = {"count": {"fixed": 1, **counts}, "record_bytes": record_bytes, "placement": placements}
    for record in (*METADATA_RECORDS, *sorted(set(counts) | set(record_bytes))):
        for missing, values in given.items():
            if record not in values:
                raise MetadataRecordMissing(record, missing)
    parts: dict[str, MetadataPart] = {}
    for record in record_bytes:
        count, size = checked_int(record, given["count"][record]), checked_int(record, record_bytes[record])
        parts[record] = MetadataPart(count, size, placements[record], MetadataBytes(count * size))
    return MetadataLedger(parts, MetadataBytes(sum(part.total.value for part in parts.values())))


def page_ledger(pages: int, page_tokens: int, row: RowBytes, granularity_bytes: int) -> PageLedger:
    """Pages of `page_tokens` rows, each rounded up to the backend's granularity. Raises: bad input."""
    count, rows = checked_int("pages", pages), checked_int("page_tokens", page_tokens, least=1)
    checked_slots(count, rows)
    grain = checked_int("granularity_bytes", granularity_bytes, least=1)
    payload = rows * row.value
    page_bytes = -(-payload // grain) * grain
    padding = PaddingBytes(count * (page_bytes - payload))
    return PageLedger(count, page_bytes, PhysicalBytes(count * payload), padding, count * page_bytes)
