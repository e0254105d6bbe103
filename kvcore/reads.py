"""What a ledger can be asked: read-only views and copies, none of which changes anything.

Invariant: arrays handed out are read-only views of the state or copies; a handle that is not current is refused.
Methods without a group speak of cache group 0. A table's leading cells are `loops.GONE` where blocks left a window.
Source: LEDGER; contracts K075, K187, K237.
"""

from __future__ import annotations

import msgspec
import numpy as np

from .admission import read_and_look_up
from .commands import BlockHandle, NodeHandle, RequestHandle, RowSpan, Scope
from .digest import Array
from .errors import LogWithoutGenesis, StaleTreeVersion
from .pool import PoolGauge
from .receipts import PrefixMatch
from .requests import RequestView
from .state import LedgerState, node_handles
from .stepping import needed_blocks
from .windows import WindowLine, reserved_blocks, window_lines

_NO_BLOCKS: Array = np.zeros(0, dtype=np.int64)
_NO_BLOCKS.flags.writeable = False


class Probe(msgspec.Struct, frozen=True):
    """A lookup that leased nothing, `blocks` int64 of whole pages, `tail` behind them: stale with the next command.

    `version` is the log index it was made at; `confirm` compares it.
    """

    match: PrefixMatch
    path: tuple[NodeHandle, ...]
    blocks: Array
    version: int
    tail: tuple[NodeHandle, ...] = ()


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


class TailView(msgspec.Struct, frozen=True):
    """A partial tail: the node it hangs at, its block, valid rows and policy, and the block's references."""

    handle: NodeHandle
    node: NodeHandle
    block: int
    rows: int
    policy: int
    references: int


class LedgerReads:
    """The reading half of a ledger."""

    _state: LedgerState | None
    _log_index: int

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
    def group_tables(self) -> tuple[Array, ...]:
        """Block tables of every cache group, as `tables`."""
        return tuple([_read_only(table) for table in self.state.requests.all_tables])

    @property
    def num_blocks(self) -> Array:
        """Blocks in each slot's table, int64 [max_requests], read-only."""
        return _read_only(self.state.requests.num_blocks.array)

    @property
    def valid_rows(self) -> Array:
        """Rows with K/V of each slot, int64 [max_requests], read-only."""
        return _read_only(self.state.requests.valid_rows.array)

    @property
    def num_tokens(self) -> Array:
        """Known tokens of each slot, int64 [max_requests], read-only."""
        return _read_only(self.state.requests.num_tokens.array)

    @property
    def in_flight(self) -> Array:
        """Whether a step of each slot is in flight, bool [max_requests]."""
        return self.state.requests.flight_step.array != 0

    def probe(self, scope: Scope, tokens: bytes, lookup: bool = True, tail_policy: int = 0) -> Probe:
        """What an Admit would share now. Raises the refusals of a prompt and of a revoked scope."""
        state = self.state
        _, found = read_and_look_up(state, scope, tokens, lookup, tail_policy=tail_policy)
        if not found.nodes:
            return Probe(found.match, (), _NO_BLOCKS, self._log_index)
        tail = (state.tree.tails.handle(found.tail),) if found.tail else ()
        blocks = state.tree.path_blocks(list(found.nodes))[: found.match.runtime // state.block_size]
        path = node_handles(state.tree, list(found.nodes))
        return Probe(found.match, path, _read_only(blocks), self._log_index, tail)

    def confirm(self, probe: Probe) -> None:
        """The probe says what an Admit would do now. Raises: StaleTreeVersion once another command was applied (K127)."""
        if probe.version != self._log_index:
            raise StaleTreeVersion(probe.path[-1].node if probe.path else 0, probe.version)

    def gauge(self, group: int = 0) -> PoolGauge:
        """Exclusive block counts of one cache group; they sum to its pool's size."""
        return self.state.pools[group].gauge()

    def table(self, handle: RequestHandle, group: int = 0) -> Array:
        """The request's blocks of one group in logical order, int64 copy, without those that left a window.

        Raises: StaleRequestGeneration.
        """
        return self.state.requests.table(self.state.requests.slot_of(handle), group)

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

    def request_tokens(self, handle: RequestHandle, start: int = 0, stop: int | None = None) -> Array:
        """Known tokens [start, stop) of a request, all of them by default; int32 copy of just those.

        Raises: StaleRequestGeneration.
        """
        requests = self.state.requests
        slot = requests.slot_of(handle)
        return requests.tokens[slot, : int(requests.num_tokens.array[slot])][start:stop].copy()

    def block(self, handle: BlockHandle) -> int:
        """The block id of a handle. Raises: StalePoolGeneration, CacheGroupMismatch, UnknownPhysicalBlock,
        StaleBlockGeneration."""
        return self.state.resolve_block(handle)

    def block_handles(self, handle: RequestHandle) -> tuple[BlockHandle, ...]:
        """The request's blocks in logical order, group by group. Raises: StaleRequestGeneration."""
        state = self.state
        slot = state.requests.slot_of(handle)
        return tuple(
            state.present_handles(
                tuple([state.requests.table(slot, group) for group in range(len(state.pools))])
            )
        )

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

    def tails(self) -> tuple[TailView, ...]:
        """Every partial tail, by id."""
        state, tails = self.state, self.state.tree.tails
        found = []
        for tail in sorted(tails.tokens):
            block, node = tails.block_of(tail), tails.node.array.item(tail)
            policy, held = tails.policy.array.item(tail), state.pool.ref.array.item(block)
            hung = node_handles(state.tree, [node])[0]
            found.append(TailView(tails.handle(tail), hung, block, len(tails.tokens[tail]), policy, held))
        return tuple(found)

    def copies_tail(self, span: RowSpan) -> bool:
        """Whether a Dispatch of these rows copies a partial tail's block first."""
        state, slot = self.state, span.request.slot
        page, behind = divmod(span.start, state.block_size)
        if not behind or page >= int(state.requests.num_blocks.array[slot]):
            return False
        return int(state.pool.node.array[state.requests.tables[slot, page]]) < 0

    def evictable_window_blocks(self) -> tuple[WindowLine, ...]:
        """For each group with a window, the blocks that a `trim` would accept now, those first in line in front."""
        return window_lines(self.state)

    def prompt_window_blocks(self, rows: int, shared: int) -> dict[int, int]:
        """For each group with a window, blocks that an Admit of `rows` tokens reserves when it hits `shared` of them."""
        pools = self.state.windowed
        return {pool.group: reserved_blocks(pool, rows, shared) - shared // pool.block_size for pool in pools}

    def step_window_blocks(self, spans: tuple[RowSpan, ...]) -> dict[int, int]:
        """For each group with a window, blocks that a Dispatch of these rows takes."""
        state = self.state
        if not state.windowed:
            return {}
        rows = np.array([(s.request.slot, s.request.generation, s.start, s.count) for s in spans])
        rows = rows.reshape(-1, 4).astype(np.int64)
        return {pool.group: needed_blocks(state, rows, pool) for pool in state.windowed}

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

    def paths(self, namespace: str, group: int = 0) -> list[tuple[Scope, Array, Array]]:
        """(scope, tokens int32, blocks int64 of one group) of every root-to-leaf path of a namespace, in key order."""
        state = self.state
        found = []
        for scope_id, scope in state.scopes.all_scopes():
            if scope.namespace != namespace:
                continue
            for leaf in state.tree.subtree(scope_id):
                if state.tree.num_children[leaf] == 0:
                    nodes = state.tree.path(leaf)
                    tokens = np.concatenate([state.tree.tokens[node] for node in nodes])
                    found.append((scope, tokens, state.tree.path_blocks(nodes, group)))
        return found

    def residue(self, namespace: str, generation_below: int, group: int = 0) -> tuple[int, ...]:
        """Blocks of one group that may still hold bytes of a namespace's generations below the given one, in use
        or not."""
        state = self.state
        scopes = state.scopes.below(namespace, generation_below)
        return tuple(np.flatnonzero(np.isin(state.pools[group].owner.array, scopes)).tolist())


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
