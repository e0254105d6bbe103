"""Full attention beside a sliding window, next to a naive model: same hits, refusals and counts, right rows in reach."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from copyhold.kvcore.audit import audit
from copyhold.kvcore.checkpoint import restore, take_checkpoint
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
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
    EvictLiveBlock,
    LedgerRefusal,
    OutOfMemory,
    ResetWithLiveReferences,
    WindowStateMissing,
)
from copyhold.kvcore.ledger import Ledger

FULL, SLIDING = GroupSpec("full", 2, 26), GroupSpec("sliding", 4, 9, 5)
GROUPS, PAGE, SLOTS, LONGEST = (FULL, SLIDING), 4, 4, 28
STEMS = ([0] * LONGEST, [0] * 9 + [1] * 19, [0, 0, 0, 1] * 7)
PROMPTS = st.builds(
    lambda stem, length, tail: (stem[:length] + tail)[:LONGEST],
    st.sampled_from(STEMS),
    st.integers(1, LONGEST),
    st.lists(st.integers(0, 1), max_size=2),
)
Key = tuple[Scope, tuple[int, ...]]
Entry = tuple[Scope, tuple[int, ...], int]


def entry(scope: Scope, tokens: list[int], end: int) -> Entry:
    """What a block of the index stands for: the page that it lies in, with all before, and the row that it ends at."""
    return scope, tuple(tokens[: -(-end // PAGE) * PAGE]), end


class Held:
    """One request as the model knows it: blocks by page, a group each; what it leases in pages of the index."""

    def __init__(self, scope: Scope, tokens: list[int], valid: int, transaction: int) -> None:
        self.scope, self.tokens, self.valid, self.transaction = scope, list(tokens), valid, transaction
        self.blocks: list[dict[int, int]] = [{}, {}]
        self.leased = valid // PAGE
        self.first, self.step, self.cut, self.ending = max(0, valid - SLIDING.window) // 4, 0, 0, False

    def key(self, rows: int) -> Key:
        return self.scope, tuple(self.tokens[:rows])

    def leave(self, end: int) -> None:
        """The window moves on: pages wholly before its last rows are gone."""
        bound = min(end, self.valid, self.cut - 1 if self.cut else end)
        self.first = max(self.first, (bound - SLIDING.window) // SLIDING.block_size)
        self.blocks[1] = {page: block for page, block in self.blocks[1].items() if page >= self.first}


class WindowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.number, self.generation = Ledger(), 0, 1
        self.running: dict[RequestHandle, Held] = {}
        self.pages: set[Key] = set()
        self.index: list[dict[Entry, int]] = [{}, {}]
        self.device: list[dict[tuple[int, int], Key]] = [{}, {}]
        self.copied: dict[int, list[set[int]]] = {}
        self.spans: dict[int, RowSpan] = {}
        self.ledger.apply(Genesis(b"w", GROUPS, SLOTS, LONGEST, "pool"))

    # -- the model -------------------------------------------------------------------------------------------------

    def in_tables(self, group: int) -> set[int]:
        return {block for held in self.running.values() for block in held.blocks[group].values()}

    def used(self, group: int) -> set[int]:
        sources = {block for parts in self.copied.values() for block in parts[group]}
        return self.in_tables(group) | set(self.index[group].values()) | sources

    def free(self, group: int) -> int:
        return GROUPS[group].num_blocks - len(self.used(group))

    def indexed(self, scope: Scope, tokens: list[int]) -> int:
        pages = 0
        while (pages + 1) * PAGE <= len(tokens) and (
            scope,
            tuple(tokens[: (pages + 1) * PAGE]),
        ) in self.pages:
            pages += 1
        return pages * PAGE

    def servable(self, scope: Scope, tokens: list[int], most: int) -> int:
        """By trying every boundary: each block of the window before it is in the index."""
        best = 0
        for end in range(0, most + 1, PAGE):
            blocks = range(max(0, end - SLIDING.window) // 4, end // 4)
            if all(entry(scope, tokens, 4 * block + 4) in self.index[1] for block in blocks):
                best = end
        return best

    def idle_window(self) -> dict[int, Entry]:
        busy = self.in_tables(1) | {block for parts in self.copied.values() for block in parts[1]}
        return {block: key for key, block in self.index[1].items() if block not in busy}

    def ends(self) -> dict[Key, int]:
        """Where edges end, by their whole prefix: names of boundaries, read from the tree."""
        tree, found = self.ledger.state.tree, {}
        for scope_id, scope in self.ledger.state.scopes.all_scopes():
            for node in tree.subtree(scope_id):
                tokens = np.concatenate([tree.tokens[at] for at in tree.path(node)]).tolist()
                found[scope, tuple(tokens)] = node
        return found

    def apply(self, command: Any, refusal: type[LedgerRefusal] | None = None) -> Any:
        before = self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index
        if refusal is not None:
            with pytest.raises(refusal):
                self.ledger.apply(command)
            assert before == (self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index)
            return None
        receipt = self.ledger.apply(command)
        scrubs = (getattr(receipt, "scrub", ()), *getattr(receipt, "scrub_others", ()))
        for group, blocks in enumerate(scrubs):
            for block in blocks:
                for row in range(GROUPS[group].block_size):
                    self.device[group].pop((block, row), None)
        return receipt

    def take(self, held: Held, handles: Any, pages: list[list[int]]) -> None:
        """New blocks were free and go to these pages, group by group."""
        wanted = [(group, page) for group in (0, 1) for page in pages[group]]
        assert len(wanted) == len(handles)
        for (group, page), handle in zip(wanted, handles, strict=True):
            assert handle.group == group and handle.block not in self.used(group)
            held.blocks[group][page] = handle.block

    def forget(self, prefixes: set[Key]) -> None:
        self.pages -= prefixes
        for index in self.index:
            for key in [key for key in index if key[:2] in prefixes]:
                del index[key]

    # -- rules -----------------------------------------------------------------------------------------------------

    @initialize(first=PROMPTS, second=PROMPTS)
    def warm(self, first: list[int], second: list[int]) -> None:
        self.serve(first, LONGEST)
        self.serve(second, 5)

    @rule(tokens=PROMPTS, chunk=st.sampled_from([3, 5, LONGEST]))
    def serve(self, tokens: list[int], chunk: int) -> None:
        """A whole request, published after every step."""
        handle = self.do_admit(tokens, ())
        while handle is not None and self.running[handle].valid < len(tokens):
            count = min(chunk, len(tokens) - self.running[handle].valid)
            if not self.do_dispatch(handle, count, ()):
                break
            self.do_complete(self.number, "keep", 0)
            self.do_publish(handle)
        if handle is not None:
            self.do_release(handle)

    @rule(tokens=PROMPTS, data=st.data())
    def admit(self, tokens: list[int], data: st.DataObject) -> None:
        self.do_admit(tokens, self.draw_trim(data))

    def draw_trim(self, data: st.DataObject) -> tuple[int, ...]:
        idle = sorted(self.idle_window())
        return tuple(data.draw(st.lists(st.sampled_from(idle), unique=True, max_size=3))) if idle else ()

    def handles_of(self, blocks: tuple[int, ...]) -> Any:
        (line,) = self.ledger.evictable_window_blocks()
        order = line.blocks.tolist()
        return tuple([line.handles(order.index(block), order.index(block) + 1)[0] for block in blocks])

    def drop_window(self, blocks: tuple[int, ...]) -> None:
        self.index[1] = {key: block for key, block in self.index[1].items() if block not in blocks}

    def do_admit(self, tokens: list[int], trim: tuple[int, ...]) -> RequestHandle | None:
        if len(self.running) == SLOTS:
            return None
        scope = Scope("a", self.generation, b"w")
        indexed = self.indexed(scope, tokens)
        hit = self.servable(scope, tokens, min(indexed, len(tokens) - 1))
        first = max(0, hit - SLIDING.window) // 4
        shared = [
            {page: self.index[0][entry(scope, tokens, 2 * page + 2)] for page in range(hit // 2)},
            {page: self.index[1][entry(scope, tokens, 4 * page + 4)] for page in range(first, hit // 4)},
        ]
        ends = len(tokens), min(len(tokens), hit + SLIDING.window)
        need = [
            list(range(hit // g.block_size, -(-end // g.block_size)))
            for g, end in zip(GROUPS, ends, strict=True)
        ]
        self.number += 1
        content = np.array(tokens, dtype="<i4").tobytes()
        command = Admit(self.number, scope, content, True, (), self.handles_of(trim))
        if set(trim) & set(shared[1].values()):
            self.apply(command, EvictLiveBlock)
            return None
        if len(need[0]) > self.free(0) or len(need[1]) > self.free(1) + len(trim):
            self.apply(command, OutOfMemory)
            return None
        receipt = self.apply(command)
        match = receipt.match
        assert (match.runtime, match.indexed // PAGE * PAGE) == (hit, indexed), match
        assert match.junction == self.servable(scope, tokens, indexed), match
        assert (match.limit == "junction") == (hit < min(indexed, (len(tokens) - 1) // PAGE * PAGE)), match
        event(f"hit of {hit}, limit {match.limit}")
        self.drop_window(trim)
        held = Held(scope, tokens, hit, self.number)
        held.blocks = shared
        self.take(held, receipt.new_blocks, need)
        self.running[receipt.request] = held
        return receipt.request

    def idle(self) -> list[RequestHandle]:
        return [h for h, r in self.running.items() if not r.step and r.valid < min(len(r.tokens), LONGEST)]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.idle()))
        held = self.running[handle]
        self.do_dispatch(
            handle, data.draw(st.integers(1, len(held.tokens[:LONGEST]) - held.valid)), self.draw_trim(data)
        )

    def do_dispatch(self, handle: RequestHandle, count: int, trim: tuple[int, ...]) -> bool:
        held = self.running[handle]
        copied: list[set[int]] = [set(), set()]
        need: list[list[int]] = []
        for group, spec in enumerate(GROUPS):
            size, table = spec.block_size, held.blocks[group]
            page = held.valid // size
            pages = [at for at in range(page, -(-(held.valid + count) // size)) if at not in table]
            if held.valid % size and page in table and self.shared(handle, group, table[page]):
                copied[group].add(table[page])
                pages = [page, *pages]
            need.append(pages)
        self.number += 1
        command = Dispatch(self.number, (RowSpan(handle, held.valid, count),), (), self.handles_of(trim))
        if len(need[0]) > self.free(0) or len(need[1]) > self.free(1) + len(trim):
            self.apply(command, OutOfMemory)
            return False
        receipt = self.apply(command)
        self.drop_window(trim)
        self.copied[self.number] = copied
        assert sorted((c.group, c.source) for c in receipt.copies) == [
            (g, b) for g in (0, 1) for b in copied[g]
        ]
        self.take(held, receipt.new_blocks, need)
        for copy in receipt.copies:
            assert copy.rows == held.valid % GROUPS[copy.group].block_size
            for row in range(copy.rows):
                self.device[copy.group][copy.target, row] = self.device[copy.group][copy.source, row]
        held.step, held.transaction = self.number, 0
        self.spans[self.number] = command.rows[0]
        event(f"{len(receipt.copies)} copies")
        return True

    def shared(self, handle: RequestHandle, group: int, block: int) -> bool:
        others = [held for other, held in self.running.items() if other != handle]
        held = any(block in other.blocks[group].values() for other in others)
        return held or block in self.index[group].values()

    @precondition(lambda self: self.spans)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(["keep", "sample", "sample", "discard"]),
        token=st.integers(0, 1),
    )
    def complete(self, data: st.DataObject, outcome: str, token: int) -> None:
        self.do_complete(data.draw(st.sampled_from(sorted(self.spans))), outcome, token)

    def do_complete(self, step: int, outcome: str, token: int) -> None:
        span = self.spans.pop(step)
        held = self.running[span.request]
        for position in range(span.start, span.start + span.count):
            for group, spec in enumerate(GROUPS):
                place = held.blocks[group][position // spec.block_size], position % spec.block_size
                self.device[group][place] = held.key(position + 1)
        samples = outcome == "sample" and span.start + span.count == len(held.tokens)
        del self.copied[step]
        receipt = self.apply(
            Complete(step, ((0, token),) if samples else (), (0,) if outcome == "discard" else ())
        )
        held.step, start = 0, held.valid
        if outcome != "discard":
            held.valid += span.count
        if samples:
            held.tokens.append(token)
        if held.cut:
            assert len(receipt.truncated) == 1
            held.cut, keep = 0, held.cut
            self.cut(span.request, keep)
        if held.ending:
            del self.running[span.request]
        held.leave(start)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.do_publish(data.draw(st.sampled_from(list(self.running))))

    def do_publish(self, handle: RequestHandle) -> None:
        held = self.running[handle]
        if held.scope.generation != self.generation:
            self.apply(Publish((handle,)), LedgerRefusal)
            return
        receipt = self.apply(Publish((handle,)))
        end = held.valid // PAGE * PAGE
        fresh = {held.key(rows) for rows in range(PAGE, end + 1, PAGE)} - self.pages
        if fresh:
            held.leased = end // PAGE
        self.pages |= fresh
        before = len(self.index[1])
        for group, spec in enumerate(GROUPS):
            size = spec.block_size
            for page in range(end // size):
                key, block = (
                    entry(held.scope, held.tokens, size * page + size),
                    held.blocks[group].get(page),
                )
                if block is not None and key not in self.index[group] and (group == 1 or key[:2] in fresh):
                    assert block not in self.index[group].values()
                    self.index[group][key] = block
        restored = receipt.entries[0].restored_blocks
        assert 0 <= restored <= len(self.index[1]) - before
        event(f"{restored} restored")
        held.leave(end)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.do_release(data.draw(st.sampled_from(list(self.running))))

    def do_release(self, handle: RequestHandle) -> None:
        held = self.running[handle]
        if held.ending:
            self.apply(Release(handle, "cancel"), LedgerRefusal)
            return
        assert self.apply(Release(handle, "cancel")).deferred == bool(held.step)
        held.ending = True
        if not held.step:
            del self.running[handle]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.running)))
        held = self.running[handle]
        keep = data.draw(st.integers(max(1, len(held.tokens) - 8), len(held.tokens)))
        if held.ending:
            self.apply(Truncate(handle, keep), LedgerRefusal)
        elif held.first * 4 > max(0, min(keep - 1, held.valid) - SLIDING.window):
            event("truncation refused")
            self.apply(Truncate(handle, keep), WindowStateMissing)
        elif held.step:
            assert self.apply(Truncate(handle, keep)).deferred
            held.cut = min(held.cut, keep) if held.cut else keep
        else:
            self.apply(Truncate(handle, keep))
            self.cut(handle, keep)

    def cut(self, handle: RequestHandle, keep: int) -> None:
        held = self.running[handle]
        held.tokens, held.valid = held.tokens[:keep], min(keep - 1, held.valid)
        for group, spec in enumerate(GROUPS):
            end = -(-held.valid // spec.block_size)
            held.blocks[group] = {page: b for page, b in held.blocks[group].items() if page < end}
        held.leased = min(held.leased, held.valid // PAGE)
        while held.leased and held.key(held.leased * PAGE) not in self.ends():
            held.leased -= 1

    @precondition(lambda self: any(not held.step for held in self.running.values()))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from([h for h, held in self.running.items() if not held.step]))
        held = self.running[handle]
        if len(self.running) == SLOTS or held.scope.generation != self.generation:
            self.apply(Fork(handle, 1), LedgerRefusal)
            return
        (child,) = self.apply(Fork(handle, 1)).children
        copy = Held(held.scope, held.tokens, held.valid, 0)
        copy.leased, copy.first = held.leased, held.first
        for group, spec in enumerate(GROUPS):
            end = -(-held.valid // spec.block_size)
            copy.blocks[group] = {page: b for page, b in held.blocks[group].items() if page < end}
        self.running[child] = copy

    @precondition(lambda self: any(held.transaction for held in self.running.values()))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from([h for h, held in self.running.items() if held.transaction]))
        self.apply(Abort(self.running[handle].transaction))
        del self.running[handle]

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        leaves, trim = self.ledger.evictable_leaves(), self.draw_trim(data)
        if not leaves and not trim:
            return
        chosen = (
            data.draw(st.lists(st.sampled_from(leaves), unique_by=lambda leaf: leaf.handle)) if leaves else []
        )
        prefixes = {node: key for key, node in self.ends().items()}
        gone: set[Key] = set()
        for leaf in chosen:
            scope, tokens = prefixes[leaf.handle.node]
            pages = len(self.ledger.state.tree.tokens[leaf.handle.node]) // PAGE
            gone |= {(scope, tokens[: len(tokens) - PAGE * at]) for at in range(pages)}
        used = [len(self.used(group)) for group in (0, 1)]
        receipt = self.apply(Evict(tuple([leaf.handle for leaf in chosen]), self.handles_of(trim)))
        self.drop_window(trim)
        self.forget(gone)
        freed = sum(used) - sum(len(self.used(group)) for group in (0, 1))
        assert (receipt.freed_blocks, receipt.trimmed_blocks) == (freed, len(trim))

    @rule()
    def reset(self) -> None:
        scope = Scope("a", self.generation, b"w")
        own = {block for key, block in self.index[0].items() if key[0] == scope}
        leased = any(held.leased for held in self.running.values() if held.scope == scope)
        if leased or own & self.in_tables(0) or own & {b for p in self.copied.values() for b in p[0]}:
            self.apply(Reset(scope), ResetWithLiveReferences)
            return
        self.apply(Reset(scope))
        self.forget({key for key in self.pages if key[0] == scope})

    @precondition(lambda self: self.generation < 3)
    @rule()
    def advance(self) -> None:
        self.generation += 1
        self.apply(AdvanceGeneration("a", self.generation))
        self.forget(set(self.pages))
        for held in self.running.values():
            held.leased = 0

    @precondition(lambda self: not self.spans)
    @rule()
    def checkpoint(self) -> None:
        self.ledger = restore(take_checkpoint(self.ledger))

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        audit(self.ledger)
        ends, tree = self.ends(), self.ledger.state.tree
        for group in (0, 1):
            assert self.ledger.gauge(group).free == self.free(group)
            resident = {b for node in ends.values() for b in tree.edges[group][node].tolist() if b >= 0}
            assert resident == set(self.index[group].values())
        assert set(ends) <= self.pages
        for handle, held in self.running.items():
            assert self.ledger.request(handle).valid_rows == held.valid
            for group, spec in enumerate(GROUPS):
                first = held.first if group else 0
                table = [held.blocks[group][page] for page in sorted(held.blocks[group])]
                assert self.ledger.table(handle, group).tolist() == table
                cells = self.ledger.group_tables[group][handle.slot]
                assert (cells[:first] == -1).all() and min(held.blocks[group], default=first) == first
                for row in range(max(0, held.valid - spec.window) if group else 0, held.valid):
                    key = held.key(row + 1)
                    place = held.blocks[group][row // spec.block_size], row % spec.block_size
                    assert self.device[group][place] == key

    @invariant()
    def the_line_is_what_boundaries_do_not_need(self) -> None:
        (line,) = self.ledger.evictable_window_blocks()
        idle = self.idle_window()
        assert set(line.blocks.tolist()) == set(idle)
        ends = list(self.ends())
        for at, block in enumerate(line.blocks.tolist()):
            scope, prefix, end = idle[block]
            under = [
                len(tokens) for owner, tokens in ends if (owner, tokens[: len(prefix)]) == (scope, prefix)
            ]
            needed = [boundary for boundary in under if boundary - PAGE - SLIDING.window < end]
            assert (at >= line.outside) == bool(needed)


EXAMPLES = int(os.environ.get("COPYHOLD_LEDGER_EXAMPLES", "60"))
TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
