"""Which cached edges make room: every candidate kept from receipts, chosen by a policy, within the namespaces' shares.

Owns the candidate queues and what was told to the policies, none of the ledger's facts: each is asked again before an edge
is named, and every ledger checks the names (K045, K122). Policies judge an edge by its first block, which is used whenever
any part of the edge is. Namespaces without floor or ceiling share one queue, the others have one each. Invariant: every edge that
``Ledger.evictable_leaves`` would list is in its namespace's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from heapq import heapify, heappop, heapreplace

import msgspec
import numpy as np

from copyhold.kvcore.commands import BlockHandle, NodeHandle
from copyhold.kvcore.errors import StaleTreeVersion
from copyhold.kvcore.ledger import Ledger

from .errors import NoRoom
from .leaf_queue import LeafQueue, Lowest, Tops
from .policies import Policy, RecencyRule, Worth
from .retention import Lifetimes, Prioritized, Retention, RetentionLimits
from .shares import Shares
from .window_room import NO_WINDOWS, choose_trim, windows_fit

Queue = LeafQueue[NodeHandle]
MakePolicy = Callable[[int, int], Policy]
"""(units, capacity in units) -> a new policy."""

_OPEN = ""
"""The queue of all namespaces that only the pool bounds: no namespace has an empty name."""

AHEAD = 128
"""Where tenants share the pool, a choice frees one block in so many more than is missing: it then pays for several requests."""


class Victims(msgspec.Struct, frozen=True):
    """Edges to evict, children before parents, and the blocks that frees in each namespace.

    ``trim``: blocks of sliding windows to give back before; their edges stay, and no share counts them.
    """

    nodes: tuple[NodeHandle, ...] = ()
    freed_by_namespace: Mapping[str, int] = {}
    namespaces: tuple[str, ...] = ()
    blocks: tuple[np.ndarray, ...] = ()
    trim: tuple[BlockHandle, ...] = ()

    @property
    def freed_blocks(self) -> int:
        return sum(self.freed_by_namespace.values())


class EvictionReport(msgspec.Struct, frozen=True):
    """More than a hit rate (K199): what the cache of one replica saved, holds and threw away; blocks and tokens."""

    cached_tokens: int
    prompt_tokens: int
    published_blocks: int
    refused_blocks: int
    evicted_blocks: int
    evicted_unused_blocks: int
    expired_blocks: int
    pinned_blocks: int


class Evictor:
    """One pool's choices. With strict isolation every namespace has a policy, and thereby a clock, of its own."""

    def __init__(
        self,
        ledger: Ledger,
        num_blocks: int,
        shares: Shares,
        make_policy: MakePolicy,
        limits: RetentionLimits,
        recency: RecencyRule = "path",
    ) -> None:
        self._ledger = ledger
        self._recency = recency
        self._shares = shares
        self._limits = limits
        self._make = partial(make_policy, num_blocks)
        self._num_blocks = num_blocks
        self._priority = np.zeros(num_blocks, dtype=np.int64)
        self._lifetimes = Lifetimes(num_blocks)
        self._hit = np.zeros(num_blocks, dtype=np.bool_)
        self._common: Prioritized | None = None
        self._policies: dict[str, Prioritized] = {}
        self._queues: dict[str, Queue] = {}
        self._gone: dict[int, int] = {}
        self._chosen: dict[NodeHandle, tuple[Queue, int]] = {}
        self._pinned: dict[str, int] = {}
        self._any_pinned = False
        self._counts: dict[str, int] = dict.fromkeys(EvictionReport.__struct_fields__, 0)

    # -- what happened ------------------------------------------------------------------------------------------

    def admitted(
        self,
        namespace: str,
        prompt_tokens: int,
        terminal: NodeHandle | None,
        blocks: np.ndarray,
        asked: Retention,
        now_s: float,
    ) -> None:
        """An authorized lookup hit these blocks, root side first, down to ``terminal`` (K124)."""
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["cached_tokens"] += len(blocks) * self._ledger.state.block_size
        self._hit[blocks] = True
        self.policy_of(namespace).touched(self._used(terminal, blocks))
        self._lifetimes.extend(blocks, _until(asked, now_s))
        if terminal is not None:
            self._look_again_below(namespace, terminal, 1)

    def hit_tail(self, rows: int) -> None:
        """An authorized lookup hit a partial tail behind those blocks."""
        self._counts["cached_tokens"] += rows

    def worth_keeping(
        self, namespace: str, first_page: int, blocks: int, asked: Retention, given_blocks: int = 0
    ) -> bool:
        """The same test as eviction (K196): False where room is scarce and a newcomer would be the next victim.

        Asked once, when a request is admitted and ``blocks`` of its prompt are still to be given to it, so that the
        answer does not depend on how its prompt is cut into steps; ``given_blocks`` of its own it has already.
        """
        room = self._shares.room(namespace, self._ledger.gauge().free) - blocks
        if asked.priority or room > self._num_blocks // 16:
            return True
        self._forget_choice()
        names = [namespace] if self._shares.strict else list(self._queues)
        found = [self._queue(name).lowest() for name in names]
        worths = [lowest.worth for lowest in found if lowest is not None]
        kept = not worths or self.policy_of(namespace).newcomer(first_page) >= min(worths)
        if not kept:
            self._counts["refused_blocks"] += given_blocks + blocks
        return kept

    def published(
        self,
        namespace: str,
        path: tuple[NodeHandle, ...],
        first_page: int,
        blocks: np.ndarray,
        asked: Retention,
        now_s: float,
    ) -> None:
        """``blocks`` are new in the index from page ``first_page`` on; ``path`` is what the request leases now."""
        if len(blocks) == 0:
            return
        priority = asked.priority
        if priority and self.pinned_blocks(namespace) + len(blocks) > self._limits.pin_blocks:
            priority = 0
        self._any_pinned = self._any_pinned or priority > 0
        if self._any_pinned:
            self._priority[blocks] = priority
        if priority:
            self._pinned[namespace] = self.pinned_blocks(namespace) + len(blocks)
        self._hit[blocks] = False
        self._counts["published_blocks"] += len(blocks)
        until_s = _until(asked, now_s)
        self._lifetimes.start(blocks, until_s)
        self._lifetimes.watch(path[-1], until_s)
        self.policy_of(namespace).published(blocks, first_page, self._prints(blocks))
        if len(path) > 1:
            self._look_again_below(namespace, path[-2], 2)

    def released(
        self, namespace: str, terminal: NodeHandle | None, blocks: np.ndarray, reply_tokens: int = 0
    ) -> None:
        """A request gave back its path, which ended at ``terminal``; ``blocks`` are those of its table in the index."""
        self.policy_of(namespace).held(self._used(terminal, blocks), reply_tokens)
        if terminal is not None:
            self._queue(namespace).push(terminal)

    def evicted(self, victims: Victims) -> None:
        """The ledger carried out a choice."""
        if not victims.nodes:
            return
        for node in victims.nodes:
            self._chosen.pop(node, None)
        for namespace, blocks in victims.freed_by_namespace.items():
            self._shares.give_back(namespace, blocks)
        if not victims.blocks:
            return
        gone = victims.blocks[0] if len(victims.blocks) == 1 else np.concatenate(victims.blocks)
        self._counts["evicted_blocks"] += len(gone)
        self._counts["evicted_unused_blocks"] += len(gone) - int(np.count_nonzero(self._hit[gone]))
        pinned = self._any_pinned and bool(self._priority[gone].any())
        for namespace, blocks in zip(victims.namespaces, victims.blocks, strict=True):
            if pinned:
                fewer = int(np.count_nonzero(self._priority[blocks]))
                self._pinned[namespace] = self.pinned_blocks(namespace) - fewer
            policy = self.policy_of(namespace)
            if policy.ignores_freed:
                continue
            for block in blocks.tolist():
                policy.freed(block)

    def dropped(self, namespace: str, freed_blocks: int) -> None:
        """The namespace's floor rose: its roots are gone."""
        self._shares.give_back(namespace, freed_blocks)
        self._pinned.pop(namespace, None)

    # -- choices ------------------------------------------------------------------------------------------------

    def choose(
        self,
        needs: Mapping[str, int],
        protected: frozenset[NodeHandle] = frozenset(),
        window_needs: Mapping[int, int] = NO_WINDOWS,
    ) -> Victims:
        """Whole edges to evict so that each namespace gets the blocks it needs; ``protected`` ones stay.

        ``window_needs``: blocks of each cache group with a window that are wanted besides.
        Raises: ``NoRoom``, with the namespace whose own ceiling is in the way, if one is; nothing changed.
        """
        free = self._ledger.gauge().free
        windows_short = bool(window_needs) and not windows_fit(self._ledger, window_needs)
        if not windows_short and sum(needs.values()) <= free and all(map(self._shares.is_open, needs)):
            return Victims()
        self._forget_choice()
        choice = _Choice(self, protected)
        try:
            for namespace, needed in needs.items():
                if self._shares.is_open(namespace):
                    continue
                over = self._shares.above_ceiling(namespace, needed)
                if over and choice.take({namespace: self._num_blocks}, over) < over:
                    raise NoRoom(over, choice.freed_blocks, namespace)
            missing = sum(needs.values()) - free - choice.freed_blocks
            missing -= choice.take_tails(missing)
            if missing > 0:
                freed = choice.take(self._spare(needs), missing)
                if freed < missing:
                    raise NoRoom(missing, freed)
            if not windows_short:
                return choice.victims()
            take_edge = partial(choice.take, self._spare(needs), 1)
            return choice.victims(
                choose_trim(self._ledger, window_needs, protected, choice.taken, lambda: take_edge() > 0)
            )
        finally:
            choice.close()

    def expired(self, now_s: float) -> Victims:
        """Edges whose time is over, descendants first; those in use are looked at again later."""
        due = self._lifetimes.take_due(now_s)
        if not due:
            return Victims()
        self._forget_choice()
        choice = _Choice(self, frozenset())
        try:
            for node in due:
                choice.take_expired(node, now_s)
            victims = choice.victims()
        finally:
            choice.close()
        self._counts["expired_blocks"] += victims.freed_blocks
        return victims

    def pinned_blocks(self, namespace: str) -> int:
        """Blocks of the namespace that are kept with a priority above 0."""
        return self._pinned.get(namespace, 0)

    def worth_of(self, namespace: str, block: int) -> Worth:
        """What the policy thinks of an edge that begins with ``block``."""
        policy = self.policy_of(namespace)
        return policy.worth(policy.lane(block), policy.key(block))

    def candidates(self) -> set[NodeHandle]:
        """Every queued edge, out-of-date ones included."""
        self._forget_choice()
        return {node for queue in self._queues.values() for node in queue}

    def report(self) -> EvictionReport:
        """Counts since the start, and what is pinned now."""
        return EvictionReport(**{**self._counts, "pinned_blocks": sum(self._pinned.values())})

    # -- inside -------------------------------------------------------------------------------------------------

    def policy_of(self, namespace: str) -> Prioritized:
        """The policy that judges a namespace's edges."""
        if self._common is not None:
            return self._common
        if not self._shares.strict:
            if self._common is None:
                self._common = Prioritized(self._make(self._num_blocks), self._priority)
            return self._common
        policy = self._policies.get(namespace)
        if policy is None:
            own = self._make(self._shares.ceiling(namespace))
            policy = self._policies[namespace] = Prioritized(own, self._priority)
        return policy

    def _used(self, terminal: NodeHandle | None, blocks: np.ndarray) -> np.ndarray:
        """What the rule of recency counts as used of a path's blocks, which ends at ``terminal``."""
        if self._recency == "path" or terminal is None:
            return blocks
        return blocks[-len(self._ledger.state.tree.blocks[terminal.node]) :]

    def _look_again_below(self, namespace: str, node: NodeHandle, most: int) -> None:
        """Queue the children of a node that may just have come from a split, which has no more than ``most``: the lower
        half keeps its handle and its place in a queue, but is judged by another block now."""
        tree = self._ledger.state.tree
        if 0 < tree.num_children.item(node.node) <= most:
            for child in tree.children_of(node.node):
                self._queue(namespace).push(NodeHandle(child, tree.generation.array.item(child)))

    def _queue(self, namespace: str) -> Queue:
        name = _OPEN if self._shares.is_open(namespace) else namespace
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = LeafQueue(self.policy_of(namespace), self._exposed)
        return queue

    def _spare(self, needs: Mapping[str, int]) -> Mapping[str, int]:
        """Blocks that each queue may give."""
        most = self._num_blocks
        return {
            name: most if not name or name in needs else self._shares.above_floor(name)
            for name in self._queues
        }

    def _forget_choice(self) -> None:
        """Queue again what the last choice took, if the ledger did not carry it out."""
        for node, (queue, unit) in self._chosen.items():
            queue.restore(node, unit)
        self._chosen.clear()

    def _prints(self, blocks: np.ndarray) -> np.ndarray:
        """The ledger's fingerprints of the prefixes that end with these blocks, uint64."""
        return self._ledger.state.pools[0].entry.array[blocks].view(np.uint64)

    def _exposed(self, node: NodeHandle) -> int | None:
        """The first block of an edge that could go now, given what the running choice has taken."""
        tree, number = self._ledger.state.tree, node.node
        if tree.generation.array.item(number) != node.generation or not tree.pages.array.item(number):
            return None
        if tree.num_children.item(number) != self._gone.get(number, 0) or tree.lock(number):
            return None
        return tree.first_blocks[0].item(number)


class _Choice:
    """One choice in the making: what it takes counts as gone until it is closed; nothing outside it changes."""

    def __init__(self, evictor: Evictor, protected: frozenset[NodeHandle]) -> None:
        self._evictor = evictor
        self._protected = protected
        self._set_aside: list[tuple[Queue, NodeHandle, int]] = []
        self._nodes: list[NodeHandle] = []
        self._tails: list[NodeHandle] = []
        self._namespaces: list[str] = []
        self._blocks: list[np.ndarray] = []
        self._freed: dict[str, int] = {}
        self._tops: dict[str, Tops[NodeHandle]] = {}
        self._tree = evictor._ledger.state.tree
        self._namespace_of: dict[int, str] = {}
        self.freed_blocks = 0

    def victims(self, trim: tuple[BlockHandle, ...] = ()) -> Victims:
        names, blocks = tuple(self._namespaces), tuple(self._blocks)
        return Victims((*self._tails, *self._nodes), dict(self._freed), names, blocks, trim)

    def taken(self) -> list[int]:
        """Ids of the edges taken so far."""
        return [node.node for node in self._nodes]

    def take_tails(self, needed: int) -> int:
        """Take partial tails that nobody holds: they go before any whole block; the blocks that frees."""
        tails, freed = self._tree.tails, 0
        if needed <= 0 or not tails.by_node:
            return 0
        refs = self._evictor._ledger.state.pool.ref.array
        for tail in sorted(tails.tokens):
            handle = tails.handle(tail)
            if freed == needed or refs.item(tails.block_of(tail)) or handle in self._protected:
                continue
            self._tails.append(handle)
            self._count(self._tree.scope.array.item(tails.node.array.item(tail)), 1)
            freed += 1
        return freed

    def _count(self, scope_id: int, blocks: int) -> str:
        """Counts blocks as freed by a scope's namespace, which it names."""
        namespace = self._namespace_of.get(scope_id)
        if namespace is None:
            namespace = self._evictor._ledger.state.scopes.scope(scope_id).namespace
            self._namespace_of[scope_id] = namespace
        self._freed[namespace] = self._freed.get(namespace, 0) + blocks
        self.freed_blocks += blocks
        return namespace

    def take(self, spare: Mapping[str, int], needed: int) -> int:
        """Take least worth edges from the queues, at most ``spare`` blocks of each; the blocks that frees."""
        freed = 0
        if len(spare) == 1 and _OPEN in spare:
            return self._take_open(needed + self._evictor._num_blocks // AHEAD)
        taken = {name: self._freed.get(name, 0) for name in spare}
        heads = [head for name in spare if (head := self._head(name)) is not None]
        heapify(heads)
        while heads and freed < needed:
            _, name, lowest = heads[0]
            blocks = len(self._tree.blocks[lowest.node.node])
            if taken[name] + blocks > spare[name]:
                heappop(heads)
                continue
            self._remove(lowest.node, self._evictor._queues[name])
            taken[name] += blocks
            freed += blocks
            head = self._head(name)
            if head is None:
                heappop(heads)
            else:
                heapreplace(heads, head)
        return freed

    def _take_open(self, needed: int) -> int:
        """`take` where one queue holds every candidate and all of it may go; the rest makes room for who comes next."""
        freed, queue, blocks = 0, self._evictor._queues[_OPEN], self._tree.blocks
        tops = self._tops.setdefault(_OPEN, Tops())
        while freed < needed:
            lowest = queue.lowest(tops)
            if lowest is None:
                break
            node = lowest.node
            if node in self._protected:
                queue.take(node)
                self._set_aside.append((queue, node, lowest.unit))
                continue
            freed += len(blocks[node.node])
            self._remove(node, queue)
        return freed

    def take_expired(self, node: NodeHandle, now_s: float) -> None:
        """Take an edge whose time is over and, then, ancestors that it exposes and whose time is over too."""
        lifetimes, ledger = self._evictor._lifetimes, self._evictor._ledger
        while node.node:
            try:
                view = ledger.node(node)
            except StaleTreeVersion:
                return
            block = int(view.blocks[0])
            if self._evictor._exposed(node) is None or not lifetimes.over(block, now_s):
                lifetimes.watch_again(node, now_s, lifetimes.until_s(block))
                return
            if node not in self._nodes:
                self._remove(node, self._evictor._queue(view.scope.namespace))
            node = view.parent

    def close(self) -> None:
        """Forget what was taken; it is queued again at the next choice, unless the ledger carried it out."""
        self._evictor._gone.clear()
        for queue, node, unit in self._set_aside:
            queue.restore(node, unit)

    def _head(self, name: str) -> tuple[Worth, str, Lowest[NodeHandle]] | None:
        queue = self._evictor._queues.get(name)
        if queue is None:
            return None
        tops = self._tops.get(name)
        if tops is None:
            tops = self._tops[name] = Tops()
        while True:
            lowest = queue.lowest(tops)
            if lowest is None:
                return None
            if lowest.node not in self._protected:
                return lowest.worth, name, lowest
            queue.take(lowest.node)
            self._set_aside.append((queue, lowest.node, lowest.unit))

    def _remove(self, node: NodeHandle, queue: Queue) -> None:
        evictor, tree, number = self._evictor, self._tree, node.node
        blocks, parent = tree.blocks[number], tree.parent.array.item(number)
        hung = tree.tails.at(number) if tree.tails.by_node else ()
        with_it = sum(tree.tails.handle(tail) not in self._tails for tail in hung)
        namespace = self._count(tree.scope.array.item(number), len(blocks) + with_it)
        queue.take(node)
        evictor._chosen[node] = (queue, tree.first_blocks[0].item(number))
        self._nodes.append(node)
        self._namespaces.append(namespace)
        self._blocks.append(blocks)
        if parent:
            gone = evictor._gone
            gone[parent] = children = gone.get(parent, 0) + 1
            if tree.num_children.item(parent) == children:
                queue.push(NodeHandle(parent, tree.generation.array.item(parent)))


def _until(asked: Retention, now_s: float) -> float:
    return np.inf if asked.ttl_s is None else now_s + asked.ttl_s
