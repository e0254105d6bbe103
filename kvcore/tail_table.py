"""Partial tails: immutable leaf records of the prefix tree, each over one block whose first rows are valid.

Owns which node a tail hangs at, its rows, its policy, its block and its tokens. Invariant: a tail lies at the end of a whole edge
and is no edge: it has fewer rows than a block, no children, no reference of its own; while its block is referenced, its node is
locked. Its block is named by nobody else in the index, so the first row a holder writes behind it is written into a copy. Ids are
given lowest first; a tail's generation rises when it goes. A block of the index belongs to a tail where its node is negative.
Source: LEDGER "Prefix tree over cache groups"; contracts K103, K104.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from .columns import Records
from .commands import NodeHandle
from .digest import Array
from .pool import Sums

TAILS_PER_NODE = 4
"""Tails that hang at one node at most: a lookup compares each of them."""
_FIRST_CAPACITY = 64


class TailTable:
    """Records [1, ...) of tails, by node. Id 0 is no tail."""

    def __init__(self, sums: Sums) -> None:
        records = self.records = Records("tail", _FIRST_CAPACITY, 5)
        self.node = records.column(0, "node", sums.machine)
        self.rows = records.column(1, "rows", sums.machine)
        self.policy = records.column(2, "policy", sums.machine)
        self.block = records.column(3, "block", sums.machine)
        self.generation = records.column(4, "generation", sums.machine)
        self.tokens: dict[int, Array] = {}
        self.by_node: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._next = 1

    def at(self, node: int) -> list[int]:
        """Ids of the tails that hang at a node, lowest first."""
        return sorted(self.by_node.get(node, ()))

    def block_of(self, tail: int) -> int:
        return self.block.array.item(tail)

    def handle(self, tail: int) -> NodeHandle:
        """What an eviction names: a handle whose node is minus the tail's id."""
        return NodeHandle(-tail, self.generation.array.item(tail))

    def find(self, handle: NodeHandle) -> int:
        """The tail of a handle; 0 for one that is not current."""
        tail = -handle.node
        current = tail in self.tokens and self.generation.array.item(tail) == handle.generation
        return tail if current else 0

    def longest(self, node: int, policy: int, following: Array) -> int:
        """The longest tail of a policy at a node whose rows all agree with the tokens that follow the node; 0 for none."""
        best = rows = 0
        for tail in self.by_node.get(node, ()):
            own = self.tokens[tail]
            fits = rows < len(own) <= len(following) and self.policy.array.item(tail) == policy
            if fits and np.array_equal(own, following[: len(own)]):
                best, rows = tail, len(own)
        return best

    def same(self, node: int, policy: int, tokens: Array) -> int:
        """The tail with exactly this identity; 0 for none."""
        tail = self.longest(node, policy, tokens)
        return tail if tail and len(self.tokens[tail]) == len(tokens) else 0

    def add(self, node: int, policy: int, tokens: Array, block: int) -> int:
        """Hangs a tail at a node; its id. The caller enters the block in the index."""
        if self._free:
            tail = heappop(self._free)
        else:
            tail, self._next = self._next, self._next + 1
        if tail >= len(self.records.cells):
            self.records.grow(2 * tail)
        self.node.put(tail, node)
        self.rows.put(tail, len(tokens))
        self.policy.put(tail, policy)
        self.block.put(tail, block)
        self._hold(tail, node, tokens)
        return tail

    def remove(self, tails: list[int]) -> Array:
        """Takes tails away under new generations; their blocks (int64), still in the index."""
        blocks = self.block.array[tails].astype(np.int64)
        for tail in tails:
            node = self.node.array.item(tail)
            self.by_node[node].remove(tail)
            if not self.by_node[node]:
                del self.by_node[node]
            del self.tokens[tail]
            for column in (self.node, self.rows, self.policy, self.block):
                column.put(tail, 0)
            self.generation.put(tail, self.generation.array.item(tail) + 1)
            heappush(self._free, tail)
        return blocks

    def remove_at(self, nodes: tuple[int, ...]) -> Array:
        """Takes away all tails at nodes that go themselves; their blocks."""
        found = [tail for node in nodes if node in self.by_node for tail in self.at(node)]
        return self.remove(found)

    def adopt(self, tokens: dict[int, Array]) -> None:
        """Goes on from records that are there and the tokens of their tails."""
        self.tokens, self.by_node = {}, {}
        for tail, own in sorted(tokens.items()):
            self._hold(tail, self.node.array.item(tail), own)
        # An id that was used once has a generation; what was never used follows the last of those.
        used = np.flatnonzero(self.generation.array).tolist()
        self._next = 1 + max([0, *used, *tokens])
        self._free = [tail for tail in range(1, self._next) if tail not in tokens]
        heapify(self._free)

    def _hold(self, tail: int, node: int, tokens: Array) -> None:
        self.tokens[tail] = tokens
        self.by_node.setdefault(node, []).append(tail)
