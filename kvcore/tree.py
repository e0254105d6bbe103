"""The prefix tree: compressed edges over whole pages, one root per scope, compared token by token.

Owns nodes (edge tokens int32 [pages * page_tokens], per cache group edge blocks int64 [pages * page_tokens /
block_size]) and their children. A page is the alignment of the groups: the least common multiple of their
block sizes. Invariants: a node has at least one page; edges of one parent differ in their first page; a lease
ends where an edge ends; whoever references blocks of an edge references its first ones, so the first block's
count is the edge's lock. Groups with a window lock nothing: an edge holds `NOT_RESIDENT` where it has no block of
theirs, and what is resident is told by their blocks' records. A `NodeHandle` names the boundary where an edge *ends*:
splitting keeps the lower half's handle. Walks are loops, never recursion.
Source: SGLang's RadixAttention (idea); LEDGER "Prefix tree"; contracts K111 to K121, K123.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from . import loops
from .columns import Digested, IdStack, Records
from .digest import Array
from .pool import BlockPool, Sums
from .tail_table import TailTable

Children = dict[bytes, int]
NOT_RESIDENT = -1
"""Stands in an edge's blocks of a window group where the tree holds none."""


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
        at, length = bisect_left(self.ordered, query), len(query)
        asked = int.from_bytes(query)
        apart = 8 * length
        for key in self.ordered[max(at - 1, 0) : at + 1]:
            apart = min(apart, (int.from_bytes(key[:length]) ^ asked).bit_length())
        return length - (apart + 7) // 8


_NO_BLOCKS: Array = np.zeros(0, dtype=np.int64)
_SHORT_EDGE = 2048
"""Tokens up to which two copies and one comparison of bytes are cheaper than a call of a compiled loop."""


class TreeMatch(msgspec.Struct):
    """A read-only walk: nodes root side first, how many pages of the last one matched, token-exact length."""

    nodes: list[int]
    last_pages: int
    pages: int
    semantic: int
    diverged: bool
    root_empty: bool


class PrefixTree:
    """All roots over the pools of all cache groups. `blocks` are the edges' blocks in group 0."""

    def __init__(
        self, pools: tuple[BlockPool, ...], page_tokens: int, weights: Array, sums: Sums, requests: int
    ) -> None:
        # A node owns at least one page of full attention, so there are never more nodes than pages in those pools.
        full = [pool for pool in pools if not pool.window]
        bounded = [pool.num_blocks * pool.block_size // page_tokens for pool in full]
        size = 1 + (min(bounded) if full else 2 * requests + 4 * min(pool.num_blocks for pool in pools))
        self._pools = pools
        self.locking = [pool.group for pool in full]
        self.terminals = Records("lease", 0, 1).column(0, "terminal", sums.machine)
        self._page = page_tokens
        self._weights = weights
        self.per_page = [page_tokens // pool.block_size for pool in pools]
        records = Records("node", size, 5)
        self.parent = records.column(0, "parent", sums.machine)
        self.start = records.column(1, "start", sums.machine)
        self.pages = records.column(2, "pages", sums.machine)
        self.scope = records.column(3, "scope", sums.machine)
        self.generation = records.column(4, "generation", sums.machine)
        self.records = records
        self._sums = sums
        self.free = IdStack("node.free", size, 1, sums.machine)
        self._spaces: Array = np.array([records.space, self.free.column.space], dtype=np.uint64)
        self.num_children = np.zeros(size, dtype=np.int32)
        self.first_blocks: list[Array] = [np.zeros(size, dtype=np.int64) for _ in pools]
        # Fingerprint sum of all tokens from the root to the end of the edge.
        self.end_sum: Array = np.zeros(size, dtype=np.uint64)
        # Contents of nodes [0, highest node ever used]: a large pool has far fewer nodes than pages.
        self.tokens: list[Array] = [np.zeros(0, dtype=np.int32)]
        self.edges: list[list[Array]] = [[_NO_BLOCKS] for _ in pools]
        self.blocks = self.edges[0]
        self._branches: list[Branch | None] = [None]
        self.roots: dict[int, Branch] = {}
        self.tails = TailTable(sums)

    def parts(self) -> list[Digested]:
        """Every array that has a share in a digest."""
        return [self.records, self.free.column, self.tails.records]

    # Reading.

    def match(
        self, scope: int, tokens: Array, node: int = 0, *, content: bytes = b"", pages_only: bool = False
    ) -> TreeMatch:
        """Walks down from `node` (0: the scope's root) as far as `tokens` agree; `tokens` start at the root.

        `content`, where it is at hand, are the bytes of all tokens. With `pages_only` the length within a page that no edge
        begins with is left out.
        """
        branch = self._branches[node] if node else self.roots.get(scope)
        page, start = self._page, self.end_page(node) if node else 0
        found = TreeMatch([], 0, start, start * page, False, branch is None)
        total, nodes = len(tokens), found.nodes
        if branch is None or start * page >= total:
            return found
        at = start * page
        origin = 0 if content else 4 * at
        content = content or tokens[at:].tobytes()
        while branch is not None and at < total:
            here = 4 * at - origin
            key = content[here : here + 4 * page]
            child = branch.by_page.get(key)
            if child is None:
                if pages_only:
                    break
                at += branch.common_bytes(key) // 4
                found.diverged = bool(branch.ordered) and at < total
                break
            edge = self.tokens[child]
            length = len(edge)
            if length == page or (
                length <= _SHORT_EDGE and content[here : here + 4 * length] == edge.tobytes()
            ):
                same = length
            else:
                left = min(length, total - at)
                same = loops.common_tokens(np.frombuffer(content, np.int32, left, here), edge)
            nodes.append(child)
            found.last_pages = same // page
            found.pages += found.last_pages
            at += same
            if same < length:
                found.diverged = at < total
                break
            branch = self._branches[child]
        found.semantic = at
        return found

    def end_page(self, node: int) -> int:
        """Pages from the root to the boundary where the node's edge ends; 0 for the root."""
        return self.start.array.item(node) + self.pages.array.item(node)

    def lock(self, node: int) -> int:
        """References to the edge: the count of its first block, in the group of full attention where it is highest.

        Where every group has a window, the requests that lease a path through it are counted.
        """
        if not self.locking:
            return int(self._path_leases()[node])
        held = 0
        for group in self.locking:
            count = self._pools[group].ref.array.item(self.first_blocks[group].item(node))
            if count > held:
                held = count
        if node in self.tails.by_node:
            return max(held, self.tail_references(node))
        return held

    def tail_references(self, node: int) -> int:
        """References to the block of a tail at the node, where they are most: they lock the node as its edge's do."""
        refs = self._pools[0].ref.array
        return max([0, *[refs.item(self.tails.block_of(tail)) for tail in self.tails.at(node)]])

    def path(self, node: int) -> list[int]:
        """Nodes from the root side to `node`; empty for node 0."""
        up: list[int] = []
        while node:
            up.append(node)
            node = self.parent.array.item(node)
        up.reverse()
        return up

    def path_blocks(self, nodes: list[int], group: int = 0) -> Array:
        """Blocks of consecutive edges in one group, int64; to be read only."""
        edges = self.edges[group]
        if len(nodes) == 1:
            return edges[nodes[0]]
        return np.concatenate([edges[node] for node in nodes]) if nodes else _NO_BLOCKS

    def edge_blocks(self, node: int) -> tuple[Array, ...]:
        """Blocks of one edge, by group."""
        return tuple([edges[node] for edges in self.edges])

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
        if not self.locking:
            return leaves[self._path_leases()[leaves] == 0]
        for group in self.locking:
            leaves = leaves[self._pools[group].ref.array[self.first_blocks[group][leaves]] == 0]
        if self.tails.by_node:
            free = [not self.tail_references(node) for node in leaves.tolist()]
            leaves = leaves[np.array(free, dtype=np.bool_)]
        return leaves

    def _path_leases(self) -> Array:
        """How many requests lease a path through each node, int64 [nodes], from their terminals."""
        counts = np.zeros(len(self.pages.array), dtype=np.int64)
        terminals = self.terminals.array
        for node in terminals[terminals != 0].tolist():
            counts[self.path(node)] += 1
        return counts

    # Writing; the caller has checked legality. `blocks` are int64 arrays, one a group.

    def split(self, node: int, pages: int) -> int:
        """Cuts an edge after `pages` pages; the new upper node's id. No block, lock or lower handle changes."""
        cut = pages * self._page
        tokens, held = self.tokens[node], int(self.pages.array[node])
        parent, scope = int(self.parent.array[node]), int(self.scope.array[node])
        start = int(self.start.array[node])
        blocks = self.edge_blocks(node)
        ends = [pages * per_page for per_page in self.per_page]
        uppers = tuple([part[:end].copy() for part, end in zip(blocks, ends, strict=True)])
        upper = self._create(scope, parent, start, tokens[:cut].copy(), uppers)
        self.end_sum[upper] = self._sum_after(parent, self.tokens[upper])
        for pool, part in zip(self._pools, uppers, strict=True):
            pool.move(_resident(pool, part), upper)
        self.tokens[node] = tokens[cut:].copy()
        for edges, part, end in zip(self.edges, blocks, ends, strict=True):
            edges[node] = part[end:].copy()
        self._note_first_blocks(node)
        self.parent.put(node, upper)
        self.start.put(node, start + pages)
        self.pages.put(node, held - pages)
        self._branch(scope, parent).attach(self._key(upper), upper)
        self._branch(scope, upper).attach(self._key(node), node)
        self.num_children[upper] = 1
        return upper

    def insert(self, scope: int, parent: int, tokens: Array, blocks: tuple[Array, ...]) -> int:
        """A new leaf edge under `parent` (0: the root, made on demand); the new node's id. `index` follows.

        `blocks` become the edge's own, `tokens` are copied.
        """
        node = self._create(scope, parent, self.end_page(parent), tokens.copy(), blocks)
        self._branch(scope, parent).attach(self._key(node), node)
        if parent:
            self.num_children[parent] += 1
        return node

    def extend(self, node: int, tokens: Array, blocks: tuple[Array, ...]) -> None:
        """Lengthens a leaf edge; its end moves, so handles issued before become stale. `index` follows."""
        self.tokens[node] = np.concatenate([self.tokens[node], tokens])
        for edges, part in zip(self.edges, blocks, strict=True):
            edges[node] = np.concatenate([edges[node], part])
        self.pages.put(node, len(self.tokens[node]) // self._page)
        self.generation.put(node, int(self.generation.array[node]) + 1)

    def index(
        self, node: int, tokens: Array, blocks: tuple[Array, ...], scope_print: Any, before: Any
    ) -> None:
        """Enters the last `len(tokens)` tokens of an edge and their blocks; `before` is the sum above them.

        `scope_print` and `before` are uint64 scalars.
        """
        first = (self.end_page(node) * self._page) - len(tokens)
        for pool, part in zip(self._pools, blocks, strict=True):
            entries, end = self.prefix_entries(scope_print, tokens, first, before, pool.block_size)
            if pool.window:
                pool.index_places(part, node, entries, first // pool.block_size)
            else:
                pool.index(part, node, entries)
            self.end_sum[node] = end

    def remove_leaves(self, nodes: tuple[int, ...]) -> tuple[Array, ...]:
        """Takes leaf edges out of the tree, in this order; their resident blocks by group, last edge first, still
        indexed.
        """
        scopes, parents = self.scope.array, self.parent.array
        for node in nodes:
            scope, parent = scopes.item(node), parents.item(node)
            branch = self._branch(scope, parent)
            branch.detach(self._key(node))
            if parent:
                self.num_children[parent] -= 1
            elif not branch.by_page:
                del self.roots[scope]
        return self._retire(nodes)

    def drop_root(self, scope: int) -> tuple[Array, ...]:
        """Takes a whole root out of the tree; all its resident blocks by group, still indexed."""
        nodes = tuple(self.subtree(scope))
        self.roots.pop(scope, None)
        return self._retire(nodes)

    def adopt(self, node: int, tokens: Array, blocks: tuple[Array, ...]) -> None:
        """Gives a node whose records are there its content; `link` follows where nodes are restored, when all are."""
        if node >= len(self.tokens):
            self._make_room(node)
        self.tokens[node] = tokens
        for edges, part in zip(self.edges, blocks, strict=True):
            edges[node] = part
        self._note_first_blocks(node)

    def link(self, nodes: list[int]) -> None:
        """Makes roots, children and sums again from the records and contents of all used nodes."""
        for node in sorted(nodes, key=lambda used: int(self.start.array[used])):
            parent = int(self.parent.array[node])
            self._branch(int(self.scope.array[node]), parent).attach(self._key(node), node)
            if parent:
                self.num_children[parent] += 1
            self.end_sum[node] = self._sum_after(parent, self.tokens[node])

    def prefix_entries(
        self, scope_print: Any, tokens: Array, first: int, before: Any, block_size: int
    ) -> tuple[Array, Any]:
        """Nonzero uint64 fingerprints of the prefixes that end at each block of `tokens`, and the sum at the end.

        `tokens` begin at position `first`, after a prefix of sum `before`. A fingerprint covers the scope and
        every token before the block's end, so it does not depend on splits.
        """
        found = np.empty(len(tokens) // block_size, dtype=np.uint64)
        weights = self._weights[first : first + len(tokens)]
        end = loops.page_entries(tokens, weights, block_size, before, scope_print, found)
        return found, np.uint64(end)

    def _sum_after(self, parent: int, tokens: Array) -> int:
        first = self.end_page(parent) * self._page
        _, end = self.prefix_entries(np.uint64(0), tokens, first, self.end_sum[parent], len(tokens))
        return int(end)

    def _create(self, scope: int, parent: int, start: int, tokens: Array, blocks: tuple[Array, ...]) -> int:
        records, ids = self.records, self.free
        ids.count -= 1
        node = int(
            loops.open_node(
                records.cells,
                parent,
                start,
                len(tokens) // self._page,
                scope,
                ids.column.array,
                ids.count,
                self._spaces,
                self._sums.all,
            )
        )
        self.adopt(node, tokens, blocks)
        self.num_children[node] = 0
        self._branches[node] = None
        return node

    def _make_room(self, node: int) -> None:
        more = node + 1 - len(self.tokens)
        self.tokens += self.tokens[:1] * more
        self._branches += [None] * more
        for edges in self.edges:
            edges += edges[:1] * more

    def _note_first_blocks(self, node: int) -> None:
        for first, edges in zip(self.first_blocks, self.edges, strict=True):
            first[node] = edges[node][0]

    def _retire(self, nodes: tuple[int, ...]) -> tuple[Array, ...]:
        """Frees the records of nodes; the resident blocks they had, by group, last node first."""
        if not nodes:
            return tuple([_NO_BLOCKS for _ in self._pools])
        last_first = nodes[::-1]
        parts = tuple(
            [_resident(pool, self.path_blocks(list(last_first), pool.group)) for pool in self._pools]
        )
        if self.tails.by_node:
            parts = (np.concatenate([self.tails.remove_at(nodes), parts[0]]), *parts[1:])
        records, ids = self.records, self.free.column
        loops.retire_nodes(
            records.cells,
            np.array(last_first, dtype=np.int64),
            self.generation.field,
            self.num_children,
            self.end_sum,
            ids.array,
            self.free.count,
            records.space,
            ids.space,
            self._sums.all,
        )
        self.free.count += len(nodes)
        nothing = self.tokens[0]
        for node in nodes:
            self.tokens[node] = nothing
            self._branches[node] = None
            for edges in self.edges:
                edges[node] = edges[0]
        return parts

    def mark(self, group: int, node: int, places: Array, blocks: Array | int) -> None:
        """Puts blocks (or `NOT_RESIDENT`) at places of one edge; places count the group's blocks from the root."""
        held = self.edges[group][node].copy()
        held[places - int(self.start.array[node]) * self.per_page[group]] = blocks
        self.edges[group][node] = held

    def _key(self, node: int) -> bytes:
        return self.tokens[node][: self._page].tobytes()

    def _branch(self, scope: int, node: int) -> Branch:
        if not node:
            return self.roots.setdefault(scope, Branch())
        branch = self._branches[node]
        if branch is None:
            branch = self._branches[node] = Branch()
        return branch


def _resident(pool: BlockPool, blocks: Array) -> Array:
    return blocks[blocks != NOT_RESIDENT] if pool.window else blocks
