"""The ledger next to a naive model of dictionaries: same hits, same refusals, same counts, right bytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
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
    OutOfMemory,
    ResetWithLiveReferences,
    SlotsExhausted,
    StaleNamespaceGeneration,
)
from copyhold.kvcore.ledger import Ledger

PAGE, BLOCKS, SLOTS, LONGEST = 2, 12, 4, 16
Prefix = tuple[Scope, tuple[int, ...]]

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

    def __init__(self) -> None:
        self.floor = {"a": 1, "b": 1}
        self.index: dict[Prefix, int] = {}
        self.running: dict[RequestHandle, dict[str, Any]] = {}
        self.device: dict[tuple[int, int], Prefix] = {}
        self.copied: dict[int, list[int]] = {}

    def prefix(self, scope: Scope, tokens: list[int], pages: int) -> Prefix:
        return scope, tuple(tokens[: pages * PAGE])

    def indexed_pages(self, scope: Scope, tokens: list[int]) -> int:
        pages = 0
        while pages < len(tokens) // PAGE and self.prefix(scope, tokens, pages + 1) in self.index:
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

    def used_blocks(self) -> set[int]:
        held = {block for request in self.running.values() for block in request["blocks"]}
        return held | set(self.index.values()) | self.read_by_copies()

    def read_by_copies(self) -> set[int]:
        return {block for blocks in self.copied.values() for block in blocks}

    def holders(self, block: int) -> int:
        return sum(block in request["blocks"] for request in self.running.values())

    def copies(self, handle: RequestHandle) -> bool:
        """Whether the block under the next row is somebody else's too."""
        request = self.running[handle]
        page = request["valid"] // PAGE
        if request["valid"] % PAGE == 0 or page >= len(request["blocks"]):
            return False
        block = request["blocks"][page]
        return self.holders(block) > 1 or block in self.index.values()


class LedgerMachine(RuleBasedStateMachine):
    """Each rule applies one command to both; the invariant compares everything and audits."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.model = Ledger(), Model()
        self.transaction = self.step = 0
        self.flights: dict[int, list[RowSpan]] = {}
        self.ended: list[RequestHandle] = []
        self.issued: set[BlockHandle] = set()
        self.ledger.apply(Genesis(b"w", (GroupSpec("full", PAGE, BLOCKS),), SLOTS, LONGEST, "pool"))

    def apply(self, command: Any, refusal: type[LedgerRefusal] | None = None) -> Any:
        before = (self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index)
        if refusal is not None:
            with pytest.raises(refusal):
                self.ledger.apply(command)
            assert before == (self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index)
            return None
        receipt = self.ledger.apply(command)
        for block in getattr(receipt, "scrub", ()):
            for row in range(PAGE):
                self.model.device.pop((block, row), None)
        for handle in getattr(receipt, "new_blocks", ()):
            assert self.ledger.block(handle) == handle.block
        return receipt

    def take(self, request: dict[str, Any], handles: Iterable[BlockHandle]) -> None:
        """New blocks belong to nobody else, were never issued under this handle, hold no foreign byte."""
        for handle in handles:
            block = handle.block
            assert handle not in self.issued
            self.issued.add(handle)
            assert block not in self.model.used_blocks()
            owners = {self.model.device[key][0] for key in self.model.device if key[0] == block}
            assert owners <= {request["scope"]}
            request["blocks"].append(block)

    def evictions(self, data: st.DataObject) -> list[Any]:
        leaves = list(self.ledger.evictable_leaves())
        return (
            data.draw(st.lists(st.sampled_from(leaves), unique_by=lambda leaf: leaf.handle)) if leaves else []
        )

    def forget(self, blocks: set[int]) -> dict[Prefix, int]:
        """Takes blocks out of the index; what it named."""
        gone = {key: block for key, block in self.model.index.items() if block in blocks}
        self.model.index = {key: block for key, block in self.model.index.items() if block not in blocks}
        return gone

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
        pages = min(model.indexed_pages(scope, tokens), (len(tokens) - 1) // PAGE) if lookup else 0
        path = {model.index[model.prefix(scope, tokens, page + 1)] for page in range(pages)}
        need = -(-len(tokens) // PAGE) - pages
        semantic = model.semantic(scope, tokens) if lookup else 0
        self.transaction += 1
        content = np.array(tokens, dtype="<i4").tobytes()
        own = [leaf for leaf in leaves if path & set(leaf.blocks.tolist())]
        if own:
            named = tuple(leaf.handle for leaf in own)
            self.apply(Admit(self.transaction, scope, content, lookup, named), EvictLiveBlock)
        evict = [leaf for leaf in leaves if leaf not in own]
        gone = {int(block) for leaf in evict for block in leaf.blocks}
        command = Admit(self.transaction, scope, content, lookup, tuple(leaf.handle for leaf in evict))
        if need > BLOCKS - len(model.used_blocks()) + len(gone):
            self.apply(command, OutOfMemory)
            return None
        if len(model.running) == SLOTS:
            self.apply(command, SlotsExhausted)
            return None
        receipt = self.apply(command)
        self.forget(gone)
        event(f"hit of {pages} pages")
        assert (receipt.match.runtime, receipt.match.semantic) == (pages * PAGE, semantic)
        shared = [handle.block for handle in receipt.shared_blocks]
        assert shared == [model.index[model.prefix(scope, tokens, page + 1)] for page in range(pages)]
        request = {"scope": scope, "tokens": list(tokens), "valid": pages * PAGE, "leased": pages}
        request |= {"blocks": shared, "step": None, "ending": None, "transaction": self.transaction}
        request["cut"] = None
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

    def growth(self, row: RowSpan) -> int:
        held = len(self.model.running[row.request]["blocks"])
        return max(0, -(-(row.start + row.count) // PAGE) - held)

    def do_dispatch(self, rows: list[RowSpan], evict: list[Any]) -> None:
        gone = {int(block) for leaf in evict for block in leaf.blocks}
        forgotten = self.forget(gone)
        copies = self.expected_copies(rows)
        need = sum(self.growth(row) for row in rows) + len(copies)
        self.step += 1
        command = Dispatch(self.step, tuple(rows), tuple(leaf.handle for leaf in evict))
        if need > BLOCKS - len(self.model.used_blocks()):
            self.apply(command, OutOfMemory)
            self.model.index |= forgotten
            return
        receipt = self.apply(command)
        fresh = list(receipt.new_blocks)
        assert len(fresh) == need and len(receipt.copies) == len(copies)
        event(f"{len(copies)} copies")
        told = iter(receipt.copies)
        self.model.copied[self.step] = [source for source, _ in copies.values()]
        for row in rows:
            request, grown = self.model.running[row.request], self.growth(row)
            if row.request in copies:
                self.copy(request, fresh.pop(0), *copies[row.request], next(told))
            self.take(request, fresh[:grown])
            fresh = fresh[grown:]
            request["step"], request["transaction"] = self.step, None
        self.flights[self.step] = rows

    def expected_copies(self, rows: list[RowSpan]) -> dict[RequestHandle, tuple[int, int]]:
        """(block, rows) that each request is given a copy of; the last holder keeps the block."""
        copies: dict[RequestHandle, tuple[int, int]] = {}
        tables = {handle: request["blocks"] for handle, request in self.model.running.items()}
        for row in rows:
            request = self.model.running[row.request]
            if self.model.copies(row.request):
                page = request["valid"] // PAGE
                copies[row.request] = (request["blocks"][page], request["valid"] % PAGE)
                request["blocks"] = [*request["blocks"][:page], -1, *request["blocks"][page + 1 :]]
        for handle, request in self.model.running.items():
            request["blocks"] = tables[handle]
        return copies

    def copy(self, request: dict[str, Any], target: BlockHandle, source: int, rows: int, told: Any) -> None:
        """The device carries a copy out."""
        assert (told.group, told.source, told.target, told.rows) == (0, source, target.block, rows)
        blocks = request["blocks"]
        page = blocks.index(source)
        self.take({**request, "blocks": []}, [target])
        request["blocks"] = [*blocks[:page], target.block, *blocks[page + 1 :]]
        for row in range(rows):
            self.model.device[(target.block, row)] = self.model.device[(source, row)]

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
            for position in range(row.start, row.start + row.count):
                key = (request["blocks"][position // PAGE], position % PAGE)
                self.model.device[key] = (request["scope"], tuple(request["tokens"][: position + 1]))
            if outcomes[index] == "sample" and row.start + row.count == len(request["tokens"]):
                sampled.append((index, tokens[index]))
        del self.model.copied[step]
        receipt = self.apply(Complete(step, tuple(sampled), discarded))
        chosen = dict(sampled)
        for index, row in enumerate(rows):
            request = self.model.running[row.request]
            end = row.start if index in discarded else row.start + row.count
            assert receipt.sealed[index] == end // PAGE - row.start // PAGE
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
            full = request["valid"] // PAGE
            known = model.indexed_pages(request["scope"], request["tokens"][: full * PAGE])
            assert (entry.tokens_before, entry.tokens_after) == (known * PAGE, full * PAGE)
            for page in range(known, full):
                key = model.prefix(request["scope"], request["tokens"], page + 1)
                model.index[key] = request["blocks"][page]
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
            blocks = request["blocks"][: -(-request["valid"] // PAGE)]
            for child in self.apply(Fork(handle, children)).children:
                model.running[child] = {**request, "blocks": list(blocks), "transaction": None}
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

    def cut(self, handle: RequestHandle, count: int) -> None:
        request = self.model.running[handle]
        request["tokens"] = request["tokens"][:count]
        request["valid"] = min(request["valid"], len(request["tokens"]) - 1)
        request["blocks"] = request["blocks"][: -(-request["valid"] // PAGE)]
        request["cut"] = None
        # A lease ends where an edge ends; where edges end is the tree's affair.
        state = self.ledger.state
        request["leased"] = state.tree.end_page(int(state.requests.terminal.array[handle.slot]))
        assert request["leased"] * PAGE <= request["valid"]

    @rule(namespace=st.sampled_from(["a", "b"]))
    def reset(self, namespace: str) -> None:
        model = self.model
        scope = Scope(namespace, model.floor[namespace], b"w")
        mine = {key: block for key, block in model.index.items() if key[0] == scope}
        held = {block for request in model.running.values() for block in request["blocks"]}
        held |= model.read_by_copies()
        if set(mine.values()) & held or set(mine) & model.leased():
            self.apply(Reset(scope), ResetWithLiveReferences)
            return
        assert self.apply(Reset(scope)).freed_blocks == len(mine)
        self.forget(set(mine.values()))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        self.apply(Release(data.draw(st.sampled_from(self.ended)), "finish"), LedgerRefusal)

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        leaves = self.evictions(data)
        gone = {int(block) for leaf in leaves for block in leaf.blocks}
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
        model.index = {key: block for key, block in model.index.items() if key[0].namespace != namespace}
        for request in model.running.values():
            if request["scope"].namespace == namespace:
                request["leased"] = 0
        assert receipt.generation == model.floor[namespace]

    @invariant()
    def agrees(self) -> None:
        model, ledger = self.model, self.ledger
        audit(ledger)
        gauge = ledger.gauge()
        held = {block for request in model.running.values() for block in request["blocks"]}
        leased = model.leased()
        idle = {block for key, block in model.index.items() if key not in leased and block not in held}
        idle -= model.read_by_copies()
        assert gauge.free == BLOCKS - len(model.used_blocks()) and gauge.evictable == len(idle)
        assert set(ledger.running()) == set(model.running)
        for handle, request in model.running.items():
            view = ledger.request(handle)
            assert (view.valid_rows, view.in_flight) == (request["valid"], request["step"] is not None)
            assert ledger.request_tokens(handle).tolist() == request["tokens"]
            assert ledger.tables[handle.slot, : view.num_blocks].tolist() == request["blocks"]
            for position in range(request["valid"]):
                row = model.device[(request["blocks"][position // PAGE], position % PAGE)]
                assert row == (request["scope"], tuple(request["tokens"][: position + 1]))
        for (block, _), (scope, _) in model.device.items():
            assert scope.generation >= model.floor[scope.namespace] or block in held | model.read_by_copies()

    def teardown(self) -> None:
        """Whatever happened, everything can be given back."""
        for step, rows in sorted(self.flights.items()):
            self.apply(Complete(step, (), tuple(range(len(rows)))))
        for handle in self.ledger.running():
            self.apply(Release(handle, "cancel"))
        while self.ledger.evictable_leaves():
            self.apply(Evict(tuple(leaf.handle for leaf in self.ledger.evictable_leaves())))
        audit(self.ledger)
        assert self.ledger.gauge().free == BLOCKS


TestLedgerMachine = LedgerMachine.TestCase
EXAMPLES = int(os.environ.get("COPYHOLD_LEDGER_EXAMPLES", "200"))
TestLedgerMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=50, deadline=None)
