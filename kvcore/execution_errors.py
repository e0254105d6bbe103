"""Refusals of execution over shared prefixes, one class a reason.

Invariant: no K/V row was read and no output written. Source: contracts K148, K150, K151, K153 to K159.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .contract_errors import ContractRefusal


@dataclass(eq=False)
class StaleSnapshot(ContractRefusal):
    """The ledger has gone on since the snapshot was taken (K153)."""

    log_index: int
    current_log_index: int
    reason: ClassVar[str] = "stale_snapshot"


@dataclass(eq=False)
class SequenceOrderChanged(ContractRefusal):
    """The step's sequences are not those of the snapshot, in its order (K153)."""

    position: int
    reason: ClassVar[str] = "sequence_order_changed"


@dataclass(eq=False)
class ChunkDigestMismatch(ContractRefusal):
    """A chunk's blocks or their generations are not those the snapshot was taken of (K153)."""

    chunk: int
    reason: ClassVar[str] = "chunk_digest_mismatch"


@dataclass(eq=False)
class TensorContractMismatch(ContractRefusal):
    """The pool's layout is not the one the snapshot was taken for (K153)."""

    expected: str
    found: str
    reason: ClassVar[str] = "tensor_contract_mismatch"


@dataclass(eq=False)
class CoverageOutOfRange(ContractRefusal):
    """A chunk covers no sequence, or one outside the batch (K154)."""

    chunk: int
    begin: int
    end: int
    sequences: int
    reason: ClassVar[str] = "coverage_out_of_range"


@dataclass(eq=False)
class CoverageNotContiguous(ContractRefusal):
    """The sequences that pass through a chunk are no half-open interval in the given order (K154)."""

    chunk: str
    positions: tuple[int, ...]
    reason: ClassVar[str] = "coverage_not_contiguous"


@dataclass(eq=False)
class ChildOutsideParentCoverage(ContractRefusal):
    """A chunk covers a sequence that its parent does not (K154)."""

    chunk: int
    reason: ClassVar[str] = "child_outside_parent_coverage"


@dataclass(eq=False)
class KeyCoveredTwice(ContractRefusal):
    """Two chunks of one sequence hold the same row (K148)."""

    sequence: int
    row: int
    reason: ClassVar[str] = "key_covered_twice"


@dataclass(eq=False)
class ChunkGap(ContractRefusal):
    """A chunk does not begin where its parent ends (K148)."""

    sequence: int
    row: int
    reason: ClassVar[str] = "chunk_gap"


@dataclass(eq=False)
class KeyNotCovered(ContractRefusal):
    """A row that a sequence must see is in none of its partitions (K148)."""

    sequence: int
    covered_rows: int
    context_rows: int
    reason: ClassVar[str] = "key_not_covered"


@dataclass(eq=False)
class ValidCountMismatch(ContractRefusal):
    """The keys counted over a sequence's partitions do not add up to its context (K151)."""

    sequence: int
    counted: int
    context_rows: int
    reason: ClassVar[str] = "valid_count_mismatch"


@dataclass(eq=False)
class GroupSizeNotDivisible(ContractRefusal):
    """Groups of one level differ in size, so the level is no single batched product (K155)."""

    level: int
    sizes: tuple[int, ...]
    reason: ClassVar[str] = "group_size_not_divisible"


@dataclass(eq=False)
class GroupMembersDoNotSharePrefix(ContractRefusal):
    """A sequence under a shared chunk reads other blocks there (K155)."""

    chunk: int
    sequence: int
    reason: ClassVar[str] = "group_members_do_not_share_prefix"


@dataclass(eq=False)
class PartialBufferTooSmall(ContractRefusal):
    """The saved states of all shared chunks do not fit the buffer (K157)."""

    needed_rows: int
    buffer_rows: int
    reason: ClassVar[str] = "partial_buffer_too_small"


@dataclass(eq=False)
class ExecutionWithoutReceipt(ContractRefusal):
    """A sequence has no dispatched step, so no receipt says that its rows may be read (K159)."""

    sequence: int
    reason: ClassVar[str] = "execution_without_receipt"


@dataclass(eq=False)
class UnprotectedPath(ContractRefusal):
    """A shared block is referenced by fewer requests than are to read it (K159)."""

    block: int
    references: int
    readers: int
    reason: ClassVar[str] = "unprotected_path"
