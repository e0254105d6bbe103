"""The whole state of one ledger: pool, tree, request slots, scopes and counters, with their two digests.

Invariant: everything that decides a later receipt is in a column, so that equal machine digests mean equal
behaviour; only the log index and pure caches are outside.
Source: LEDGER "apply = plan, then commit", "Determinism".
"""

from __future__ import annotations

import numpy as np

from .commands import BlockHandle, Genesis, GroupSpec, NodeHandle
from .digest import Array, Column, DigestSum, bytes_fingerprint, position_weights
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
from .pool import BlockPool
from .requests import RequestTable
from .scopes import ScopeTable
from .tree import PrefixTree

_SUPPORTED_GROUPS = 1
_LARGEST = (1 << 31) - 1
LARGEST_COUNTER = (1 << 62) - 1


class LedgerState:
    """State made by one Genesis. Counters: cell 0 the last step + 1, cell 1 the last transaction + 1."""

    def __init__(self, genesis: Genesis) -> None:
        group = genesis.groups[0]
        self.genesis = genesis
        self.block_size = group.block_size
        self.committed = DigestSum()
        self.machine = DigestSum()
        self.weights = position_weights(genesis.max_model_len + 1)
        self.pool = BlockPool(group.num_blocks, group.block_size, self.committed, self.machine)
        self.tree = PrefixTree(self.pool, self.weights, self.machine)
        self.scopes = ScopeTable(self.committed, self.machine)
        self.requests = RequestTable(
            genesis.max_requests, genesis.max_model_len, group.block_size, self.committed, self.machine
        )
        self.counters = Column("ledger.counters", 2, np.int64, self.machine)
        self.world = Column("ledger.world", 1, np.uint64, self.committed)
        self.world.put(0, bytes_fingerprint(genesis.world + genesis.incarnation.encode()))

    def columns(self) -> dict[bool, list[Column]]:
        """All columns: True those of the committed digest, False those of the machine digest alone."""
        found: dict[bool, list[Column]] = {True: [self.world], False: [self.counters]}
        for part in (self.pool, self.tree, self.scopes, self.requests):
            for committed, columns in part.columns().items():
                found[committed].extend(columns)
        return found

    @property
    def last_step(self) -> int:
        return int(self.counters.array[0]) - 1

    @property
    def last_transaction(self) -> int:
        return int(self.counters.array[1]) - 1

    def block_handles(self, blocks: Array) -> tuple[BlockHandle, ...]:
        """Handles of blocks under their present generations."""
        pool, ids = self.genesis.incarnation, blocks.tolist()
        generations = self.pool.generation.array[blocks].tolist()
        return tuple([BlockHandle(pool, 0, b, g) for b, g in zip(ids, generations, strict=True)])

    def resolve_block(self, handle: BlockHandle) -> int:
        """The block id of a handle that is still good. Raises a refusal for a stale or foreign one."""
        if handle.pool != self.genesis.incarnation:
            raise StalePoolGeneration(handle.pool, self.genesis.incarnation)
        if handle.group != 0:
            raise CacheGroupMismatch(handle.group)
        if not 0 <= handle.block < self.pool.num_blocks:
            raise UnknownPhysicalBlock(handle.block, self.pool.num_blocks)
        current = int(self.pool.generation.array[handle.block])
        if handle.generation != current:
            raise StaleBlockGeneration(handle.block, handle.generation, current)
        return handle.block

    def read_prompt(self, transaction: int, content: bytes) -> Array:
        """Token ids int32 [n] of a prompt. Raises a refusal when it is empty, malformed or too long."""
        if len(content) % 4:
            raise MalformedCommand("tokens", f"{len(content)} bytes")
        tokens = np.frombuffer(content, dtype="<i4").astype(np.int32, copy=False)
        if len(tokens) == 0:
            raise EmptyPrompt(transaction)
        limit = min(self.genesis.max_model_len, self.pool.num_blocks * self.block_size)
        if len(tokens) > limit:
            raise FullSequenceDoesNotFit(len(tokens), limit)
        if int(tokens.min()) < 0:
            position = int((tokens < 0).argmax())
            raise TokenOutOfRange(position, int(tokens[position]))
        return tokens

    def private_leases(self, slot: int) -> Array:
        """Tree blocks the request leases besides its table: a path it published under, computed by another."""
        nodes = self.tree.path(int(self.requests.terminal.array[slot]))
        path = self.tree.path_blocks(nodes)
        return path[path != self.requests.tables[slot, : len(path)]]

    def drop_references(self, slot: int) -> tuple[int, int, Array]:
        """Drops every reference of one request; (freed, evictable, blocks to scrub)."""
        revoked = self.scopes.revoked
        private = self.private_leases(slot)
        freed, evictable, scrub = self.pool.drop(self.requests.table(slot), revoked)
        if len(private):
            more_freed, more_evictable, more_scrub = self.pool.drop(private, revoked)
            freed, evictable = freed + more_freed, evictable + more_evictable
            scrub = np.concatenate([scrub, more_scrub])
        return freed, evictable, scrub

    def fingerprint(self, tokens: Array, first: int) -> int:
        """What tokens at positions first, first + 1, ... add to a request's token print."""
        weighed = (tokens.astype(np.uint64) + np.uint64(1)) * self.weights[first : first + len(tokens)]
        return int(weighed.sum(dtype=np.uint64))


def plan_genesis(command: Genesis) -> Genesis:
    """Checks record 0. Raises: UnsupportedCacheGroups, MalformedCommand; the ledger stays empty."""
    if len(command.groups) != _SUPPORTED_GROUPS:
        raise UnsupportedCacheGroups(len(command.groups), _SUPPORTED_GROUPS)
    group: GroupSpec = command.groups[0]
    sizes = {
        "block_size": group.block_size,
        "num_blocks": group.num_blocks,
        "max_requests": command.max_requests,
        "max_model_len": command.max_model_len,
    }
    for field, size in sizes.items():
        if not 0 < size < _LARGEST:
            raise MalformedCommand(field, str(size))
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


def node_handles(tree: PrefixTree, nodes: list[int]) -> tuple[NodeHandle, ...]:
    """Handles of nodes under their present generations."""
    return tuple([NodeHandle(node, int(tree.generation.array[node])) for node in nodes])
