"""Continuous batching over one ledger: who is admitted, which rows a step computes, who is preempted.

Owns the order of work of one replica and nothing of its state: every fact about blocks, rows and prefixes is asked of the
ledger, every change is a command applied here first and sent to the ranks with the next plan. Policy (FIFO admission,
preemption of the youngest; eviction, shares and lifetimes in modules of their own) is outside the ledger (K191, K231).

Invariants: the commands of consecutive plans are one gapless log; a request's tokens reach its sink only in
``complete``, after every rank's digest and sampled tokens matched; a request below its namespace's floor is never
published.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from copyhold.kvcore.commands import (
    Admit,
    AdvanceGeneration,
    Command,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    Publish,
    Release,
    RequestHandle,
    RowSpan,
)
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.receipts import (
    AdmitReceipt,
    AdvanceReceipt,
    EvictReceipt,
    PublicationReceipt,
    PublishedPath,
    ReleaseReceipt,
)

from .agreement import Agreement
from .cache_settings import DEFAULT_CACHE, CacheSettings
from .errors import InvalidRequest, NamespaceRevoked, NoRoom, RanksDiffer
from .eviction import EvictionReport, Evictor, Victims
from .floor_book import FloorBook, FloorFacts
from .messages import Admitted, Failed, Finished, StreamItem, TokenChunk
from .plan import Draw, KVAuditOrder, PurgeOrder, StepEvidence, StepPlan
from .recording import Recording
from .shares import Shares
from .submission import Entry, Submission, first_receipt

_R = TypeVar("_R")
REVOKED = Failed("namespace_revoked", "the namespace was revoked while this request was running")
CANCELLED = Failed("cancelled", "the request was cancelled by its client")


class StepBudget(msgspec.Struct, frozen=True):
    """How much one step may compute; tokens. A prompt longer than ``prefill_chunk_tokens`` takes several steps.

    ``vocab_size`` bounds the ids a step can embed: a larger one would stop the ranks, so it is refused at submission.
    """

    step_tokens: int
    prefill_chunk_tokens: int
    vocab_size: int = 1 << 31


class Scheduler:
    """Plans steps and takes their evidence; single-threaded, without clock, Ray or sockets of its own."""

    def __init__(
        self,
        genesis: Genesis,
        budget: StepBudget,
        on_publication: Callable[[Entry, int, int], None] | None = None,
        cache: CacheSettings = DEFAULT_CACHE,
        clock: Callable[[], float] = time.monotonic,
        recording: Recording | None = None,
    ) -> None:
        """``clock``: seconds, for lifetimes of cached prefixes only."""
        group = genesis.groups[0]
        self._ledger = Ledger()
        self._genesis = genesis
        self._block_size = group.block_size
        self._num_blocks = group.num_blocks
        self._budget = budget
        self._shares = Shares(cache.shares, group.num_blocks)
        if self._shares.strict and any(each.window for each in genesis.groups):
            raise ValueError(
                "shares count blocks of the first cache group: windows cannot be strictly isolated"
            )
        self._limits = cache.limits
        self.evictor = Evictor(
            self._ledger, group.num_blocks, self._shares, cache.make_policy, cache.limits, cache.recency
        )
        self._clock = clock
        self._recording = recording
        self._on_publication = on_publication
        self._waiting: deque[Entry] = deque()
        self._running: list[Entry] = []
        self._floors = FloorBook()
        self._outbox: list[Command] = []
        self._sent_index = 0
        self._step = 0
        self._transaction = 0
        self._dispatched: list[tuple[Entry, RowSpan]] = []
        self.agreement = Agreement()
        self.preemptions = 0
        self.admitted_requests = 0
        self.cached_tokens = 0
        self._apply(genesis)

    # -- what is asked from outside -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or remains to be sent."""
        return not self._waiting and not self._running and not self._outbox

    @property
    def ledger(self) -> Ledger:
        """The replica's own ledger; read only for callers."""
        return self._ledger

    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        return len(self._running), len(self._waiting)

    def submit(self, submission: Submission, put: Callable[[StreamItem], None]) -> Entry:
        """Queue a verified request.

        Raises: ``InvalidRequest`` (it can never be served, or asks for more than its namespace may), ``PoolAllotted``,
        ``NamespaceRevoked``; nothing is kept then.
        """
        entry = Entry(submission, put)
        self._check(entry.prompt, submission.max_new_tokens)
        if self._floors.above(entry.scope):
            raise NamespaceRevoked("the grant's generation has been revoked")
        namespace, retention = submission.scope.namespace, submission.retention
        prompt_blocks = len(entry.prompt) // self._block_size
        self._limits.check(retention, prompt_blocks, self.evictor.pinned_blocks(namespace))
        self._shares.admit_namespace(namespace)
        total = len(entry.prompt) + submission.max_new_tokens
        self._shares.check_fit(namespace, -(-(total - 1) // self._block_size))
        self._waiting.append(entry)
        return entry

    def _check(self, prompt: np.ndarray, max_new_tokens: int) -> None:
        """Raises ``InvalidRequest`` for a prompt that can never be served."""
        total = len(prompt) + max_new_tokens
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty", "prompt")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._budget.vocab_size:
            raise InvalidRequest("the prompt holds a token id outside the vocabulary", "prompt")
        if total > self._genesis.max_model_len:
            raise InvalidRequest(
                f"prompt ({len(prompt)}) and max_tokens ({max_new_tokens}) exceed the context of "
                f"{self._genesis.max_model_len} tokens",
                "max_tokens",
            )

    def cancel(self, entry: Entry) -> None:
        """The client is gone: its blocks are released with the next plan."""
        entry.cancelled = True

    def finish(self, entry: Entry, completion_tokens: int) -> None:
        """The client has what it wanted after so many tokens: the request ends as stopped with the next plan.

        Its blocks go as they do at any good end, what it published stays. A request that has ended is left alone.

        Raises: ``InvalidRequest`` for a count it was not sent; nothing changed.
        """
        if not 0 < completion_tokens <= entry.emitted:
            raise InvalidRequest(f"{completion_tokens} of {entry.emitted} sent tokens cannot be all")
        entry.wanted_tokens = completion_tokens

    def advance_floor(self, namespace: str, generation: int) -> int:
        """Fence every older generation of ``namespace``; returns the number of requests still running below it."""
        if self._floors.is_rise(namespace, generation):
            free_blocks = self._ledger.gauge().free
            self._apply(AdvanceGeneration(namespace, generation), AdvanceReceipt)
            free_now = self._ledger.gauge().free
            self.evictor.dropped(namespace, free_now - free_blocks)
            self._floors.rise(namespace, FloorFacts(generation, free_blocks, free_now))
            for entry in [entry for entry in self._waiting if self._floors.above(entry.scope)]:
                self._waiting.remove(entry)
                entry.end(REVOKED)
        return sum(self._floors.above(entry.scope) for entry in self._running)

    def end_below_floor(self) -> int:
        """End every request whose generation is fenced; returns how many were ended."""
        ended = [entry for entry in self._running if self._floors.above(entry.scope)]
        for entry in ended:
            self._release(entry, "revoke")
            entry.end(REVOKED)
        return len(ended)

    def end_refused(self, refusal: Callable[[Submission], Failed | None]) -> int:
        """End every request that ``refusal`` names a failure for; returns how many were ended."""
        ended = 0
        for entry in [*self._running, *self._waiting]:
            failure = refusal(entry.submission)
            if failure is None:
                continue
            ended += 1
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self._release(entry, "cancel")
            entry.end(failure)
        return ended

    def cache_report(self) -> EvictionReport:
        """What the cache saved, holds and threw away (K199)."""
        return self.evictor.report()

    def held_blocks(self) -> Mapping[str, int]:
        """Blocks that each namespace's requests and index hold."""
        return self._shares.all_held()

    def floor_facts(self) -> dict[str, FloorFacts]:
        """By namespace: the pool around its last rise of the floor."""
        return self._floors.facts()

    def fail_all(self, failure: Failed) -> None:
        """End every stream without touching the ledger: the replica is stopping."""
        for entry in (*self._running, *self._waiting):
            entry.end(failure)
        self._running.clear()
        self._waiting.clear()

    # -- the step -----------------------------------------------------------------------------------------------

    def plan(self, purge: PurgeOrder | None = None, audit: KVAuditOrder | None = None) -> StepPlan | None:
        """The next message for every rank, or ``None`` when there is nothing to say."""
        if self._recording is not None:
            self._recording.between_steps(self._ledger)
        self._end_on_demand()
        self.evict(self.evictor.expired(self._clock()))
        self._admit_waiting()
        if purge is None and audit is None:
            self._dispatch()
        if not self._outbox and purge is None and audit is None:
            return None
        sample = tuple(
            index
            for index, (entry, span) in enumerate(self._dispatched)
            if span.start + span.count == entry.num_tokens
        )
        plan = StepPlan(
            self._genesis.incarnation,
            self._step,
            self._sent_index,
            tuple(self._outbox),
            sample,
            purge,
            audit,
            self._draws(sample),
        )
        self.agreement.expect(self._ledger.log_index, self._ledger.machine_digest)
        self._sent_index = self._ledger.log_index
        self._outbox.clear()
        self._step += 1
        if self._recording is not None:
            self._recording.flush()
        return plan

    def heartbeat(self) -> StepPlan:
        """A plan that asks every rank for its position and nothing else; for an idle replica."""
        plan = StepPlan(self._genesis.incarnation, self._step, self._sent_index, ())
        self.agreement.expect(self._ledger.log_index, self._ledger.machine_digest)
        self._step += 1
        return plan

    def complete(self, plan: StepPlan, evidence: Sequence[StepEvidence], now_s: float) -> None:
        """Take every rank's evidence for ``plan``; tokens leave only if all agree.

        Raises: ``RanksDiffer``; the replica must stop, no token of the step was released.
        """
        self.agreement.check(plan, evidence)
        if not self._dispatched:
            return
        tokens = evidence[0].tokens
        if any(other.tokens != tokens for other in evidence) or len(tokens) != len(plan.sample):
            raise RanksDiffer(
                len(evidence) - 1, f"tokens {tokens}", f"{[other.tokens for other in evidence]}"
            )
        dispatched, self._dispatched = self._dispatched, []
        sampled = tuple(zip(plan.sample, tokens, strict=True))
        self._apply(Complete(plan.step, sampled, ()))
        for entry, span in dispatched:
            entry.valid_rows = span.start + span.count
        self._publish([entry for entry, _ in dispatched])
        for index, token in sampled:
            self._take_token(dispatched[index][0], token, now_s)

    def _end_on_demand(self) -> None:
        """End what its client cancelled, or has had enough of."""
        for entry in [entry for entry in self._running if entry.cancelled]:
            self._release(entry, "cancel")
            entry.end(CANCELLED)
        for entry in [entry for entry in self._waiting if entry.cancelled]:
            self._waiting.remove(entry)
            entry.end(CANCELLED)
        for entry in (*self._running, *self._waiting):
            if entry.wanted_tokens is not None:
                self._finish(entry, "stop", entry.wanted_tokens)

    def _draws(self, sample: tuple[int, ...]) -> tuple[Draw, ...]:
        asked = [self._dispatched[row][0].submission.sampling for row in sample]
        return tuple(Draw(index, params) for index, params in enumerate(asked) if not params.greedy)

    # -- admission ----------------------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """In order of arrival; who lacks room in its own share waits alone, who lacks it in the pool holds up all."""
        held_up: set[str] = set()
        for entry in list(self._waiting):
            if len(self._running) >= self._genesis.max_requests:
                return
            if entry.scope.namespace in held_up:
                continue
            try:
                self._admit(entry)
            except NoRoom as error:
                if error.namespace is None:
                    return
                held_up.add(error.namespace)

    def _admit(self, entry: Entry) -> None:
        """Raises ``NoRoom``: some running request has to end first; nothing changed."""
        tokens, namespace = entry.known_tokens(), entry.scope.namespace
        probe = self._ledger.probe(entry.scope, tokens, entry.submission.lookup)
        blocks = -(-(len(tokens) // 4) // self._block_size)
        try:
            windows = self._ledger.prompt_window_blocks(len(tokens) // 4, probe.match.runtime)
            needs = {namespace: blocks - len(probe.blocks)}
            victims = self.evictor.choose(needs, frozenset(probe.path), windows)
        except NoRoom as error:
            if any(error.namespace in (None, other.scope.namespace) for other in self._running):
                raise
            # Nothing runs and the matched path itself is in the way (its last edge is longer than the match). Every
            # block in question is free or evictable then, and ``submit`` checked that the request can be held.
            self.evict(self.evictor.choose({namespace: blocks}))
            self._admit(entry)
            return
        self._waiting.remove(entry)
        self._transaction += 1
        receipt: AdmitReceipt = self._apply(
            Admit(
                self._transaction, entry.scope, tokens, entry.submission.lookup, victims.nodes, victims.trim
            ),
            AdmitReceipt,
        )
        self.evictor.evicted(victims)
        self._shares.take(namespace, len(receipt.new_blocks.blocks()))
        self._start(entry, receipt)

    def _start(self, entry: Entry, receipt: AdmitReceipt) -> None:
        entry.handle = receipt.request
        entry.valid_rows = receipt.match.runtime
        entry.published_blocks = receipt.match.runtime // self._block_size
        entry.terminal = receipt.path[-1] if receipt.path else None
        self._running.append(entry)
        namespace, asked = entry.scope.namespace, entry.submission.retention
        self.evictor.admitted(
            namespace,
            receipt.match.prompt,
            entry.terminal,
            self._table(entry)[: entry.published_blocks],
            asked,
            self._clock(),
        )
        given = int(self._ledger.num_blocks[receipt.request.slot])
        growth = max(0, entry.num_tokens // self._block_size - given)
        entry.keeps = not asked.no_store and self.evictor.worth_keeping(
            namespace, entry.published_blocks, growth, asked, given - entry.published_blocks
        )
        if entry.receipt is None:
            self.admitted_requests += 1
            self.cached_tokens += receipt.match.runtime
            entry.receipt = first_receipt(entry.submission, receipt.match, self._block_size)
            entry.put(Admitted(entry.receipt))

    def evict(self, victims: Victims) -> None:
        """Evict in a command of its own, if there is anything to evict."""
        if victims.nodes or victims.trim:
            self._apply(Evict(victims.nodes, victims.trim), EvictReceipt)
            self.evictor.evicted(victims)

    # -- dispatch -----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while True:
            rows = self._choose_rows()
            if not rows:
                return
            grown = {span: self._growth_blocks(span) for _, span in rows}
            needs: Counter[str] = Counter()
            for entry, span in rows:
                needs[entry.scope.namespace] += grown[span]
            try:
                spans = tuple(span for _, span in rows)
                victims = self.evictor.choose(needs, window_needs=self._ledger.step_window_blocks(spans))
                break
            except NoRoom as error:
                self._preempt_youngest(error.namespace)
        self._dispatched = rows
        self._apply(Dispatch(self._step, spans, victims.nodes, victims.trim))
        self.evictor.evicted(victims)
        for namespace, blocks in needs.items():
            self._shares.take(namespace, blocks)
        for entry, span in rows:
            self._floors.note_growth(entry.scope, grown[span])

    def _choose_rows(self) -> list[tuple[Entry, RowSpan]]:
        """Decoding requests first (one row each), then prompt chunks in order of admission, within the budget."""
        budget = self._budget.step_tokens
        rows: list[tuple[Entry, RowSpan]] = []
        decoding = [entry for entry in self._running if entry.num_tokens - entry.valid_rows == 1]
        prefilling = [entry for entry in self._running if entry.num_tokens - entry.valid_rows > 1]
        for entry in decoding:
            rows.append((entry, RowSpan(_held(entry), entry.valid_rows, 1)))
        budget -= len(decoding)
        for entry in prefilling:
            remaining = entry.num_tokens - entry.valid_rows
            count = min(remaining, self._budget.prefill_chunk_tokens, budget)
            if count <= 0:
                break
            rows.append((entry, RowSpan(_held(entry), entry.valid_rows, count)))
            budget -= count
        return rows

    def _growth_blocks(self, span: RowSpan) -> int:
        held = int(self._ledger.num_blocks[span.request.slot])
        return max(0, -(-(span.start + span.count) // self._block_size) - held)

    def _preempt_youngest(self, namespace: str | None) -> None:
        """Give the youngest request's blocks back, of one namespace or of all; it is admitted again, with what it has
        generated as prompt.

        A request below its namespace's floor could not be admitted again: it ends here.
        """
        candidates = [entry for entry in self._running if namespace in (None, entry.scope.namespace)]
        if len(candidates) == 1:
            entry = candidates[0]
            self._release(entry, "error")
            entry.end(Failed("out_of_memory", "the pool cannot hold this request"))
            return
        entry = candidates[-1]
        if self._floors.above(entry.scope):
            self._release(entry, "revoke")
            entry.end(REVOKED)
            return
        self.preemptions += 1
        self._release(entry, "preempt")
        self._waiting.appendleft(entry)

    # -- after a step -------------------------------------------------------------------------------------------

    def _publish(self, entries: list[Entry]) -> None:
        ready = [
            entry
            for entry in entries
            if entry.submission.publish
            and not self._floors.above(entry.scope)
            and entry.valid_rows // self._block_size > entry.published_blocks
            and entry.keeps
        ]
        if not ready:
            return
        receipt = self._apply(Publish(tuple(_held(entry) for entry in ready)), PublicationReceipt)
        for entry, path in zip(ready, receipt.entries, strict=True):
            self._note_published(entry, path)
            if self._on_publication is not None:
                self._on_publication(entry, path.tokens_before, path.tokens_after)

    def _note_published(self, entry: Entry, path: PublishedPath) -> None:
        first, end = path.tokens_before // self._block_size, path.tokens_after // self._block_size
        entry.published_blocks = entry.valid_rows // self._block_size
        entry.terminal = path.path[-1] if path.path else None
        self.evictor.published(
            entry.scope.namespace,
            path.path,
            first,
            self._table(entry)[first:end],
            entry.submission.retention,
            self._clock(),
        )

    def _take_token(self, entry: Entry, token: int, now_s: float) -> None:
        first = not entry.generated
        entry.generated.append(token)
        if first and entry.receipt is not None:
            latency_ms = (now_s - entry.submission.arrived_at_s) * 1e3
            entry.receipt = msgspec.structs.replace(entry.receipt, time_to_first_token_ms=latency_ms)
        stopped = token in entry.submission.stop_token_ids
        if not stopped:
            entry.emitted += 1
            entry.put(TokenChunk((token,)))
        limit = min(entry.submission.max_new_tokens, self._genesis.max_model_len - len(entry.prompt))
        if stopped or len(entry.generated) >= limit:
            self._finish(entry, "stop" if stopped else "length", entry.emitted)

    def _finish(self, entry: Entry, reason: str, completion_tokens: int) -> None:
        """End well; a preempted request that waits to go on holds nothing to release."""
        if entry.handle is None:
            self._waiting.remove(entry)
        else:
            self._release(entry, "finish")
        assert entry.receipt is not None, "a finished request was admitted"
        entry.receipt = msgspec.structs.replace(
            entry.receipt, completion_tokens=completion_tokens, finish_reason=reason
        )
        entry.end(Finished(reason, entry.receipt))

    def _release(self, entry: Entry, reason: str) -> None:
        namespace, indexed = entry.scope.namespace, self._table(entry)[: entry.published_blocks].copy()
        free_blocks = self._ledger.gauge().free
        receipt = self._apply(Release(_held(entry), reason), ReleaseReceipt)
        assert not receipt.deferred, "requests are released between steps"
        self._running.remove(entry)
        # Shares count blocks of the first cache group, a receipt those of all.
        self._shares.give_back(namespace, self._ledger.gauge().free - free_blocks)
        if not self._floors.above(entry.scope):
            self.evictor.released(namespace, entry.terminal, indexed, len(entry.generated))
        else:
            self._floors.note_release(entry.scope, self._ledger.gauge().free)
        entry.handle = None
        entry.valid_rows = 0
        entry.published_blocks = 0
        entry.terminal = None

    # -- small things -------------------------------------------------------------------------------------------

    def _apply(self, command: Command, kind: type[_R] = object) -> _R:
        receipt = self._ledger.apply(command)
        self._outbox.append(command)
        if self._recording is not None:
            self._recording.record(command, receipt)
        assert isinstance(receipt, kind), (type(receipt), kind)
        return receipt

    def _table(self, entry: Entry) -> np.ndarray:
        slot = _held(entry).slot
        return self._ledger.tables[slot, : int(self._ledger.num_blocks[slot])]


def _held(entry: Entry) -> RequestHandle:
    assert entry.handle is not None, f"request {entry.submission.request_id} holds no slot"
    return entry.handle
