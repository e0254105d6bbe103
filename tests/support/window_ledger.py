"""A ledger of full-attention and window groups with toy devices, and brute-force oracles over residency dumps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Admit,
    Command,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    RequestHandle,
    RowSpan,
    Scope,
)
from copyhold.kvcore.errors import LedgerRefusal
from copyhold.kvcore.ledger import Ledger

WORLD = b"w"


class WindowLedger:
    """Audits after every command; `rows[group][block, offset]` is the identity of the row that was written there."""

    def __init__(
        self, *groups: GroupSpec, requests: int = 8, longest: int = 256, device: bool = True
    ) -> None:
        self.device = device
        self.ledger = Ledger()
        self.groups = groups
        self.number = 0
        self.rows: list[dict[tuple[int, int], Any]] = [{} for _ in groups]
        self.spans: dict[int, tuple[RowSpan, ...]] = {}
        self.alignment = self.apply(Genesis(WORLD, groups, requests, longest, "pool")).alignment

    def apply(self, command: Command) -> Any:
        receipt = self.ledger.apply(command)
        audit(self.ledger)
        for group, blocks in enumerate(
            (getattr(receipt, "scrub", ()), *getattr(receipt, "scrub_others", ()))
        ):
            for block in blocks:
                for offset in range(self.groups[group].block_size):
                    self.rows[group].pop((block, offset), None)
        for copy in getattr(receipt, "copies", ()):
            for offset in range(copy.rows):
                self.rows[copy.group][copy.target, offset] = self.rows[copy.group][copy.source, offset]
        return receipt

    def refused(self, command: Command, refusal: type[LedgerRefusal], **fields: object) -> None:
        before = self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index
        with pytest.raises(refusal) as caught:
            self.ledger.apply(command)
        assert before == (self.ledger.committed_digest, self.ledger.machine_digest, self.ledger.log_index)
        audit(self.ledger)
        assert {name: getattr(caught.value, name) for name in fields} == fields

    def admit_command(self, tokens: list[int], namespace: str = "a", **changes: Any) -> Admit:
        self.number += 1
        content = np.array(tokens, dtype="<i4").tobytes()
        return Admit(self.number, Scope(namespace, changes.pop("generation", 1), WORLD), content, **changes)

    def admit(self, tokens: list[int], namespace: str = "a", **changes: Any) -> Any:
        return self.apply(self.admit_command(tokens, namespace, **changes))

    def dispatch(self, handle: RequestHandle, count: int | None = None, **changes: Any) -> Any:
        view = self.ledger.request(handle)
        self.number += 1
        count = view.num_tokens - view.valid_rows if count is None else count
        self.spans[self.number] = (RowSpan(handle, view.valid_rows, count),)
        return self.apply(Dispatch(self.number, self.spans[self.number], **changes))

    def complete(self, sample: int | None = None, discarded: tuple[int, ...] = ()) -> Any:
        """The device writes the rows of the newest step and reads what each of them may read."""
        for span in self.spans[self.number] if self.device else ():
            for position in range(span.start, span.start + span.count):
                for group, spec in enumerate(self.groups):
                    table = self.ledger.group_tables[group][span.request.slot]
                    key = int(table[position // spec.block_size]), position % spec.block_size
                    self.rows[group][key] = self.identity(span.request, position)
            self.check_window(span.request, span.start)
            self.check_window(span.request, span.start + span.count - 1)
        return self.apply(Complete(self.number, () if sample is None else ((0, sample),), discarded))

    def identity(self, handle: RequestHandle, position: int) -> tuple[Any, ...]:
        known = self.ledger.request_tokens(handle)[: position + 1]
        return self.ledger.request(handle).scope, known.tobytes()

    def check_window(self, handle: RequestHandle, position: int) -> None:
        """Every row that a row at `position` reads holds what the request itself would have written."""
        for group, spec in enumerate(self.groups):
            table = self.ledger.group_tables[group][handle.slot]
            for row in range(max(0, position - spec.window) if spec.window else 0, position):
                key = int(table[row // spec.block_size]), row % spec.block_size
                assert key[0] >= 0, (group, row)
                assert self.rows[group][key] == self.identity(handle, row), (group, row)

    def compute(self, handle: RequestHandle, chunk: int = 10_000, publish: bool = False) -> None:
        while (view := self.ledger.request(handle)).valid_rows < view.num_tokens:
            self.dispatch(handle, min(chunk, view.num_tokens - view.valid_rows))
            self.complete()
            if publish:
                self.apply(Publish((handle,)))

    def serve(self, tokens: list[int], chunk: int = 10_000, namespace: str = "a") -> int:
        """A whole life; the hit, after it was compared with what a residency dump says."""
        expected = self.brute_force(tokens, namespace)
        receipt = self.admit(tokens, namespace)
        assert receipt.match.runtime == expected, (receipt.match, expected)
        self.compute(receipt.request, chunk)
        self.apply(Publish((receipt.request,)))
        self.apply(Release(receipt.request, "finish"))
        return receipt.match.runtime

    def decode(self, handle: RequestHandle, token: int) -> Any:
        self.dispatch(handle, 1)
        return self.complete(token)

    # -- oracles ---------------------------------------------------------------------------------------------------

    def residency(self, tokens: list[int], namespace: str = "a") -> list[set[int]]:
        """Positions of `tokens` whose rows the index holds, by group: from edges and pools, not from the match."""
        state = self.ledger.state
        found: list[set[int]] = [set() for _ in self.groups]
        scope = state.scopes.find(Scope(namespace, max(1, self.ledger.floor(namespace)), WORLD))
        for node in state.tree.subtree(scope):
            path = state.tree.path(node)
            prefix = np.concatenate([state.tree.tokens[at] for at in path]).tolist()
            start = len(prefix) - len(state.tree.tokens[node])
            for group, spec in enumerate(self.groups):
                for at, block in enumerate(state.tree.edges[group][node].tolist()):
                    end = start + (at + 1) * spec.block_size
                    page_end = -(-end // self.alignment) * self.alignment
                    if block >= 0 and prefix[:page_end] == tokens[:page_end]:
                        assert state.pools[group].node.array[block] == node
                        found[group] |= set(range(end - spec.block_size, end))
        return found

    def brute_force(self, tokens: list[int], namespace: str = "a", cap: int | None = None) -> int:
        """The longest aligned boundary up to the cap for which every group holds what it needs."""
        held = self.residency(tokens, namespace)
        best = 0
        for length in range(0, (len(tokens) - 1 if cap is None else cap) + 1, self.alignment):
            windows = [range(max(0, length - g.window) if g.window else 0, length) for g in self.groups]
            if all(set(rows) <= rows_held for rows, rows_held in zip(windows, held, strict=True)):
                best = length
        return best

    def window_handles(self, group: int, first: int, end: int) -> tuple[Any, ...]:
        """Handles of the evictable window blocks that hold rows [first, end)."""
        size = self.groups[group].block_size
        (line,) = [line for line in self.ledger.evictable_window_blocks() if line.group == group]
        chosen = [at for at, place in enumerate(line.places.tolist()) if first <= place * size < end]
        return tuple([line.handles(at, at + 1)[0] for at in chosen])

    def trim(self, group: int, first: int, end: int) -> Any:
        return self.apply(Evict((), self.window_handles(group, first, end)))

    def free(self) -> list[int]:
        return [self.ledger.gauge(group).free for group in range(len(self.groups))]
