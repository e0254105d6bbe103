"""The ledger next to a naive model of dictionaries: same hits, same refusals, same counts, right bytes.

One machine over one cache group, one over two whose block sizes differ: a page of the index is then two blocks of the one
and one of the other, and every command acts on both or on neither. A third one publishes and hits partial tails.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from math import lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    BlockHandle,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    GroupSpec,
    Publish,
    PublishTail,
    Release,
    RequestHandle,
    Reset,
    RowSpan,
    Scope,
    Truncate,
)
from copyhold.kvcore.errors import (
    DoubleRelease,
    EvictLiveBlock,
    ForkOfUnpublishedState,
    LedgerRefusal,
    MalformedCommand,
    OutOfMemory,
    RequestInFlight,
    ResetWithLiveReferences,
    SlotsExhausted,
    StaleNamespaceGeneration,
    TailsNeedOneFullGroup,
)
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.reads import TailView
from copyhold.kvcore.tail_table import TAILS_PER_NODE

ONE_GROUP = (GroupSpec("full", 2, 12),)
TWO_GROUPS = (GroupSpec("fine", 2, 13), GroupSpec("coarse", 4, 6))
SLOTS, LONGEST = 4, 16
Block = tuple[int, int]
"""A cache group and a block of it."""
Prefix = tuple[Scope, tuple[int, ...]]
Tail = tuple[Prefix, tuple[int, ...], int]
"""The whole pages before it, its tokens and its policy."""

# Prompts share long stems, so that most admissions meet something indexed, and part of it in mid-edge.
STEMS = ([0] * LONGEST, [0] * 6 + [1] * 10, [0, 0, 0, 1] * 4, [1] * LONGEST)
NAMESPACES = st.sampled_from(["a", "a", "a", "b"])
PROMPTS = st.builds(
    lambda stem, length, tail: (stem[:length] + tail)[:LONGEST],
    st.sampled_from(STEMS),
    st.integers(1, LONGEST),
    st.lists(st.integers(0, 1), max_size=2),
)


class Model:
    """Who holds which blocks, what is indexed, what every row of the device holds."""

    def __init__(self, groups: tuple[GroupSpec, ...]) -> None:
        self.sizes = [group.block_size for group in groups]
        self.page = lcm(*self.sizes)
        self.floor = {"a": 1, "b": 1}
        self.index: dict[Prefix, set[Block]] = {}
        self.tails: dict[Tail, Block] = {}
        self.running: dict[RequestHandle, dict[str, Any]] = {}
        self.device: dict[tuple[Block, int], Prefix] = {}
        self.copied: dict[int, list[Block]] = {}

    def prefix(self, scope: Scope, tokens: list[int], pages: int) -> Prefix:
        return scope, tuple(tokens[: pages * self.page])

    def indexed_pages(self, scope: Scope, tokens: list[int]) -> int:
        pages = 0
        while pages < len(tokens) // self.page and self.prefix(scope, tokens, pages + 1) in self.index:
            pages += 1
        return pages

    def semantic(self, scope: Scope, tokens: list[int]) -> int:
        best = 0
        for owner, known in self.index:
            common = 0
            while (
                owner == scope and common < min(len(known), len(tokens)) and known[common] == tokens[common]
            ):
                common += 1
            best = max(best, common)
        return best

    def leased(self) -> set[Prefix]:
        return {
            self.prefix(request["scope"], request["tokens"], page + 1)
            for request in self.running.values()
            for page in range(request["leased"])
        }

    def indexed(self) -> set[Block]:
        return {block for blocks in self.index.values() for block in blocks} | set(self.tails.values())

    def longest_tail(self, scope: Scope, tokens: list[int], pages: int, policy: int) -> Tail | None:
        first = pages * self.page
        prefix = self.prefix(scope, tokens, pages)
        found = [
            tail
            for tail in self.tails
            if (tail[0], tail[2]) == (prefix, policy)
            and tail[1] == tuple(tokens[first : first + len(tail[1])])
        ]
        return max(found, key=lambda tail: len(tail[1]), default=None)

    def held(self) -> set[Block]:
        """What tables name."""
        return {block for request in self.running.values() for block in self.table(request)}

    def used(self) -> set[Block]:
        return self.held() | self.indexed() | self.read_by_copies()

    def read_by_copies(self) -> set[Block]:
        return {block for blocks in self.copied.values() for block in blocks}

    def table(self, request: dict[str, Any]) -> Iterator[Block]:
        for group, blocks in enumerate(request["blocks"]):
            yield from ((group, block) for block in blocks)

    def holders(self, block: Block) -> int:
        return sum(block in self.table(request) for request in self.running.values())

    def shared_tail(self, request: dict[str, Any], group: int) -> Block | None:
        """The block of one group under the next row, where it is partly filled and somebody else's too."""
        size, blocks = self.sizes[group], request["blocks"][group]
        page = request["valid"] // size
        if request["valid"] % size == 0 or page >= len(blocks):
            return None
        block = (group, blocks[page])
        return block if self.holders(block) > 1 or block in self.indexed() else None

    def page_blocks(self, request: dict[str, Any], page: int) -> set[Block]:
        """The bundle of one page of the index."""
        each = [self.page // size for size in self.sizes]
        return {
            (group, block)
            for group, count in enumerate(each)
            for block in request["blocks"][group][page * count : (page + 1) * count]
        }

    def rows(
        self, request: dict[str, Any], first: int, end: int
    ) -> Iterator[tuple[tuple[Block, int], Prefix]]:
        """Places of rows [first, end) in every group, and what is to lie there."""
        for position in range(first, end):
            content = (request["scope"], tuple(request["tokens"][: position + 1]))
            for group, size in enumerate(self.sizes):
                block = request["blocks"][group][position // size]
                yield ((group, block), position % size), content


class LedgerMachine(RuleBasedStateMachine):
    """Each rule applies one command to both; the invariant compares everything and audits."""

    groups = ONE_GROUP

    def __init__(self) -> None:
        super().__init__()
        self.policy = 0
        self.ledger, self.model = Ledger(), Model(self.groups)
        self.transaction = self.step = 0
        self.flights: dict[int, list[RowSpan]] = {}
        self.ended: list[RequestHandle] = []
        self.issued: set[BlockHandle] = set()
        self.ledger.apply(Genesis(b"w", self.groups, SLOTS, LONGEST, "pool"))

    def apply(self, command: Any, refusal: type[LedgerRefusal] | None = None) -> Any:
        before = (self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index)
        if refusal is not None:
            with pytest.raises(refusal):
                self.ledger.apply(command)
            assert before == (self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index)
            return None
        receipt = self.ledger.apply(command)
        scrub = (getattr(receipt, "scrub", ()), *getattr(receipt, "scrub_others", ()))
        for group, blocks in enumerate(scrub):
            for key in [(block, row) for block in blocks for row in range(self.model.sizes[group])]:
                self.model.device.pop(((group, key[0]), key[1]), None)
        for handle in getattr(receipt, "new_blocks", ()):
            assert self.ledger.block(handle) == handle.block
        return receipt

    def take(self, request: dict[str, Any], handles: Iterable[BlockHandle]) -> None:
        """New blocks belong to nobody else, were never issued under this handle, hold no foreign byte."""
        for handle in handles:
            block = (handle.group, handle.block)
            assert handle not in self.issued
            self.issued.add(handle)
            assert block not in self.model.used()
            owners = {self.model.device[key][0] for key in self.model.device if key[0] == block}
            assert owners <= {request["scope"]}
            request["blocks"][handle.group].append(handle.block)

    def evictions(self, data: st.DataObject) -> list[Any]:
        leaves: list[Any] = list(self.ledger.evictable_leaves())
        leaves += [tail for tail in self.ledger.tails() if not tail.references]
        return (
            data.draw(st.lists(st.sampled_from(leaves), unique_by=lambda leaf: leaf.handle)) if leaves else []
        )

    def named(self, leaves: list[Any]) -> set[Block]:
        """Every block of some leaves; a leaf names those of the first group, its pages have the others."""
        tails = {(0, leaf.block) for leaf in leaves if isinstance(leaf, TailView)}
        edges = [leaf for leaf in leaves if not isinstance(leaf, TailView)]
        first = {(0, int(block)) for leaf in edges for block in leaf.blocks}
        gone = {key: blocks for key, blocks in self.model.index.items() if blocks & first}
        hung = {block for tail, block in self.model.tails.items() if tail[0] in gone}
        return {block for blocks in gone.values() for block in blocks} | hung | tails

    def forget(self, blocks: set[Block]) -> dict[Prefix, set[Block]]:
        """Takes blocks out of the index; what it named."""
        index = self.model.index
        gone = {key: bundle for key, bundle in index.items() if bundle & blocks}
        self.model.index = {key: bundle for key, bundle in index.items() if key not in gone}
        self.model.tails = {tail: block for tail, block in self.model.tails.items() if block not in blocks}
        return gone

    def free(self, group: int) -> int:
        return self.groups[group].num_blocks - sum(owner == group for owner, _ in self.model.used())

    def lacks_room(self, need: list[int], gone: set[Block]) -> bool:
        """Whether one group lacks blocks, even after the evictions."""
        return any(
            count > self.free(group) + sum(owner == group for owner, _ in gone)
            for group, count in enumerate(need)
        )

    @initialize(first=PROMPTS, second=PROMPTS, running=st.booleans())
    def warm(self, first: list[int], second: list[int], running: bool) -> None:
        """Machines start with something indexed, and often with somebody leasing part of it."""
        self.do_serve("a", first, True, True)
        self.do_serve("a", second, True, not running)

    @rule(data=st.data(), namespace=NAMESPACES, tokens=PROMPTS, lookup=st.sampled_from([True, True, False]))
    def admit(self, data: st.DataObject, namespace: str, tokens: list[int], lookup: bool) -> None:
        self.do_admit(namespace, tokens, lookup, self.evictions(data) if data.draw(st.booleans()) else [])

    @rule(
        namespace=NAMESPACES, tokens=PROMPTS, lookup=st.sampled_from([True, True, False]), ends=st.booleans()
    )
    def serve(self, namespace: str, tokens: list[int], lookup: bool, ends: bool) -> None:
        """A whole request at once: what the others share."""
        self.do_serve(namespace, tokens, lookup, ends)

    def do_serve(self, namespace: str, tokens: list[int], lookup: bool, ends: bool) -> None:
        handle = self.do_admit(namespace, tokens, lookup, [])
        if handle is None:
            return
        request = self.model.running[handle]
        self.do_dispatch([RowSpan(handle, request["valid"], len(tokens) - request["valid"])], [])
        if request["step"] is None:
            return  # The copy of a tail that was hit found no block.
        self.do_complete(self.step, ["keep"], [0])
        self.do_publish([handle])
        if ends:
            self.apply(Release(handle, "finish"))
            self.end(handle)

    def do_admit(
        self, namespace: str, tokens: list[int], lookup: bool, leaves: list[Any]
    ) -> RequestHandle | None:
        model = self.model
        scope = Scope(namespace, model.floor[namespace], b"w")
        pages = min(model.indexed_pages(scope, tokens), (len(tokens) - 1) // model.page) if lookup else 0
        path = [model.index[model.prefix(scope, tokens, page + 1)] for page in range(pages)]
        need = [-(-len(tokens) // size) - pages * model.page // size for size in model.sizes]
        semantic = model.semantic(scope, tokens) if lookup else 0
        valid, behind = pages * model.page, []
        tail = model.longest_tail(scope, tokens, pages, self.policy) if self.policy and pages else None
        if tail is not None and min(valid + len(tail[1]), len(tokens) - 1) > valid:
            semantic = max(semantic, valid + len(tail[1]))
            valid = min(valid + len(tail[1]), len(tokens) - 1)
            behind, need = [model.tails[tail]], [need[0] - 1]
        self.transaction += 1
        content = np.array(tokens, dtype="<i4").tobytes()
        own = [leaf for leaf in leaves if self.named([leaf]) & set().union(*path, behind)]
        if own:
            named = tuple(leaf.handle for leaf in own)
            self.apply(
                Admit(self.transaction, scope, content, lookup, named, (), self.policy), EvictLiveBlock
            )
        evict = [leaf for leaf in leaves if leaf not in own]
        gone = self.named(evict)
        named = tuple(leaf.handle for leaf in evict)
        command = Admit(self.transaction, scope, content, lookup, named, (), self.policy)
        if self.lacks_room(need, gone):
            self.apply(command, OutOfMemory)
            return None
        if len(model.running) == SLOTS:
            self.apply(command, SlotsExhausted)
            return None
        receipt = self.apply(command)
        self.forget(gone)
        event(f"hit of {pages} pages")
        assert (receipt.match.runtime, receipt.match.semantic) == (valid, semantic)
        assert receipt.match.tail == valid - pages * model.page and valid < len(tokens)
        if behind:
            event(f"hit of a tail of {receipt.match.tail} rows")
        shared: list[list[int]] = [[] for _ in model.sizes]
        for handle in receipt.shared_blocks:
            shared[handle.group].append(handle.block)
        request: dict[str, Any] = {"scope": scope, "tokens": list(tokens), "leased": pages}
        request |= {"valid": valid}
        request |= {"blocks": shared, "step": None, "ending": None, "transaction": self.transaction}
        request["cut"] = None
        assert [model.page_blocks(request, page) for page in range(pages)] == path
        assert [(0, block) for block in shared[0][pages * model.page // model.sizes[0] :]] == behind
        self.take(request, receipt.new_blocks)
        model.running[receipt.request] = request
        return receipt.request

    def idle(self) -> list[RequestHandle]:
        waiting = self.model.running.items()
        return [
            handle
            for handle, request in waiting
            if request["step"] is None and request["valid"] < min(len(request["tokens"]), LONGEST)
        ]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        rows = []
        for handle in data.draw(st.lists(st.sampled_from(self.idle()), unique=True, min_size=1)):
            request = self.model.running[handle]
            limit = min(len(request["tokens"]), LONGEST) - request["valid"]
            count = data.draw(st.one_of(st.just(limit), st.integers(1, limit)))
            rows.append(RowSpan(handle, request["valid"], count))
        self.do_dispatch(rows, self.evictions(data) if data.draw(st.booleans()) else [])

    def growth(self, row: RowSpan, group: int) -> int:
        held = len(self.model.running[row.request]["blocks"][group])
        return max(0, -(-(row.start + row.count) // self.model.sizes[group]) - held)

    def do_dispatch(self, rows: list[RowSpan], evict: list[Any]) -> None:
        before = self.model.index, self.model.tails
        self.forget(self.named(evict))
        groups = range(len(self.groups))
        copies = [self.expected_copies(rows, group) for group in groups]
        need = [sum(self.growth(row, group) for row in rows) + len(copies[group]) for group in groups]
        self.step += 1
        command = Dispatch(self.step, tuple(rows), tuple(leaf.handle for leaf in evict))
        if self.lacks_room(need, set()):
            self.apply(command, OutOfMemory)
            self.model.index, self.model.tails = before
            return
        receipt = self.apply(command)
        assert len(receipt.new_blocks) == sum(need) and len(receipt.copies) == sum(map(len, copies))
        event(f"{len(receipt.copies)} copies")
        told = iter(receipt.copies)
        self.model.copied[self.step] = [source for part in copies for source in part.values()]
        for group in groups:
            fresh = [handle for handle in receipt.new_blocks if handle.group == group]
            for row in rows:
                request, grown = self.model.running[row.request], self.growth(row, group)
                if row.request in copies[group]:
                    self.copy(request, fresh.pop(0), copies[group][row.request], next(told))
                self.take(request, fresh[:grown])
                fresh = fresh[grown:]
        for row in rows:
            request = self.model.running[row.request]
            request["step"], request["transaction"] = self.step, None
        self.flights[self.step] = rows

    def expected_copies(self, rows: list[RowSpan], group: int) -> dict[RequestHandle, Block]:
        """The block of one group that each request is given a copy of; the last holder keeps it."""
        copies: dict[RequestHandle, Block] = {}
        tables = {handle: request["blocks"] for handle, request in self.model.running.items()}
        for row in rows:
            request = self.model.running[row.request]
            source = self.model.shared_tail(request, group)
            if source is not None:
                copies[row.request] = source
                request["blocks"] = [
                    [-1 if (owner, block) == source else block for block in blocks]
                    for owner, blocks in enumerate(request["blocks"])
                ]
        for handle, request in self.model.running.items():
            request["blocks"] = tables[handle]
        return copies

    def copy(self, request: dict[str, Any], target: BlockHandle, source: Block, told: Any) -> None:
        """The device carries a copy out."""
        group, block = source
        rows = request["valid"] % self.model.sizes[group]
        assert (told.group, told.source, told.target, told.rows) == (group, block, target.block, rows)
        blocks = request["blocks"][group]
        page = blocks.index(block)
        self.take({**request, "blocks": [[] for _ in self.groups]}, [target])
        request["blocks"][group] = [*blocks[:page], target.block, *blocks[page + 1 :]]
        for row in range(rows):
            self.model.device[((group, target.block), row)] = self.model.device[(source, row)]

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.flights)))
        rows = len(self.flights[step])
        outcome = st.sampled_from(["keep", "sample", "sample", "discard"])
        outcomes = data.draw(st.lists(outcome, min_size=rows, max_size=rows))
        self.do_complete(step, outcomes, data.draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows)))

    def do_complete(self, step: int, outcomes: list[str], tokens: list[int]) -> None:
        rows = self.flights.pop(step)
        sampled = []
        discarded = tuple(index for index, outcome in enumerate(outcomes) if outcome == "discard")
        for index, row in enumerate(rows):
            request = self.model.running[row.request]
            self.model.device.update(self.model.rows(request, row.start, row.start + row.count))
            if outcomes[index] == "sample" and row.start + row.count == len(request["tokens"]):
                sampled.append((index, tokens[index]))
        del self.model.copied[step]
        receipt = self.apply(Complete(step, tuple(sampled), discarded))
        chosen = dict(sampled)
        for index, row in enumerate(rows):
            request = self.model.running[row.request]
            end = row.start if index in discarded else row.start + row.count
            assert receipt.sealed[index] == end // self.model.page - row.start // self.model.page
            request["valid"], request["step"] = end, None
            request["tokens"] += [chosen[index]] if index in chosen else []
            if request["cut"] is not None:
                self.cut(row.request, request["cut"])
            if request["ending"] is not None:
                self.end(row.request)
        assert {facts.request for facts in receipt.released} <= set(self.ended)

    def end(self, handle: RequestHandle) -> None:
        del self.model.running[handle]
        self.ended.append(handle)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        model = self.model
        current = [
            handle
            for handle, request in model.running.items()
            if request["scope"].generation >= model.floor[request["scope"].namespace]
        ]
        if not current:
            return
        self.do_publish(data.draw(st.lists(st.sampled_from(current), min_size=1, max_size=3)))

    def do_publish(self, handles: list[RequestHandle]) -> None:
        model = self.model
        receipt = self.apply(Publish(tuple(handles)))
        for handle, entry in zip(handles, receipt.entries, strict=True):
            request = model.running[handle]
            full = request["valid"] // model.page
            known = model.indexed_pages(request["scope"], request["tokens"][: full * model.page])
            assert (entry.tokens_before, entry.tokens_after) == (known * model.page, full * model.page)
            for page in range(known, full):
                key = model.prefix(request["scope"], request["tokens"], page + 1)
                model.index[key] = model.page_blocks(request, page)
            request["leased"] = max(request["leased"], full if full > known else 0)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), reason=st.sampled_from(["finish", "cancel", "preempt", "revoke", "error"]))
    def release(self, data: st.DataObject, reason: str) -> None:
        handle = data.draw(st.sampled_from(list(self.model.running)))
        request = self.model.running[handle]
        if request["ending"] is not None:
            self.apply(Release(handle, reason), DoubleRelease)
            return
        receipt = self.apply(Release(handle, reason))
        assert receipt.deferred == (request["step"] is not None)
        if receipt.deferred:
            request["ending"] = reason
        else:
            self.end(handle)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), children=st.integers(1, 2))
    def fork(self, data: st.DataObject, children: int) -> None:
        model = self.model
        handle = data.draw(st.sampled_from(list(model.running)))
        request = model.running[handle]
        if request["scope"].generation < model.floor[request["scope"].namespace]:
            self.apply(Fork(handle, children), StaleNamespaceGeneration)
        elif request["step"] is not None:
            self.apply(Fork(handle, children), ForkOfUnpublishedState)
        elif len(model.running) + children > SLOTS:
            self.apply(Fork(handle, children), SlotsExhausted)
        else:
            for child in self.apply(Fork(handle, children)).children:
                model.running[child] = {**request, "blocks": self.kept(request), "transaction": None}
                model.running[child]["tokens"] = list(request["tokens"])

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.model.running)))
        request = self.model.running[handle]
        count = data.draw(st.integers(1, len(request["tokens"])))
        if request["ending"] is not None:
            self.apply(Truncate(handle, count), DoubleRelease)
            return
        receipt = self.apply(Truncate(handle, count))
        assert receipt.deferred == (request["step"] is not None)
        if receipt.deferred:
            request["cut"] = min(count, request["cut"] or count)
        else:
            self.cut(handle, count)

    def kept(self, request: dict[str, Any]) -> list[list[int]]:
        """The tables as far as there are valid rows."""
        pairs = zip(request["blocks"], self.model.sizes, strict=True)
        return [blocks[: -(-request["valid"] // size)] for blocks, size in pairs]

    def cut(self, handle: RequestHandle, count: int) -> None:
        request = self.model.running[handle]
        request["tokens"] = request["tokens"][:count]
        request["valid"] = min(request["valid"], len(request["tokens"]) - 1)
        request["blocks"] = self.kept(request)
        request["cut"] = None
        # A lease ends where an edge ends; where edges end is the tree's affair.
        state = self.ledger.state
        request["leased"] = state.tree.end_page(int(state.requests.terminal.array[handle.slot]))
        assert request["leased"] * self.model.page <= request["valid"]

    @rule(namespace=st.sampled_from(["a", "b"]))
    def reset(self, namespace: str) -> None:
        model = self.model
        scope = Scope(namespace, model.floor[namespace], b"w")
        mine = {key for key in model.index if key[0] == scope}
        blocks = {block for key in mine for block in model.index[key]}
        blocks |= {block for tail, block in model.tails.items() if tail[0] in mine}
        if blocks & (model.held() | model.read_by_copies()) or mine & model.leased():
            self.apply(Reset(scope), ResetWithLiveReferences)
            return
        assert self.apply(Reset(scope)).freed_blocks == len(blocks)
        self.forget(blocks)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        self.apply(Release(data.draw(st.sampled_from(self.ended)), "finish"), LedgerRefusal)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        leaves = self.evictions(data)
        gone = self.named(leaves)
        receipt = self.apply(Evict(tuple(leaf.handle for leaf in leaves)))
        assert receipt.freed_blocks == len(gone)
        self.forget(gone)

    @precondition(lambda self: any(r["transaction"] for r in self.model.running.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ = [handle for handle, request in self.model.running.items() if request["transaction"]]
        handle = data.draw(st.sampled_from(open_))
        self.apply(Abort(self.model.running[handle]["transaction"]))
        self.end(handle)

    @rule(data=st.data())
    def admit_and_abort(self, data: st.DataObject) -> None:
        """An aborted transaction leaves what others can observe as it was."""
        before, running = self.ledger.committed_digest, set(self.model.running)
        self.transaction += 1
        tokens = np.array(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)), dtype="<i4")
        scope = Scope("a", self.model.floor["a"], b"w")
        try:
            receipt = self.apply(Admit(self.transaction, scope, tokens.tobytes(), True, ()))
        except LedgerRefusal:
            return
        self.apply(Abort(self.transaction))
        self.ended.append(receipt.request)
        assert self.ledger.committed_digest == before and set(self.model.running) == running

    @rule(namespace=st.sampled_from(["a", "b"]), chance=st.integers(0, 3))
    def advance(self, namespace: str, chance: int) -> None:
        if chance:
            return
        model = self.model
        model.floor[namespace] += 1
        receipt = self.apply(AdvanceGeneration(namespace, model.floor[namespace]))
        model.index = {key: bundle for key, bundle in model.index.items() if key[0].namespace != namespace}
        model.tails = {tail: block for tail, block in model.tails.items() if tail[0] in model.index}
        for request in model.running.values():
            if request["scope"].namespace == namespace:
                request["leased"] = 0
        assert receipt.generation == model.floor[namespace]

    @invariant()
    def agrees(self) -> None:
        model, ledger = self.model, self.ledger
        audit(ledger)
        held, leased = model.held() | model.read_by_copies(), model.leased()
        kept = {key for key in model.index if key in leased}
        idle = {block for key in set(model.index) - kept for block in model.index[key]}
        idle = (idle | set(model.tails.values())) - held
        for group in range(len(self.groups)):
            gauge = ledger.gauge(group)
            assert gauge.free == self.free(group)
            assert gauge.evictable == sum(owner == group for owner, _ in idle)
        assert set(ledger.running()) == set(model.running)
        for handle, request in model.running.items():
            view = ledger.request(handle)
            assert (view.valid_rows, view.in_flight) == (request["valid"], request["step"] is not None)
            assert ledger.request_tokens(handle).tolist() == request["tokens"]
            for group, blocks in enumerate(request["blocks"]):
                assert ledger.table(handle, group).tolist() == blocks
            for place, content in model.rows(request, 0, request["valid"]):
                assert model.device[place] == content
        assert {(0, tail.block) for tail in ledger.tails()} == set(model.tails.values())
        for ((scope, pages), rows, _), block in model.tails.items():
            for row in range(len(rows)):
                assert model.device[(block, row)] == (scope, pages + rows[: row + 1])
        for (block, _), (scope, _) in model.device.items():
            assert scope.generation >= model.floor[scope.namespace] or block in held

    def teardown(self) -> None:
        """Whatever happened, everything can be given back."""
        for step, rows in sorted(self.flights.items()):
            self.apply(Complete(step, (), tuple(range(len(rows)))))
        for handle in self.ledger.running():
            self.apply(Release(handle, "cancel"))
        while self.ledger.evictable_leaves():
            self.apply(Evict(tuple(leaf.handle for leaf in self.ledger.evictable_leaves())))
        audit(self.ledger)
        for group, spec in enumerate(self.groups):
            assert self.ledger.gauge(group).free == spec.num_blocks


class TwoGroupMachine(LedgerMachine):
    """The same rules over two cache groups."""

    groups = TWO_GROUPS

    @precondition(lambda self: self.model.running)
    @rule()
    def publish_tail(self) -> None:
        self.apply(PublishTail(next(iter(self.model.running)), 1), TailsNeedOneFullGroup)


class TailMachine(LedgerMachine):
    """The same rules, with tails published and asked for; blocks of four, so that a tail has one to three rows."""

    groups = (GroupSpec("full", 4, 8),)

    @rule(policy=st.sampled_from([0, 1, 1, 1, 2, 3]))
    def ask_for(self, policy: int) -> None:
        """Later admissions ask for tails of this policy; 0 is full blocks only."""
        self.policy = policy

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), policy=st.sampled_from([1, 1, 2, 3]), ends=st.booleans())
    def publish_tail(self, data: st.DataObject, policy: int, ends: bool) -> None:
        model = self.model
        handle = data.draw(st.sampled_from(list(model.running)))
        request = model.running[handle]
        if request["scope"].generation < model.floor[request["scope"].namespace]:
            self.apply(PublishTail(handle, policy), StaleNamespaceGeneration)
            return
        if request["step"] is not None:
            self.apply(PublishTail(handle, policy), RequestInFlight)
            return
        self.do_publish_tail(handle, policy)
        if ends:
            self.apply(Release(handle, "finish"))
            self.end(handle)

    def do_publish_tail(self, handle: RequestHandle, policy: int) -> None:
        model, request = self.model, self.model.running[handle]
        full, rows = divmod(request["valid"], model.page)
        receipt = self.apply(PublishTail(handle, policy))
        known = model.indexed_pages(request["scope"], request["tokens"][: full * model.page])
        assert (receipt.entry.tokens_before, receipt.entry.tokens_after) == (
            known * model.page,
            full * model.page,
        )
        for page in range(known, full):
            key = model.prefix(request["scope"], request["tokens"], page + 1)
            model.index[key] = model.page_blocks(request, page)
        event(f"tail {receipt.outcome}")
        if not full or not rows:
            request["leased"] = max(request["leased"], full if full > known else 0)
            assert receipt.outcome == ("no_rows" if full else "no_whole_page") and not receipt.tail
            return
        request["leased"] = full
        prefix = model.prefix(request["scope"], request["tokens"], full)
        tail = (prefix, tuple(request["tokens"][full * model.page : request["valid"]]), policy)
        block = (0, request["blocks"][0][full])
        if tail in model.tails:
            assert receipt.outcome == "present"
        elif block in model.indexed():
            assert receipt.outcome == "block_has_a_tail" and not receipt.tail
        elif sum(other[0] == prefix for other in model.tails) == TAILS_PER_NODE:
            assert receipt.outcome == "node_full" and not receipt.tail
        else:
            assert receipt.outcome == "entered" and len(receipt.tail) == 1
            model.tails[tail] = block

    @rule(namespace=NAMESPACES, tokens=PROMPTS, policy=st.sampled_from([1, 1, 2]))
    def serve_with_tail(self, namespace: str, tokens: list[int], policy: int) -> None:
        """A whole request whose tail is published at its end."""
        self.do_serve_with_tail(namespace, tokens, policy)

    def do_serve_with_tail(self, namespace: str, tokens: list[int], policy: int) -> None:
        self.policy = policy
        handle = self.do_admit(namespace, tokens, True, [])
        if handle is None:
            return
        request = self.model.running[handle]
        if request["step"] is None and request["valid"] < len(tokens):
            self.do_dispatch([RowSpan(handle, request["valid"], len(tokens) - request["valid"])], [])
        if request["step"] is not None:
            self.do_complete(self.step, ["keep"], [0])
        self.do_publish_tail(handle, policy)
        self.apply(Release(handle, "finish"))
        self.end(handle)

    @initialize(first=PROMPTS, second=PROMPTS, running=st.booleans())
    def warm(self, first: list[int], second: list[int], running: bool) -> None:
        """Machines start with a tail."""
        self.do_serve_with_tail("a", [*first[:LONGEST], *([1] * 5)][:7], 1)
        self.do_serve("a", second, True, not running)

    @precondition(lambda self: self.model.tails)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=4), ends=st.booleans())
    def go_on(self, data: st.DataObject, more: list[int], ends: bool) -> None:
        """A prompt that begins with all that a tail ends."""
        ((scope, pages), rows, policy) = data.draw(st.sampled_from(sorted(self.model.tails, key=repr)))
        self.policy, tokens = policy, [*pages, *rows, *more][:LONGEST]
        if ends:
            self.do_serve_with_tail(scope.namespace, tokens, policy)
        else:
            self.do_admit(scope.namespace, tokens, True, self.evictions(data))

    @rule()
    def tails_of_no_policy(self) -> None:
        for handle in list(self.model.running)[:1]:
            self.apply(PublishTail(handle, 0), MalformedCommand)


EXAMPLES = int(os.environ.get("COPYHOLD_LEDGER_EXAMPLES", "200"))
_LIVES = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)

TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = _LIVES
TestTwoGroupMachine = TwoGroupMachine.TestCase
TestTwoGroupMachine.settings = _LIVES
TestTailMachine = TailMachine.TestCase
TestTailMachine.settings = settings(_LIVES, max_examples=max(1, EXAMPLES // 4))
