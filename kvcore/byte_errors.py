"""Refusals of the byte ledgers and of pool sizing, one class a reason.

Invariant: nothing was computed; the fields name both sides of the contradiction. Source: contracts K018 to
K030, K056.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .contract_errors import ContractRefusal


@dataclass(eq=False)
class RowBytesMismatch(ContractRefusal):
    """A declared row is not layers x local heads x width x (K bytes + V bytes) (K018)."""

    group: str
    declared_bytes: int
    row_bytes: int
    reason: ClassVar[str] = "row_bytes_mismatch"


@dataclass(eq=False)
class GlobalHeadsOnRank(ContractRefusal):
    """A rank's row was given the model's KV heads, or another rank's, instead of its own (K018)."""

    rank: int
    declared_heads: int
    local_heads: int
    reason: ClassVar[str] = "global_heads_on_rank"


@dataclass(eq=False)
class UndeclaredShardMultiplication(ContractRefusal):
    """One rank's row times the world is the model's row only for an even, disjoint head split (K019)."""

    kind: str
    partition: tuple[int, ...]
    reason: ClassVar[str] = "undeclared_shard_multiplication"


@dataclass(eq=False)
class RowsExceedReservation(ContractRefusal):
    """A request holds more rows than were reserved for it (K020)."""

    request: int
    rows: int
    reserved_rows: int
    reason: ClassVar[str] = "rows_exceed_reservation"


@dataclass(eq=False)
class BlockCountMismatch(ContractRefusal):
    """A table does not have ceil(rows / block_size) blocks (K021)."""

    request: int
    rows: int
    expected_blocks: int
    blocks: int
    reason: ClassVar[str] = "block_count_mismatch"


@dataclass(eq=False)
class ReferencesCountedAsBlocks(ContractRefusal):
    """Requests' references to blocks were taken for blocks (K021)."""

    left: str
    right: str
    reason: ClassVar[str] = "references_counted_as_blocks"


@dataclass(eq=False)
class SharedRowsCountedAsTail(ContractRefusal):
    """A claimed tail holds slots that are valid rows of a longer sharer (K022)."""

    claimed_slots: int
    tail_slots: int
    hidden_valid_slots: int
    reason: ClassVar[str] = "shared_rows_counted_as_tail"


@dataclass(eq=False)
class RowsDisagree(ContractRefusal):
    """A request sees more rows of a block than the block holds (K022, K034)."""

    request: int
    block: int
    visible_rows: int
    valid_rows: int
    reason: ClassVar[str] = "row_not_materialised"


@dataclass(eq=False)
class SavingsLedgersConflated(ContractRefusal):
    """Saved payload and avoided capacity were added or compared (K023)."""

    left: str
    right: str
    reason: ClassVar[str] = "savings_ledgers_conflated"


@dataclass(eq=False)
class PoolDoesNotReconcile(ContractRefusal):
    """The parts of a pool do not add up to it, or one of them is negative (K024)."""

    total_blocks: int
    parts_blocks: tuple[int, ...]
    reason: ClassVar[str] = "pool_does_not_reconcile"


@dataclass(eq=False)
class ReservedReportedAsLive(ContractRefusal):
    """Bytes that a process holds were taken for bytes of live K/V (K025)."""

    left: str
    right: str
    reason: ClassVar[str] = "reserved_reported_as_live"


@dataclass(eq=False)
class MetadataRecordMissing(ContractRefusal):
    """A record of the metadata ledger lacks its size, its count or its placement (K026)."""

    record: str
    missing: str
    reason: ClassVar[str] = "metadata_record_missing"


@dataclass(eq=False)
class MetadataMixedWithPayload(ContractRefusal):
    """Metadata bytes were added to K/V bytes (K026)."""

    left: str
    right: str
    reason: ClassVar[str] = "metadata_mixed_with_payload"


@dataclass(eq=False)
class ExternalRatioAddedToSlack(ContractRefusal):
    """The external fragmentation ratio was used as a number of bytes (K027)."""

    left: str
    right: str
    reason: ClassVar[str] = "external_ratio_added_to_slack"


@dataclass(eq=False)
class RatioWithoutFreeBytes(ContractRefusal):
    """Nothing is free, so the external ratio has no value (K028)."""

    free_bytes: int
    reason: ClassVar[str] = "ratio_without_free_bytes"


@dataclass(eq=False)
class ExtentsExceedArena(ContractRefusal):
    """Allocated and free extents are not the arena (K027)."""

    arena_bytes: int
    allocated_bytes: int
    free_bytes: int
    reason: ClassVar[str] = "extents_exceed_arena"


@dataclass(eq=False)
class ExpectationReportedAsObservation(ContractRefusal):
    """A model's expectation was added to or compared with a count (K029)."""

    left: str
    right: str
    reason: ClassVar[str] = "expectation_reported_as_observation"


@dataclass(eq=False)
class CapacityReportedAsTraffic(ContractRefusal):
    """Capacity of a copy's destination was taken for bytes that were moved (K056, K242)."""

    left: str
    right: str
    reason: ClassVar[str] = "capacity_reported_as_traffic"


@dataclass(eq=False)
class QuantitiesMixed(ContractRefusal):
    """Two quantities of different kinds were added, subtracted or compared."""

    left: str
    right: str
    reason: ClassVar[str] = "quantities_mixed"


@dataclass(eq=False)
class SplitNotWhole(ContractRefusal):
    """The shares of the groups do not name every group once, or do not sum to one."""

    groups: tuple[str, ...]
    shares: tuple[str, ...]
    total: str
    reason: ClassVar[str] = "split_not_whole"


@dataclass(eq=False)
class RanksDisagree(ContractRefusal):
    """Ranks name different cache groups or block sizes; no minimum over them means anything."""

    rank: int
    expected: str
    found: str
    reason: ClassVar[str] = "ranks_disagree"


@dataclass(eq=False)
class PoolBelowMinimum(ContractRefusal):
    """A rank's share of memory holds fewer blocks of a group than are required. No pool was sized."""

    rank: int
    group: str
    required_blocks: int
    affordable_blocks: int
    shortfall_bytes: int
    reason: ClassVar[str] = "pool_below_minimum"


@dataclass(eq=False)
class NegativeAvailableMemory(ContractRefusal):
    """What the process already holds exceeds its stated share of memory (K220). No pool was sized."""

    rank: int
    share_bytes: int
    held_bytes: int
    shortfall_bytes: int
    reason: ClassVar[str] = "negative_available_memory"


@dataclass(eq=False)
class MemoryNotFree(ContractRefusal):
    """The stated share is not free at this moment; the pool is not made smaller for it. No pool was sized."""

    rank: int
    needed_bytes: int
    free_bytes: int
    shortfall_bytes: int
    reason: ClassVar[str] = "memory_not_free"
