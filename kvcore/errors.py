"""Refusals of the ledger: one class a reason, raised while a command is planned.

Invariant: whoever catches a `LedgerRefusal` knows that nothing changed: no column, no digest, no log index.
Reasons are contract names (K-ids beside each class) where a contract names one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar


class LedgerRefusal(Exception):
    """A command or handle was refused; the ledger, its digests and its log index are unchanged."""

    reason: ClassVar[str] = ""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), tuple(self._fields().values())

    def __str__(self) -> str:
        return f"{self.reason}: " + ", ".join(f"{name}={value}" for name, value in self._fields().items())

    def _fields(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(eq=False)
class LogGap(LedgerRefusal):
    """A record further on than the next index was offered; records are missing. Unchanged."""

    expected_index: int
    index: int
    reason: ClassVar[str] = "log_gap"


@dataclass(eq=False)
class LogRepetition(LedgerRefusal):
    """A record that was applied before was offered again. Unchanged."""

    expected_index: int
    index: int
    reason: ClassVar[str] = "log_repetition"


@dataclass(eq=False)
class LogWithoutGenesis(LedgerRefusal):
    """The first record of a log must be Genesis. The ledger stays empty."""

    command: str
    reason: ClassVar[str] = "log_without_genesis"


@dataclass(eq=False)
class LogCorrupt(LedgerRefusal):
    """A recorded log is damaged from this record on; the records before it are whole. Nothing of it is applied."""

    record: int
    why: str
    reason: ClassVar[str] = "log_corrupt"


@dataclass(eq=False)
class LogTruncated(LedgerRefusal):
    """A recorded log ends in the middle of this record; the records before it are whole."""

    record: int
    reason: ClassVar[str] = "log_truncated"


@dataclass(eq=False)
class LogWorldMismatch(LedgerRefusal):
    """A recorded log belongs to another world, or contradicts its own Genesis. Nothing is applied."""

    world: str
    expected: str
    reason: ClassVar[str] = "log_world_mismatch"


@dataclass(eq=False)
class LogIncarnationMismatch(LedgerRefusal):
    """A recorded log belongs to another incarnation, or contradicts its own Genesis. Nothing is applied."""

    incarnation: str
    expected: str
    reason: ClassVar[str] = "log_incarnation_mismatch"


@dataclass(eq=False)
class LogFull(LedgerRefusal):
    """The recorded log has reached its bound. The record is not appended; the ledger has applied its command."""

    records: int
    written_bytes: int
    limit_bytes: int
    reason: ClassVar[str] = "log_full"


@dataclass(eq=False)
class LedgerBroken(LedgerRefusal):
    """An earlier commit was interrupted half-way. Digests and log index are those before it; replay the log."""

    log_index: int
    interrupted: str
    reason: ClassVar[str] = "ledger_broken"


@dataclass(eq=False)
class LedgerBusy(LedgerRefusal):
    """Another command is being applied, or the state is being read at rest. Unchanged; it may be sent again."""

    reason: ClassVar[str] = "ledger_busy"


@dataclass(eq=False)
class GenesisRepeated(LedgerRefusal):
    """A log has one Genesis, at index 0. Unchanged."""

    index: int
    reason: ClassVar[str] = "genesis_repeated"


@dataclass(eq=False)
class UnsupportedCacheGroups(LedgerRefusal):
    """A ledger keeps at least one cache group and a few at most. The ledger stays empty."""

    groups: int
    supported: int
    reason: ClassVar[str] = "unsupported_cache_groups"


@dataclass(eq=False)
class MalformedCommand(LedgerRefusal):
    """A field of the command cannot mean anything, whatever the state. Unchanged."""

    field: str
    value: str
    reason: ClassVar[str] = "malformed_command"


@dataclass(eq=False)
class EmptyPrompt(LedgerRefusal):
    """A prompt has at least one token (K095); refused before any length is subtracted. Unchanged."""

    transaction: int
    reason: ClassVar[str] = "empty_prompt"


@dataclass(eq=False)
class TokenOutOfRange(LedgerRefusal):
    """A token id is negative. Unchanged."""

    position: int
    token: int
    reason: ClassVar[str] = "token_out_of_range"


@dataclass(eq=False)
class FullSequenceDoesNotFit(LedgerRefusal):
    """The prompt is longer than the context, or than the whole pool (K224). Unchanged."""

    tokens: int
    limit_tokens: int
    reason: ClassVar[str] = "full_sequence_does_not_fit"


@dataclass(eq=False)
class StaleNamespaceGeneration(LedgerRefusal):
    """The scope is below the namespace's floor (K011, K181): it was revoked. Unchanged."""

    namespace: str
    generation: int
    floor: int
    reason: ClassVar[str] = "stale_namespace_generation"


@dataclass(eq=False)
class NamespaceGenerationMismatch(LedgerRefusal):
    """A floor may only rise (K012). The floor stays where it was."""

    namespace: str
    generation: int
    floor: int
    reason: ClassVar[str] = "namespace_generation_mismatch"


@dataclass(eq=False)
class DuplicateTransactionId(LedgerRefusal):
    """Transaction ids rise strictly (K048). Nothing is reserved."""

    transaction: int
    last_transaction: int
    reason: ClassVar[str] = "duplicate_transaction_id"


@dataclass(eq=False)
class UnknownTransaction(LedgerRefusal):
    """No open admission has this transaction id: it never existed, or it ended. Unchanged."""

    transaction: int
    reason: ClassVar[str] = "unknown_transaction"


@dataclass(eq=False)
class RollbackAfterPublication(LedgerRefusal):
    """The request of this transaction was dispatched; history is compensated, not erased (K068). Unchanged."""

    transaction: int
    slot: int
    reason: ClassVar[str] = "rollback_after_publication"


@dataclass(eq=False)
class SlotsExhausted(LedgerRefusal):
    """Every request slot is taken. Nothing is reserved, nothing evicted."""

    max_requests: int
    reason: ClassVar[str] = "slots_exhausted"


@dataclass(eq=False)
class OutOfMemory(LedgerRefusal):
    """Too few free blocks, even after the evictions the command names (K052). Nothing is reserved or evicted."""

    needed_blocks: int
    free_blocks: int
    named_blocks: int
    group: int = 0
    reason: ClassVar[str] = "out_of_memory"


@dataclass(eq=False)
class StaleTreeVersion(LedgerRefusal):
    """The node handle's node is gone or has another generation (K075). Nothing is evicted."""

    node: int
    generation: int
    reason: ClassVar[str] = "stale_tree_version"


@dataclass(eq=False)
class RootEvicted(LedgerRefusal):
    """A root owns no blocks and cannot be evicted (K121). Nothing is evicted."""

    node: int
    reason: ClassVar[str] = "root_evicted"


@dataclass(eq=False)
class InternalNodeEvicted(LedgerRefusal):
    """The node still has children when its turn comes (K120). Nothing is evicted."""

    node: int
    children: int
    reason: ClassVar[str] = "internal_node_evicted"


@dataclass(eq=False)
class LockedLeafEvicted(LedgerRefusal):
    """Running requests lease the leaf (K120). Nothing is evicted."""

    node: int
    leases: int
    reason: ClassVar[str] = "locked_leaf_evicted"


@dataclass(eq=False)
class EvictLiveBlock(LedgerRefusal):
    """What a running request or the command's own hit reads was named for eviction (K045, K063). Nothing is evicted.

    `node` is the edge that was named, or that holds the named window block (0: it is in no edge).
    """

    node: int
    reason: ClassVar[str] = "evict_live_block"


@dataclass(eq=False)
class EdgePartiallyEvicted(LedgerRefusal):
    """A block of full attention leaves the index with its whole edge only (K121). Nothing is evicted."""

    group: int
    block: int
    reason: ClassVar[str] = "edge_partially_evicted"


@dataclass(eq=False)
class IndexFull(LedgerRefusal):
    """A ledger of nothing but windows keeps a bounded number of edges; evict some. Nothing is published."""

    requests: int
    free_nodes: int
    reason: ClassVar[str] = "index_full"


@dataclass(eq=False)
class TailsNeedOneFullGroup(LedgerRefusal):
    """Partial tails were asked for, but the ledger has several cache groups or one with a window (K103). Unchanged."""

    groups: int
    windows: int
    reason: ClassVar[str] = "tails_need_one_full_group"


@dataclass(eq=False)
class StaleRequestGeneration(LedgerRefusal):
    """The handle's slot was never given out with this generation, or serves another request by now (K075)."""

    slot: int
    generation: int
    reason: ClassVar[str] = "stale_request_generation"


@dataclass(eq=False)
class DoubleRelease(LedgerRefusal):
    """The request was released before, or its release is already queued (K059). No reference is dropped."""

    slot: int
    generation: int
    reason: ClassVar[str] = "double_release"


@dataclass(eq=False)
class ReleaseReasonMissing(LedgerRefusal):
    """A release says why, in one of the known words (K059). Unchanged."""

    given: str
    reason: ClassVar[str] = "release_reason_missing"


@dataclass(eq=False)
class ForkOfUnpublishedState(LedgerRefusal):
    """The parent's step is in flight: its newest rows are not committed yet (K054). No child is made."""

    slot: int
    reason: ClassVar[str] = "fork_of_unpublished_state"


@dataclass(eq=False)
class TruncateBeyondLength(LedgerRefusal):
    """A truncation cannot lengthen a request (K058). Unchanged."""

    slot: int
    num_tokens: int
    known_tokens: int
    reason: ClassVar[str] = "truncate_beyond_length"


@dataclass(eq=False)
class WindowStateMissing(LedgerRefusal):
    """The shorter request would read rows that its window has left behind (K108). Nothing is cut."""

    slot: int
    group: int
    needed_row: int
    first_held_row: int
    reason: ClassVar[str] = "window_state_missing"


@dataclass(eq=False)
class ResetWithLiveReferences(LedgerRefusal):
    """A request references indexed blocks of the scope (K065). Nothing is dropped."""

    namespace: str
    node: int
    references: int
    reason: ClassVar[str] = "reset_with_live_references"


@dataclass(eq=False)
class StepOutOfOrder(LedgerRefusal):
    """A dispatched step does not rise, or a completed step is not in flight (K173). Unchanged."""

    step: int
    last_step: int
    reason: ClassVar[str] = "step_out_of_order"


@dataclass(eq=False)
class RequestInFlight(LedgerRefusal):
    """The request already has a step in flight (K211), or two rows of one step name it. Unchanged."""

    slot: int
    reason: ClassVar[str] = "request_in_flight"


@dataclass(eq=False)
class AppendOutOfOrder(LedgerRefusal):
    """Rows must start at the first row without K/V, samples must follow the last known token (K053)."""

    slot: int
    expected_position: int
    position: int
    reason: ClassVar[str] = "append_out_of_order"


@dataclass(eq=False)
class OutsideRequestContext(LedgerRefusal):
    """The rows reach beyond the request's known tokens (K033, K034). Unchanged."""

    slot: int
    end: int
    num_tokens: int
    reason: ClassVar[str] = "outside_request_context"


@dataclass(eq=False)
class AppendPastCapacity(LedgerRefusal):
    """The rows reach beyond the longest context a table holds (K053). Unchanged."""

    slot: int
    end: int
    limit_tokens: int
    reason: ClassVar[str] = "append_past_capacity"


@dataclass(eq=False)
class StalePoolGeneration(LedgerRefusal):
    """The block handle belongs to another incarnation of the pool (K077). Nothing is read."""

    pool: str
    current: str
    reason: ClassVar[str] = "stale_pool_generation"


@dataclass(eq=False)
class CacheGroupMismatch(LedgerRefusal):
    """The block handle names another cache group (K031). Nothing is read."""

    group: int
    reason: ClassVar[str] = "cache_group_mismatch"


@dataclass(eq=False)
class UnknownPhysicalBlock(LedgerRefusal):
    """The block handle's block id is outside the pool (K031). Nothing is read."""

    block: int
    total_blocks: int
    reason: ClassVar[str] = "unknown_physical_block"


@dataclass(eq=False)
class StaleBlockGeneration(LedgerRefusal):
    """The block was given back since the handle was issued (K069, K074). Nothing is read or written."""

    block: int
    generation: int
    current: int
    reason: ClassVar[str] = "stale_block_generation"
