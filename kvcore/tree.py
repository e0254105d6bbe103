"""The prefix tree: compressed edges over whole pages, one root per scope, compared token by token.

Owns nodes (edge tokens int32 [pages * block_size], edge blocks int64 [pages]) and their children. Invariants:
a node has at least one page; edges of one parent differ in their first page; a lease ends where an edge ends,
so all blocks of an edge have one reference count, which is the edge's lock; counts never rise from a parent
to its child. A `NodeHandle` names the boundary where an edge *ends*: splitting keeps the lower half's handle.
Walks are loops, never recursion.
Source: SGLang's RadixAttention (idea); LEDGER "Prefix tree"; contracts K111 to K121, K123.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import msgspec
import numpy as np

from .digest import Array, Column, DigestSum, IdStack, mix_words
from .pool import BlockPool

Children = dict[bytes, int]


class Branch:
    """Children by the bytes of their first page, and the same keys in order for the junction's longest match."""

    __slots__ = ("by_page", "ordered")

    def __init__(self) -> None:
        self.by_page: Children = {}
        self.ordered: list[bytes] = []

    def attach(self, key: bytes, node: int) -> None:
        if key not in self.by_page:
            insort(self.ordered, key)
        self.by_page[key] = node

    def detach(self, key: bytes) -> None:
        del self.by_page[key]
        del self.ordered[bisect_left(self.ordered, key)]

    def common_bytes(self, query: bytes) -> int:
        """Longest common prefix of `query` with any key: one of its two neighbours in order has it."""
        at = bisect_left(self.ordered, query)
        near = self.ordered[max(at - 1, 0) : at + 1]
        return max((_common_prefix(query, key) for key in near), default=0)


def _common_prefix(left: bytes, right: bytes) -> int:
    both = min(len(left), len(right))
    for index in range(both):
        if left[index] != right[index]:
            return index
    return both


class TreeMatch(msgspec.Struct):
    """A read-only walk: nodes root side first, how many pages of the last one matched, token-exact length."""

    nodes: list[int]
    last_pages: int
    pages: int
    semantic: int
    diverged: bool
    root_empty: bool


class PrefixTree:
    """All roots over one pool."""

    def __init__(self, pool: BlockPool, weights: Array, machine: DigestSum) -> None:
        size = pool.num_blocks + 1
        self._pool = pool
        self._page = pool.block_size
        self._weights = weights
        self.parent = Column("node.parent", size, np.int32, machine)
        self.start = Column("node.start", size, np.int32, machine)
        self.pages = Column("node.pages", size, np.int32, machine)
        self.scope = Column("node.scope", size, np.int32, machine)
        self.generation = Column("node.generation", size, np.int64, machine)
        self.free = IdStack("node.free", size, 1, machine)
        self.num_children = np.zeros(size, dtype=np.int32)
        self.first_block = np.zeros(size, dtype=np.int64)
        self.tokens: list[Array] = [np.zeros(0, dtype=np.int32)] * size
        self.blocks: list[Array] = [np.zeros(0, dtype=np.int64)] * size
        self._branches: list[Branch | None] = [None] * size
        self.roots: dict[int, Branch] = {}

    def columns(self) -> dict[bool, list[Column]]:
        machine = [self.parent, self.start, self.pages, self.scope, self.generation, self.free.column]
        return {True: [], False: machine}

    # Reading.

    def match(self, scope: int, tokens: Array, node: int = 0) -> TreeMatch:
        """Walks down from `node` (0: the scope's root) as far as `tokens` agree; `tokens` start at the root."""
        branch = self._branches[node] if node else self.roots.get(scope)
        found = TreeMatch([], 0, self.end_page(node), self.end_page(node) * self._page, False, branch is None)
        total = len(tokens)
        while branch is not None and found.semantic < total:
            at = found.semantic
            key = tokens[at : at + self._page].tobytes()
            child = branch.by_page.get(key)
            if child is None:
                found.semantic += branch.common_bytes(key) // 4
                found.diverged = bool(branch.ordered) and found.semantic < total
                break
            edge = self.tokens[child]
            both = min(len(edge), total - at)
            same = _common_tokens(tokens[at : at + both], edge[:both])
            found.nodes.append(child)
            found.last_pages = same // self._page
            found.pages += found.last_pages
            found.semantic += same
            if same < len(edge):
                found.diverged = same < both
                break
            branch = self._branches[child]
        return found

    def end_page(self, node: int) -> int:
        """Pages from the root to the boundary where the node's edge ends; 0 for the root."""
        return int(self.start.array[node] + self.pages.array[node])

    def lock(self, node: int) -> int:
        """Leases at or under the node: the reference count its blocks share."""
        return int(self._pool.ref.array[self.first_block[node]])

    def path(self, node: int) -> list[int]:
        """Nodes from the root side to `node`; empty for node 0."""
        up: list[int] = []
        while node:
            up.append(node)
            node = int(self.parent.array[node])
        return up[::-1]

    def path_blocks(self, nodes: list[int]) -> Array:
        """Blocks of consecutive edges, int64."""
        if not nodes:
            return np.zeros(0, dtype=np.int64)
        return np.concatenate([self.blocks[node] for node in nodes])

    def children_of(self, node: int) -> list[int]:
        branch = self._branches[node]
        return [] if branch is None else [branch.by_page[key] for key in branch.ordered]

    def subtree(self, scope: int) -> Iterator[int]:
        """Every node under a scope's root, parents before children, siblings in key order."""
        root = self.roots.get(scope)
        pending = [] if root is None else [root.by_page[key] for key in reversed(root.ordered)]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(reversed(self.children_of(node)))

    def unlocked_leaves(self) -> Array:
        """Leaves that may be evicted now, by node id (int64)."""
        used = (self.pages.array > 0) & (self.num_children == 0)
        leaves = np.flatnonzero(used)
        return leaves[self._pool.ref.array[self.first_block[leaves]] == 0]

    # Writing; the caller has checked legality.

    def split(self, node: int, pages: int) -> int:
        """Cuts an edge after `pages` pages; the new upper node's id. No block, lock or lower handle changes."""
        cut = pages * self._page
        tokens, blocks = self.tokens[node], self.blocks[node]
        parent, scope = int(self.parent.array[node]), int(self.scope.array[node])
        start = int(self.start.array[node])
        upper = self._create(scope, parent, start, tokens[:cut].copy(), blocks[:pages].copy())
        self._pool.node.write(self.blocks[upper], upper)
        self.tokens[node], self.blocks[node] = tokens[cut:].copy(), blocks[pages:].copy()
        self.first_block[node] = blocks[pages]
        self.parent.put(node, upper)
        self.start.put(node, start + pages)
        self.pages.put(node, len(blocks) - pages)
        self._branch(scope, parent).attach(self._key(upper), upper)
        self._branch(scope, upper).attach(self._key(node), node)
        self.num_children[upper] = 1
        return upper

    def insert(self, scope: int, parent: int, tokens: Array, blocks: Array, entries: Array) -> int:
        """A new leaf edge under `parent` (0: the root, made on demand); the new node's id."""
        node = self._create(scope, parent, self.end_page(parent), tokens.copy(), blocks.copy())
        self._branch(scope, parent).attach(self._key(node), node)
        if parent:
            self.num_children[parent] += 1
        self._pool.index(blocks, node, entries)
        return node

    def extend(self, node: int, tokens: Array, blocks: Array, entries: Array) -> None:
        """Lengthens a leaf edge; its end moves, so handles issued before become stale."""
        self.tokens[node] = np.concatenate([self.tokens[node], tokens])
        self.blocks[node] = np.concatenate([self.blocks[node], blocks])
        self.pages.put(node, len(self.blocks[node]))
        self.generation.put(node, int(self.generation.array[node]) + 1)
        self._pool.index(blocks, node, entries)

    def remove_leaf(self, node: int) -> Array:
        """Takes a leaf edge out of the tree; its blocks, no longer indexed."""
        scope, parent = int(self.scope.array[node]), int(self.parent.array[node])
        branch = self._branch(scope, parent)
        branch.detach(self._key(node))
        if parent:
            self.num_children[parent] -= 1
        elif not branch.by_page:
            del self.roots[scope]
        return self._retire(node)

    def drop_root(self, scope: int) -> Array:
        """Takes a whole root out of the tree; all its blocks, no longer indexed."""
        nodes = list(self.subtree(scope))
        self.roots.pop(scope, None)
        dropped = [self._retire(node) for node in nodes]
        return np.concatenate(dropped) if dropped else np.zeros(0, dtype=np.int64)

    def prefix_entries(self, scope_print: int, tokens: Array, first_page: int) -> Array:
        """Nonzero uint64 fingerprints of the prefixes that end at each page from `first_page` on.

        A fingerprint covers the scope and every token before the page's end, so it does not depend on splits.
        """
        weighed = (tokens.astype(np.uint64) + np.uint64(1)) * self._weights[: len(tokens)]
        sums = np.cumsum(weighed.reshape(-1, self._page).sum(axis=1, dtype=np.uint64), dtype=np.uint64)
        return mix_words(sums[first_page:] ^ np.uint64(scope_print)) | np.uint64(1)

    def _create(self, scope: int, parent: int, start: int, tokens: Array, blocks: Array) -> int:
        node = self.free.take_one()
        self.tokens[node], self.blocks[node] = tokens, blocks
        self.first_block[node] = blocks[0]
        self.num_children[node] = 0
        self._branches[node] = None
        self.parent.put(node, parent)
        self.start.put(node, start)
        self.pages.put(node, len(blocks))
        self.scope.put(node, scope)
        return node

    def _retire(self, node: int) -> Array:
        blocks = self.blocks[node]
        self._pool.unindex(blocks)
        for column in (self.parent, self.start, self.pages, self.scope):
            column.put(node, 0)
        self.generation.put(node, int(self.generation.array[node]) + 1)
        self.tokens[node], self.blocks[node] = self.tokens[0], self.blocks[0]
        self._branches[node] = None
        self.num_children[node] = 0
        self.free.push_one(node)
        return blocks

    def _key(self, node: int) -> bytes:
        return self.tokens[node][: self._page].tobytes()

    def _branch(self, scope: int, node: int) -> Branch:
        if not node:
            return self.roots.setdefault(scope, Branch())
        branch = self._branches[node]
        if branch is None:
            branch = self._branches[node] = Branch()
        return branch


def _common_tokens(left: Array, right: Array) -> int:
    differs = left != right
    first = int(differs.argmax())
    return first if differs[first] else len(differs)
