"""The whole state of one ledger: pools, tree, request slots, scopes and counters, with their two digests.

Invariant: everything that decides a later receipt is in a column, so that equal machine digests mean equal
behaviour; only the log index and pure caches (`flights`, the last lookup, the tally of each pool) are outside.
Source: LEDGER "apply = plan, then commit", "Determinism".
"""

from __future__ import annotations

from math import lcm
from typing import Any

import numpy as np

from . import loops
from .checked import SLOT_ID_LIMIT
from .columns import Digested, Records
from .commands import BlockHandle, Genesis, NodeHandle
from .digest import Array, bytes_fingerprint, position_weights
from .errors import (
    CacheGroupMismatch,
    EmptyPrompt,
    FullSequenceDoesNotFit,
    MalformedCommand,
    StaleBlockGeneration,
    StalePoolGeneration,
    TokenOutOfRange,
    UnknownPhysicalBlock,
    UnsupportedCacheGroups,
)
from .handles import BlockHandles
from .pool import BlockPool, Sums
from .requests import RequestTable
from .scopes import ScopeTable
from .tree import PrefixTree

_LARGEST = (1 << 31) - 1
LARGEST_COUNTER = (1 << 62) - 1
_TOKENS = np.dtype("<i4")
_NO_BLOCKS: Array = np.zeros(0, dtype=np.int64)


class LedgerState:
    """State made by one Genesis. Counters: field 0 the last step + 1, field 1 the last transaction + 1.

    `pool` and `block_size` are those of cache group 0; `alignment` is the tokens of one index page.
    """

    def __init__(self, genesis: Genesis) -> None:
        groups = genesis.groups
        self.genesis = genesis
        self.block_size = groups[0].block_size
        self.alignment = lcm(*[group.block_size for group in groups])
        self.sums = Sums()
        self.weights = position_weights(genesis.max_model_len + 1)
        self.pools = tuple(
            [
                BlockPool(g, group.num_blocks, group.block_size, self.sums, group.window)
                for g, group in enumerate(groups)
            ]
        )
        self.pool = self.pools[0]
        self.no_blocks = (0,) * len(groups)
        self.windowed = tuple([pool for pool in self.pools if pool.window])
        self.tree = PrefixTree(self.pools, self.alignment, self.weights, self.sums, genesis.max_requests)
        self.scopes = ScopeTable(self.sums)
        self.requests = RequestTable(genesis.max_requests, genesis.max_model_len, groups, self.sums)
        self.tree.terminals = self.requests.terminal
        for pool, cells in zip(self.pools, self.requests.cells, strict=True):
            pool.attach(cells, self.requests.records)
        counters = self.counters = Records("ledger", 1, 3)
        self.step_counter = counters.column(0, "step", self.sums.machine)
        self.transaction_counter = counters.column(1, "transaction", self.sums.machine)
        self.world = counters.column(2, "world", self.sums.committed, unsigned=True)
        self.world.put(0, bytes_fingerprint(genesis.world + genesis.incarnation.encode()))
        self.longest_prompt = min(genesis.max_model_len, *[pool.most_rows for pool in self.pools])
        self.flights: dict[int, Array] = {}
        self.serial = 0
        self.looked_up: tuple[Any, Any] | None = None

    def parts(self) -> list[Digested]:
        """Every array that has a share in a digest."""
        found: list[Digested] = [self.counters]
        for part in (*self.pools, self.tree, self.scopes, self.requests):
            found += part.parts()
        return found

    @property
    def last_step(self) -> int:
        return int(self.step_counter.array[0]) - 1

    @property
    def last_transaction(self) -> int:
        return int(self.transaction_counter.array[0]) - 1

    def handles(self, parts: tuple[Array, ...]) -> BlockHandles:
        """Handles of (block, generation) pairs, one array [n, 2] a group."""
        return BlockHandles(self.genesis.incarnation, parts)

    def present_handles(self, blocks: tuple[Array, ...]) -> BlockHandles:
        """Handles of blocks (one array a group) under their present generations."""
        parts = [
            np.stack([part, pool.generation.array[part]], axis=1)
            for pool, part in zip(self.pools, blocks, strict=True)
        ]
        return self.handles(tuple(parts))

    def resolve_block(self, handle: BlockHandle) -> int:
        """The block id of a handle that is still good. Raises a refusal for a stale or foreign one."""
        if handle.pool != self.genesis.incarnation:
            raise StalePoolGeneration(handle.pool, self.genesis.incarnation)
        if not 0 <= handle.group < len(self.pools):
            raise CacheGroupMismatch(handle.group)
        pool = self.pools[handle.group]
        if not 0 <= handle.block < pool.num_blocks:
            raise UnknownPhysicalBlock(handle.block, pool.num_blocks)
        current = int(pool.generation.array[handle.block])
        if handle.generation != current:
            raise StaleBlockGeneration(handle.block, handle.generation, current)
        return handle.block

    def read_prompt(self, transaction: int, content: bytes) -> Array:
        """Token ids int32 [n] of a prompt. Raises a refusal when it is empty, malformed or too long."""
        if not isinstance(content, bytes):
            raise MalformedCommand("tokens", f"not bytes: {content!r:.60}")
        if len(content) % 4:
            raise MalformedCommand("tokens", f"{len(content)} bytes")
        tokens = np.frombuffer(content, dtype=_TOKENS)
        if not tokens.dtype.isnative:
            tokens = tokens.astype(np.int32)
        if len(tokens) == 0:
            raise EmptyPrompt(transaction)
        if len(tokens) > self.longest_prompt:
            raise FullSequenceDoesNotFit(len(tokens), self.longest_prompt)
        position = loops.first_negative(tokens)
        if position < len(tokens):
            raise TokenOutOfRange(position, int(tokens[position]))
        return tokens

    def private_leases(self, slot: int, group: int) -> Array:
        """Tree blocks the request leases besides its table: a path it published under, computed by another.

        None in a window group: what the index keeps there may go without the edge.
        """
        terminal = int(self.requests.terminal.array[slot])
        if not terminal or self.pools[group].window:
            return _NO_BLOCKS
        return self.foreign_blocks(slot, self.tree.path(terminal), group)

    def foreign_blocks(
        self, slot: int, nodes: list[int], group: int, first: int = 0, end: int | None = None
    ) -> Array:
        """Blocks of consecutive edges that the request's table does not name at the same place.

        `first` is the page where the edges begin, `end` the page up to which they are looked at; all without it.
        """
        path, per_page = self.tree.path_blocks(nodes, group), self.tree.per_page[group]
        if end is not None:
            path = path[: (end - first) * per_page]
        start = first * per_page
        return path[path != self.requests.all_tables[group][slot, start : start + len(path)]]

    def drop_references(self, slot: int) -> tuple[int, int, tuple[Array, ...]]:
        """Drops every reference of one request and empties its tables; (freed, evictable, blocks to scrub by group)."""
        revoked = self.scopes.revoked
        nodes = self.tree.path(self.requests.terminal.array.item(slot))
        freed = evictable = 0
        scrub: list[Array] = []
        for group, pool in enumerate(self.pools):
            cells, first = self.requests.cells[group], slot * self.requests.widths[group]
            held = self.requests.blocks[group].array.item(slot)
            path = _NO_BLOCKS if pool.window else self.tree.path_blocks(nodes, group)
            left = self.requests.firsts[group].array.item(slot)
            if left:
                cells.clear(first, first + left)
            more_freed, more_evictable, scrubbed = pool.release(
                cells, first + left, held - left, path, revoked
            )
            freed, evictable = freed + more_freed, evictable + more_evictable
            scrub.append(scrubbed)
        return freed, evictable, tuple(scrub)

    def fingerprint(self, tokens: Array, first: int) -> int:
        """What tokens at positions first, first + 1, ... add to a request's token print."""
        weighed = (tokens.astype(np.uint64) + np.uint64(1)) * self.weights[first : first + len(tokens)]
        return int(weighed.sum(dtype=np.uint64))


def plan_genesis(command: Genesis) -> Genesis:
    """Checks record 0. Raises: UnsupportedCacheGroups, MalformedCommand; it stays empty."""
    if not 0 < len(command.groups) <= loops.MAX_GROUPS:
        raise UnsupportedCacheGroups(len(command.groups), loops.MAX_GROUPS)
    sizes = {"max_requests": command.max_requests, "max_model_len": command.max_model_len}
    names = [group.name for group in command.groups]
    if len(set(names)) != len(names):
        raise MalformedCommand("groups", f"names {names}")
    for group in command.groups:
        if not 0 <= group.window < _LARGEST:
            raise MalformedCommand("window", str(group.window))
        sizes |= {"block_size": group.block_size, "num_blocks": group.num_blocks}
        for field, size in sizes.items():
            if not 0 < size < _LARGEST:
                raise MalformedCommand(field, str(size))
        rows = group.block_size * group.num_blocks
        cells = command.max_requests * -(-command.max_model_len // group.block_size)
        if rows > SLOT_ID_LIMIT or cells > SLOT_ID_LIMIT:
            raise MalformedCommand(
                "num_blocks", f"{group.num_blocks} of {group.block_size} rows, {cells} table cells"
            )
    if lcm(*[group.block_size for group in command.groups]) >= _LARGEST:
        raise MalformedCommand("block_size", "the alignment of the groups is beyond 2^31")
    if not command.incarnation:
        raise MalformedCommand("incarnation", "empty")
    return command


def require_counter(field: str, value: int) -> None:
    """Raises: MalformedCommand for a generation, step or transaction no column could hold."""
    if not 0 <= value <= LARGEST_COUNTER:
        raise MalformedCommand(field, str(value))


def block_ids(blocks: Array) -> tuple[int, ...]:
    """Plain ints for a receipt."""
    return tuple(blocks.tolist())


def scrub_ids(parts: tuple[Array, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Blocks to scrub for a receipt: those of group 0, and those of the other groups."""
    if len(parts) == 1:
        return (tuple(parts[0].tolist()), ()) if len(parts[0]) else ((), ())
    first, *others = [block_ids(part) for part in parts]
    return first, tuple(others)


def node_handles(tree: PrefixTree, nodes: list[int]) -> tuple[NodeHandle, ...]:
    """Handles of nodes under their present generations."""
    generations = tree.generation.array
    return tuple([NodeHandle(node, generations.item(node)) for node in nodes])
