"""The ledger: all KV-cache state of one rank as one deterministic state machine, commands in, receipts out.

Invariant: `apply` first plans (reads only, may raise a LedgerRefusal) and then commits (cannot fail), so a
refused command writes nothing and takes no log index. One command at a time: threads queue. The same log
gives the same receipts and digests in every process.
Source: LEDGER; contracts K048 to K077, K111 to K129, K187.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from .admission import commit_abort, commit_admit, look_up, plan_abort, plan_admit
from .commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    BlockHandle,
    Command,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    NodeHandle,
    Publish,
    Release,
    RequestHandle,
    Scope,
)
from .digest import Array, digest_bytes
from .errors import GenesisRepeated, LogGap, LogRepetition, LogWithoutGenesis, StaleTreeVersion
from .eviction import commit_evictions, plan_evictions
from .floors import commit_advance, plan_advance
from .pool import PoolGauge
from .publication import commit_publish, plan_publish
from .receipts import (
    AbortReceipt,
    AdmitReceipt,
    AdvanceReceipt,
    AnyReceipt,
    CompleteReceipt,
    DispatchReceipt,
    EvictReceipt,
    GenesisReceipt,
    PrefixMatch,
    PublicationReceipt,
    ReleaseReceipt,
)
from .release import commit_release, plan_release
from .requests import RequestView
from .state import LedgerState, node_handles, plan_genesis
from .stepping import commit_complete, commit_dispatch, plan_complete, plan_dispatch

_EMPTY_DIGEST = bytes(16)


class Probe(msgspec.Struct, frozen=True):
    """A lookup that leased nothing: stale as soon as the next command is applied."""

    match: PrefixMatch
    path: tuple[NodeHandle, ...]
    blocks: tuple[int, ...]


class NodeView(msgspec.Struct, frozen=True):
    """One tree edge: its blocks (int64 [pages]), its parent (node 0: the root), children and leases."""

    handle: NodeHandle
    parent: NodeHandle
    scope: Scope
    start_page: int
    blocks: Array
    num_children: int
    leases: int


class EvictableLeaf(msgspec.Struct, frozen=True):
    """An unlocked leaf edge: its blocks (int64 [pages]) and its parent (node 0: the root)."""

    handle: NodeHandle
    blocks: Array
    parent: NodeHandle


def _plan_evict(state: LedgerState, command: Evict) -> Any:
    return plan_evictions(state, command.nodes)


def _commit_evict(state: LedgerState, plan: Any) -> dict[str, Any]:
    facts = commit_evictions(state, plan)
    return {"nodes": facts.nodes, "freed_blocks": facts.freed_blocks}


class _Rule(msgspec.Struct, frozen=True):
    plan: Callable[[LedgerState, Any], Any]
    commit: Callable[[LedgerState, Any], dict[str, Any]]
    receipt: Callable[..., AnyReceipt]


_RULES: dict[type, _Rule] = {
    AdvanceGeneration: _Rule(plan_advance, commit_advance, AdvanceReceipt),
    Admit: _Rule(plan_admit, commit_admit, AdmitReceipt),
    Dispatch: _Rule(plan_dispatch, commit_dispatch, DispatchReceipt),
    Complete: _Rule(plan_complete, commit_complete, CompleteReceipt),
    Publish: _Rule(plan_publish, commit_publish, PublicationReceipt),
    Release: _Rule(plan_release, commit_release, ReleaseReceipt),
    Evict: _Rule(_plan_evict, _commit_evict, EvictReceipt),
    Abort: _Rule(plan_abort, commit_abort, AbortReceipt),
}


class Ledger:
    """One rank's ledger. Empty until Genesis, which is record 0 of its log."""

    def __init__(self) -> None:
        self._state: LedgerState | None = None
        self._applying = Lock()
        self._log_index = 0
        self._committed = _EMPTY_DIGEST
        self._machine = _EMPTY_DIGEST

    # Writing.

    def apply(self, command: Command) -> Any:
        """Applies one command; its receipt (AnyReceipt).

        Raises: LedgerRefusal; state, digests and log index are as before.
        """
        with self._applying:
            return self._apply(command)

    def apply_at(self, index: int, command: Command) -> Any:
        """Applies the record at a log index. Raises: LogGap, LogRepetition, or the command's own refusal."""
        with self._applying:
            if index > self._log_index:
                raise LogGap(self._log_index, index)
            if index < self._log_index:
                raise LogRepetition(self._log_index, index)
            return self._apply(command)

    # Reading.

    @property
    def log_index(self) -> int:
        """The index the next record will have."""
        return self._log_index

    @property
    def committed_digest(self) -> bytes:
        """16 bytes over what requests, index and owners can observe."""
        return self._committed

    @property
    def machine_digest(self) -> bytes:
        """16 bytes over every column, queue orders, generations and pins included."""
        return self._machine

    @property
    def state(self) -> LedgerState:
        """The state, for the auditor and for views; only `apply` may change it."""
        if self._state is None:
            raise LogWithoutGenesis("read")
        return self._state

    @property
    def tables(self) -> Array:
        """Block tables int32 [max_requests, max_blocks], read-only; cells beyond num_blocks mean nothing."""
        return _read_only(self.state.requests.tables)

    @property
    def num_blocks(self) -> Array:
        """Blocks in each slot's table, int32 [max_requests], read-only."""
        return _read_only(self.state.requests.num_blocks.array)

    @property
    def valid_rows(self) -> Array:
        """Rows with K/V of each slot, int32 [max_requests], read-only."""
        return _read_only(self.state.requests.valid_rows.array)

    @property
    def num_tokens(self) -> Array:
        """Known tokens of each slot, int32 [max_requests], read-only."""
        return _read_only(self.state.requests.num_tokens.array)

    @property
    def in_flight(self) -> Array:
        """Whether a step of each slot is in flight, bool [max_requests]."""
        return self.state.requests.flight_step.array != 0

    def probe(self, scope: Scope, tokens: bytes, lookup: bool = True) -> Probe:
        """What an Admit would share now. Raises the refusals of a prompt and of a revoked scope."""
        state = self.state
        prompt = state.read_prompt(-1, tokens)
        state.scopes.require_current(scope)
        found = look_up(state, state.scopes.find(scope), prompt, lookup)
        blocks = state.tree.path_blocks(list(found.nodes))[: found.match.runtime // state.block_size]
        return Probe(found.match, node_handles(state.tree, list(found.nodes)), tuple(blocks.tolist()))

    def gauge(self) -> PoolGauge:
        """Exclusive block counts; they sum to the pool's size."""
        return self.state.pool.gauge()

    def floor(self, namespace: str) -> int:
        """The lowest generation of a namespace that may be admitted or published."""
        return self.state.scopes.floor_of(namespace)

    def request(self, handle: RequestHandle) -> RequestView:
        """A running request. Raises: StaleRequestGeneration."""
        state = self.state
        requests, slot = state.requests, state.requests.slot_of(handle)
        blocks = int(requests.num_blocks.array[slot])
        return RequestView(
            handle=handle,
            scope=state.scopes.scope(int(requests.scope.array[slot])),
            num_tokens=int(requests.num_tokens.array[slot]),
            valid_rows=int(requests.valid_rows.array[slot]),
            reserved_rows=blocks * state.block_size,
            num_blocks=blocks,
            in_flight=bool(requests.flight_step.array[slot]),
        )

    def running(self) -> tuple[RequestHandle, ...]:
        """Handles of all running requests, by slot."""
        requests = self.state.requests
        return tuple([requests.handle(int(slot)) for slot in np.flatnonzero(requests.active.array)])

    def request_tokens(self, handle: RequestHandle) -> Array:
        """Known tokens of a request, int32 copy. Raises: StaleRequestGeneration."""
        requests = self.state.requests
        slot = requests.slot_of(handle)
        return requests.tokens[slot, : int(requests.num_tokens.array[slot])].copy()

    def block(self, handle: BlockHandle) -> int:
        """The block id of a handle. Raises: StalePoolGeneration, CacheGroupMismatch, UnknownPhysicalBlock,
        StaleBlockGeneration."""
        return self.state.resolve_block(handle)

    def block_handles(self, handle: RequestHandle) -> tuple[BlockHandle, ...]:
        """The request's blocks in logical order. Raises: StaleRequestGeneration."""
        state = self.state
        return state.block_handles(state.requests.table(state.requests.slot_of(handle)))

    def evictable_leaves(self) -> tuple[EvictableLeaf, ...]:
        """Every leaf that Evict would accept now, by node id."""
        tree = self.state.tree
        leaves = tree.unlocked_leaves().tolist()
        parents = node_handles(tree, tree.parent.array[leaves].tolist()) if leaves else ()
        return tuple(
            [
                EvictableLeaf(handle, _read_only(tree.blocks[handle.node]), parent)
                for handle, parent in zip(node_handles(tree, leaves), parents, strict=True)
            ]
        )

    def node(self, handle: NodeHandle) -> NodeView:
        """One edge of the tree. Raises: StaleTreeVersion."""
        state, node = self.state, handle.node
        tree = state.tree
        if not 0 < node < len(tree.pages.array) or not tree.pages.array[node]:
            raise StaleTreeVersion(node, handle.generation)
        if int(tree.generation.array[node]) != handle.generation:
            raise StaleTreeVersion(node, handle.generation)
        return NodeView(
            handle=handle,
            parent=node_handles(tree, [int(tree.parent.array[node])])[0],
            scope=state.scopes.scope(int(tree.scope.array[node])),
            start_page=int(tree.start.array[node]),
            blocks=_read_only(tree.blocks[node]),
            num_children=int(tree.num_children[node]),
            leases=tree.lock(node),
        )

    def paths(self, namespace: str) -> list[tuple[Scope, Array, Array]]:
        """(scope, tokens int32, blocks int64) of every root-to-leaf path of a namespace, in key order."""
        state = self.state
        found = []
        for scope_id, scope in state.scopes.all_scopes():
            if scope.namespace != namespace:
                continue
            for leaf in state.tree.subtree(scope_id):
                if state.tree.num_children[leaf] == 0:
                    nodes = state.tree.path(leaf)
                    tokens = np.concatenate([state.tree.tokens[node] for node in nodes])
                    found.append((scope, tokens, state.tree.path_blocks(nodes)))
        return found

    def residue(self, namespace: str, generation_below: int) -> tuple[int, ...]:
        """Blocks that may still hold bytes of a namespace's generations below the given one, in use or not."""
        state = self.state
        scopes = state.scopes.below(namespace, generation_below)
        return tuple(np.flatnonzero(np.isin(state.pool.owner.array, scopes)).tolist())

    def _apply(self, command: Command) -> Any:
        if isinstance(command, Genesis):
            return self._begin(command)
        if self._state is None:
            raise LogWithoutGenesis(type(command).__name__)
        rule = _RULES[type(command)]
        fields = rule.commit(self._state, rule.plan(self._state, command))
        return self._receipt(rule.receipt, fields)

    def _begin(self, command: Genesis) -> GenesisReceipt:
        if self._state is not None:
            raise GenesisRepeated(self._log_index)
        self._state = LedgerState(plan_genesis(command))
        fields = {"incarnation": command.incarnation, "total_blocks": command.groups[0].num_blocks}
        return self._receipt(GenesisReceipt, fields)

    def _receipt(self, receipt: Callable[..., Any], fields: dict[str, Any]) -> Any:
        before, index = self._committed, self._log_index
        committed = self.state.committed.pair()
        self._committed = digest_bytes(committed)
        self._machine = digest_bytes(committed, self.state.machine.pair())
        self._log_index = index + 1
        return receipt(
            log_index=index,
            committed_before=before,
            committed_after=self._committed,
            machine_after=self._machine,
            **fields,
        )


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
