"""Dispatch: which rows the next step computes, and who gives way when they do not fit.

Owns the budget of a step, the choice of rows and preemption of the youngest. Invariant: what is dispatched fits the budget, the
pool and every share; who is preempted is admitted again with what it has generated, unless its namespace was revoked.
Policy outside the ledger: K191, K231.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from copyhold.kvcore.commands import Dispatch, RowSpan

from .errors import NoRoom
from .messages import Failed
from .request_book import REVOKED, RequestBook, held
from .submission import Entry

Rows = list[tuple[Entry, RowSpan]]


class StepBudget(msgspec.Struct, frozen=True):
    """How much one step may compute; tokens. A prompt longer than ``prefill_chunk_tokens`` takes several steps.

    ``vocab_size`` bounds the ids a step can embed: a larger one would stop the ranks, so it is refused at submission.
    """

    step_tokens: int
    prefill_chunk_tokens: int
    vocab_size: int = 1 << 31


class Dispatcher:
    """One replica's choice of rows."""

    def __init__(self, book: RequestBook, budget: StepBudget) -> None:
        self._book = book
        self._budget = budget
        self.preemptions = 0

    def dispatch(self, step: int) -> Rows:
        """Dispatch what this step computes, if anything; its rows, in the order of the command."""
        while True:
            rows = self._choose_rows()
            if not rows:
                return rows
            grown = {span: self._growth_blocks(span) for _, span in rows}
            needs: Counter[str] = Counter()
            for entry, span in rows:
                needs[entry.scope.namespace] += grown[span]
            try:
                spans = tuple(span for _, span in rows)
                victims = self._book.evictor.choose(
                    needs, window_needs=self._book.ledger.step_window_blocks(spans)
                )
                break
            except NoRoom as error:
                self._preempt_youngest(error.namespace)
        self._book.apply(Dispatch(step, spans, victims.nodes, victims.trim))
        self._book.evictor.evicted(victims)
        for namespace, blocks in needs.items():
            self._book.shares.take(namespace, blocks)
        for entry, span in rows:
            self._book.floors.note_growth(entry.scope, grown[span])
        return rows

    def _choose_rows(self) -> Rows:
        """Decoding requests first (one row each), then prompt chunks in order of admission, within the budget."""
        budget = self._budget.step_tokens
        rows: Rows = []
        decoding = [entry for entry in self._book.running if entry.num_tokens - entry.valid_rows == 1]
        prefilling = [entry for entry in self._book.running if entry.num_tokens - entry.valid_rows > 1]
        for entry in decoding:
            rows.append((entry, RowSpan(held(entry), entry.valid_rows, 1)))
        budget -= len(decoding)
        for entry in prefilling:
            remaining = entry.num_tokens - entry.valid_rows
            count = min(remaining, self._budget.prefill_chunk_tokens, budget)
            if count <= 0:
                break
            rows.append((entry, RowSpan(held(entry), entry.valid_rows, count)))
            budget -= count
        return rows

    def _growth_blocks(self, span: RowSpan) -> int:
        given = int(self._book.ledger.num_blocks[span.request.slot])
        growth = max(0, -(-(span.start + span.count) // self._book.block_size) - given)
        return growth + (self._book.ledger.copies_tail(span) if self._book.tail_policy else 0)

    def _preempt_youngest(self, namespace: str | None) -> None:
        """Give the youngest request's blocks back, of one namespace or of all; it is admitted again, with what it has
        generated as prompt.

        A request below its namespace's floor could not be admitted again: it ends here.
        """
        candidates = [entry for entry in self._book.running if namespace in (None, entry.scope.namespace)]
        if len(candidates) == 1:
            entry = candidates[0]
            self._book.release(entry, "error")
            entry.end(Failed("out_of_memory", "the pool cannot hold this request"))
            return
        entry = candidates[-1]
        if self._book.floors.above(entry.scope):
            self._book.release(entry, "revoke")
            entry.end(REVOKED)
            return
        self.preemptions += 1
        self._book.release(entry, "preempt")
        self._book.waiting.appendleft(entry)
