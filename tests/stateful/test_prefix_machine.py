"""The prefix tree, a hash chain and a plain dictionary, driven together: they agree on every hit and every eviction.

Pages of one and of three tokens. The structure of the tree is checked beside them, from edges and leases alone: edges own as many
rows as tokens and none is empty, siblings differ in their first page, a node's lock is the leases at or under it, only unlocked
leaves may go (K111 to K123), each command takes the next index and both digests (K129).
"""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Admit,
    AdvanceGeneration,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    GroupSpec,
    NodeHandle,
    Publish,
    Release,
    RequestHandle,
    Reset,
    RowSpan,
    Scope,
)
from copyhold.kvcore.errors import (
    InternalNodeEvicted,
    LedgerRefusal,
    LockedLeafEvicted,
    OutOfMemory,
    ResetWithLiveReferences,
    StaleTreeVersion,
)
from copyhold.kvcore.ledger import Ledger

SLOTS, LONGEST = 4, 24
STEMS = ([0] * LONGEST, [0] * 7 + [1] * 17, [0, 0, 1] * 8, [2] * LONGEST)
PROMPTS = st.builds(
    lambda stem, length, tail: (stem[:length] + tail)[:LONGEST],
    st.sampled_from(STEMS),
    st.integers(1, LONGEST),
    st.lists(st.integers(0, 2), max_size=2),
)
Prefix = tuple[int, ...]


class Chains:
    """Digests of whole pages, each over its parent's: a second way to know what is cached."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.known: set[bytes] = set()

    def digests(self, scope: Scope, tokens: list[int]) -> list[bytes]:
        parent, found = repr(scope).encode(), []
        for at in range(0, len(tokens) - self.page + 1, self.page):
            parent = sha256(parent + np.array(tokens[at : at + self.page], dtype="<i4").tobytes()).digest()
            found.append(parent)
        return found

    def hit(self, scope: Scope, tokens: list[int]) -> int:
        length = 0
        for digest in self.digests(scope, tokens):
            if digest not in self.known:
                break
            length += self.page
        return length


class PrefixMachine(RuleBasedStateMachine):
    page, blocks = 1, 60

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.number, self.generation = Ledger(), 0, 1
        self.chains = Chains(self.page)
        self.cached: dict[Prefix, Scope] = {}
        self.held: dict[RequestHandle, Prefix] = {}
        self.apply(Genesis(b"w", (GroupSpec("full", self.page, self.blocks),), SLOTS, LONGEST, "pool"))

    @property
    def scope(self) -> Scope:
        return Scope("a", self.generation, b"w")

    def apply(self, command: Any, refusal: type[LedgerRefusal] | None = None) -> Any:
        before = self.ledger.log_index, self.ledger.committed_digest, self.ledger.machine_digest
        if refusal is not None:
            with pytest.raises(refusal):
                self.ledger.apply(command)
            assert before == (self.ledger.log_index, self.ledger.committed_digest, self.ledger.machine_digest)
            return None
        receipt = self.ledger.apply(command)
        assert (receipt.log_index, receipt.committed_before) == before[:2]
        assert self.ledger.log_index == before[0] + 1
        assert (receipt.committed_after, receipt.machine_after) == (
            self.ledger.committed_digest,
            self.ledger.machine_digest,
        )
        return receipt

    def by_dictionary(self, tokens: list[int]) -> int:
        length = 0
        while length + self.page <= len(tokens) and tuple(tokens[: length + self.page]) in self.cached:
            length += self.page
        return length

    def common(self, tokens: list[int]) -> int:
        """The longest common prefix with anything cached, in tokens."""
        best = 0
        for known in self.cached:
            same = [left == right for left, right in zip(known, tokens, strict=False)]
            best = max(best, same.index(False) if False in same else len(same))
        return best

    def enter(self, tokens: list[int]) -> None:
        for length in range(self.page, len(tokens) + 1, self.page):
            self.cached[tuple(tokens[:length])] = self.scope
        self.chains.known |= set(self.chains.digests(self.scope, tokens))

    def forget(self, edge: Prefix, pages: int) -> None:
        digests = self.chains.digests(self.scope, list(edge))
        for at in range(pages):
            del self.cached[edge[: len(edge) - at * self.page]]
            self.chains.known.remove(digests[-1 - at])

    def edges(self) -> dict[int, Prefix]:
        """Every node with all tokens from the root to its end."""
        tree = self.ledger.state.tree
        scope_id = self.ledger.state.scopes.find(self.scope)
        return {
            node: tuple(np.concatenate([tree.tokens[at] for at in tree.path(node)]).tolist())
            for node in tree.subtree(scope_id)
        }

    # -- rules -----------------------------------------------------------------------------------------------------

    @rule(tokens=PROMPTS)
    def look(self, tokens: list[int]) -> None:
        before = self.ledger.machine_digest
        match = self.ledger.probe(self.scope, np.array(tokens, dtype="<i4").tobytes()).match
        self.check_match(match, tokens)
        assert self.ledger.machine_digest == before, "a lookup changes nothing"

    def check_match(self, match: Any, tokens: list[int]) -> None:
        hit = self.by_dictionary(tokens)
        assert hit == self.chains.hit(self.scope, tokens) == match.indexed == match.junction
        assert match.semantic == self.common(tokens)
        assert match.runtime == min(hit, (len(tokens) - 1) // self.page * self.page)
        event(f"hit of {match.runtime // self.page} pages")

    @rule(tokens=PROMPTS, stays=st.booleans())
    def serve(self, tokens: list[int], stays: bool) -> None:
        if len(self.held) == SLOTS:
            return
        self.number += 1
        command = Admit(self.number, self.scope, np.array(tokens, dtype="<i4").tobytes())
        used = self.ledger.gauge()
        need = -(-len(tokens) // self.page) - min(self.by_dictionary(tokens), len(tokens) - 1) // self.page
        if need > used.free:
            self.apply(command, OutOfMemory)
            return
        receipt = self.apply(command)
        self.check_match(receipt.match, tokens)
        handle, start = receipt.request, receipt.match.runtime
        assert len(receipt.new_blocks) == need and len(receipt.shared_blocks) * self.page == start
        self.apply(Dispatch(self.number, (RowSpan(handle, start, len(tokens) - start),)))
        self.apply(Complete(self.number))
        (entry,) = self.apply(Publish((handle,))).entries
        full = len(tokens) // self.page * self.page
        assert entry.tokens_before == max(self.by_dictionary(tokens), start) and entry.tokens_after == full
        self.held[handle] = tuple(tokens[: self.leased_before(handle)])
        self.enter(tokens)
        if not stays:
            self.apply(Release(handle, "finish"))
            del self.held[handle]

    def leased_before(self, handle: RequestHandle) -> int:
        terminal = int(self.ledger.state.requests.terminal.array[handle.slot])
        return self.ledger.state.tree.end_page(terminal) * self.page

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.held)))
        self.apply(Release(handle, "cancel"))
        del self.held[handle]
        self.apply(Release(handle, "cancel"), LedgerRefusal)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Any edge is named: only an unlocked leaf goes, whole."""
        tree, edges = self.ledger.state.tree, self.edges()
        if not edges:
            return
        node = data.draw(st.sampled_from(sorted(edges)))
        handle = NodeHandle(node, int(tree.generation.array[node]))
        pages = int(tree.pages.array[node])
        if any(other != edges[node] and other[: len(edges[node])] == edges[node] for other in edges.values()):
            self.apply(Evict((handle,)), InternalNodeEvicted)
        elif self.locks(edges[node]):
            self.apply(Evict((handle,)), LockedLeafEvicted)
        else:
            assert self.apply(Evict((handle,))).freed_blocks == pages
            self.forget(edges[node], pages)
            self.apply(Evict((handle,)), StaleTreeVersion)
            event("evicted")

    @rule()
    def reset(self) -> None:
        if self.held and any(self.held.values()):
            self.apply(Reset(self.scope), ResetWithLiveReferences)
            return
        self.apply(Reset(self.scope))
        self.cached.clear()
        self.chains.known.clear()

    @precondition(lambda self: self.generation < 3)
    @rule()
    def advance(self) -> None:
        self.generation += 1
        self.apply(AdvanceGeneration("a", self.generation))
        for handle in list(self.held):
            self.apply(Release(handle, "revoke"))
        self.held.clear()
        self.cached.clear()
        self.chains.known.clear()

    # -- what must hold --------------------------------------------------------------------------------------------

    def locks(self, prefix: Prefix) -> int:
        return sum(leased[: len(prefix)] == prefix for leased in self.held.values())

    @invariant()
    def the_tree_is_what_is_cached(self) -> None:
        audit(self.ledger)
        tree, edges = self.ledger.state.tree, self.edges()
        held: set[Prefix] = set()
        firsts: set[tuple[int, Prefix]] = set()
        for node, prefix in edges.items():
            pages, parent = int(tree.pages.array[node]), int(tree.parent.array[node])
            assert (
                pages > 0
                and len(tree.tokens[node]) == pages * self.page == len(tree.blocks[node]) * self.page
            )
            held |= {prefix[: len(prefix) - at * self.page] for at in range(pages)}
            firsts.add((parent, tuple(tree.tokens[node][: self.page].tolist())))
            assert tree.lock(node) == self.locks(prefix)
        assert held == set(self.cached) and len(firsts) == len(edges)
        assert len(self.chains.known) == len(self.cached)
        leaves = {node for node in edges if not any(int(tree.parent.array[n]) == node for n in edges)}
        ready = {leaf.handle.node for leaf in self.ledger.evictable_leaves()}
        assert ready == {node for node in leaves if not self.locks(edges[node])}
        protected = sum(len(tree.blocks[node]) for node in edges if self.locks(edges[node]))
        assert self.ledger.gauge().evictable == len(self.cached) - protected


class WidePages(PrefixMachine):
    page, blocks = 3, 24


EXAMPLES = int(os.environ.get("COPYHOLD_LEDGER_EXAMPLES", "40"))
TestPagesOfOneToken = PrefixMachine.TestCase
TestPagesOfThreeTokens = WidePages.TestCase
SETTINGS = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestPagesOfOneToken.settings = SETTINGS
TestPagesOfThreeTokens.settings = SETTINGS
