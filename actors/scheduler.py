"""Continuous batching over one ledger: from requests to step plans, and from the ranks' evidence to tokens.

Owns the step and what is asked from outside, and nothing of a replica's state: every fact about blocks, rows and prefixes is
asked of the ledger, every change is a command applied there first and sent to the ranks with the next plan (request_book.py).
Who is admitted is decided in admission.py, which rows are computed and who is preempted in dispatch.py.

Invariants: the commands of consecutive plans are one gapless log; a request's tokens reach its sink only in
``complete``, after every rank's digest and sampled tokens matched; a request below its namespace's floor is never
published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from copyhold.kvcore.commands import AdvanceGeneration, Complete, Genesis, Publish, PublishTail
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.receipts import AdvanceReceipt, PublicationReceipt, PublishedPath, TailReceipt

from .admission import Admission
from .agreement import Agreement
from .cache_settings import DEFAULT_CACHE, CacheSettings
from .dispatch import Dispatcher, Rows, StepBudget
from .errors import InvalidRequest, RanksDiffer
from .eviction import EvictionReport, Evictor, Victims
from .floor_book import FloorFacts
from .messages import Failed, StreamItem, TokenChunk
from .plan import Draw, KVAuditOrder, PurgeOrder, StepEvidence, StepPlan
from .recording import Recording
from .request_book import REVOKED, RequestBook, held
from .submission import Entry, Submission

CANCELLED = Failed("cancelled", "the request was cancelled by its client")


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
        """``clock``: seconds, for lifetimes of cached prefixes only. Raises: ``CacheGroupsUnfit``."""
        self._book = RequestBook(genesis, cache, recording)
        self._admission = Admission(self._book, budget.vocab_size, cache.limits, clock)
        self._dispatcher = Dispatcher(self._book, budget)
        self._clock = clock
        self._recording = recording
        self._on_publication = on_publication
        self._step = 0
        self._dispatched: Rows = []
        self.agreement = Agreement()

    # -- what is asked from outside -----------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or remains to be sent."""
        return self._book.idle

    @property
    def ledger(self) -> Ledger:
        """The replica's own ledger; read only for callers."""
        return self._book.ledger

    @property
    def evictor(self) -> Evictor:
        """Which cached edges make room."""
        return self._book.evictor

    @property
    def preemptions(self) -> int:
        """Requests that gave way to others since the start."""
        return self._dispatcher.preemptions

    @property
    def admitted_requests(self) -> int:
        """Requests admitted since the start, each counted once."""
        return self._admission.admitted_requests

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that those admissions found cached."""
        return self._admission.cached_tokens

    def counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        return len(self._book.running), len(self._book.waiting)

    def submit(self, submission: Submission, put: Callable[[StreamItem], None]) -> Entry:
        """Queue a verified request.

        Raises: ``InvalidRequest`` (it can never be served, or asks for more than its namespace may), ``PoolAllotted``,
        ``NamespaceRevoked``; nothing is kept then.
        """
        entry = Entry(submission, put)
        self._admission.enter(entry)
        return entry

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
        if self._book.floors.is_rise(namespace, generation):
            free_blocks = self.ledger.gauge().free
            self._book.apply(AdvanceGeneration(namespace, generation), AdvanceReceipt)
            free_now = self.ledger.gauge().free
            self.evictor.dropped(namespace, free_now - free_blocks)
            self._book.floors.rise(namespace, FloorFacts(generation, free_blocks, free_now))
            for entry in [entry for entry in self._book.waiting if self._book.floors.above(entry.scope)]:
                self._book.waiting.remove(entry)
                entry.end(REVOKED)
        return sum(self._book.floors.above(entry.scope) for entry in self._book.running)

    def end_below_floor(self) -> int:
        """End every request whose generation is fenced; returns how many were ended."""
        ended = [entry for entry in self._book.running if self._book.floors.above(entry.scope)]
        for entry in ended:
            self._book.release(entry, "revoke")
            entry.end(REVOKED)
        return len(ended)

    def end_refused(self, refusal: Callable[[Submission], Failed | None]) -> int:
        """End every request that ``refusal`` names a failure for; returns how many were ended."""
        ended = 0
        for entry in [*self._book.running, *self._book.waiting]:
            failure = refusal(entry.submission)
            if failure is None:
                continue
            ended += 1
            if entry in self._book.waiting:
                self._book.waiting.remove(entry)
            else:
                self._book.release(entry, "cancel")
            entry.end(failure)
        return ended

    def evict(self, victims: Victims) -> None:
        """Evict in a command of its own, if there is anything to evict."""
        self._book.evict(victims)

    def cache_report(self) -> EvictionReport:
        """What the cache saved, holds and threw away (K199)."""
        return self.evictor.report()

    def held_blocks(self) -> Mapping[str, int]:
        """Blocks that each namespace's requests and index hold."""
        return self._book.shares.all_held()

    def floor_facts(self) -> dict[str, FloorFacts]:
        """By namespace: the pool around its last rise of the floor."""
        return self._book.floors.facts()

    def fail_all(self, failure: Failed) -> None:
        """End every stream without touching the ledger: the replica is stopping."""
        for entry in (*self._book.running, *self._book.waiting):
            entry.end(failure)
        self._book.running.clear()
        self._book.waiting.clear()

    # -- the step -----------------------------------------------------------------------------------------------

    def plan(self, purge: PurgeOrder | None = None, audit: KVAuditOrder | None = None) -> StepPlan | None:
        """The next message for every rank, or ``None`` when there is nothing to say."""
        if self._recording is not None:
            self._recording.between_steps(self.ledger)
        self._end_on_demand()
        self.evict(self.evictor.expired(self._clock()))
        self._admission.admit_waiting()
        if purge is None and audit is None:
            self._dispatched = self._dispatcher.dispatch(self._step)
        if not self._book.unsent and purge is None and audit is None:
            return None
        sample = tuple(
            index
            for index, (entry, span) in enumerate(self._dispatched)
            if span.start + span.count == entry.num_tokens
        )
        first_log_index, commands = self._book.take_unsent()
        plan = StepPlan(
            self._book.genesis.incarnation,
            self._step,
            first_log_index,
            commands,
            sample,
            purge,
            audit,
            self._draws(sample),
        )
        self.agreement.expect(self.ledger.log_index, self.ledger.machine_digest)
        self._step += 1
        if self._recording is not None:
            self._recording.flush()
        return plan

    def heartbeat(self) -> StepPlan:
        """A plan that asks every rank for its position and nothing else; for an idle replica."""
        plan = StepPlan(self._book.genesis.incarnation, self._step, self._book.sent_index, ())
        self.agreement.expect(self.ledger.log_index, self.ledger.machine_digest)
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
        held_tails = self._book.copied_tails([entry for entry, _ in dispatched])
        self._book.apply(Complete(plan.step, sampled, ()))
        self._book.give_back_tails(held_tails)
        for entry, span in dispatched:
            entry.valid_rows = span.start + span.count
        self._publish([entry for entry, _ in dispatched])
        for index, token in sampled:
            self._take_token(dispatched[index][0], token, now_s)

    def _end_on_demand(self) -> None:
        """End what its client cancelled, or has had enough of."""
        for entry in [entry for entry in self._book.running if entry.cancelled]:
            self._book.release(entry, "cancel")
            entry.end(CANCELLED)
        for entry in [entry for entry in self._book.waiting if entry.cancelled]:
            self._book.waiting.remove(entry)
            entry.end(CANCELLED)
        for entry in (*self._book.running, *self._book.waiting):
            if entry.wanted_tokens is not None:
                self._publish_tail(entry)
                self._book.finish(entry, "stop", entry.wanted_tokens)

    def _draws(self, sample: tuple[int, ...]) -> tuple[Draw, ...]:
        asked = [self._dispatched[row][0].submission.sampling for row in sample]
        return tuple(Draw(index, params) for index, params in enumerate(asked) if not params.greedy)

    # -- after a step -------------------------------------------------------------------------------------------

    def _publish(self, entries: list[Entry]) -> None:
        page = self._book.page_tokens
        ready = [
            entry
            for entry in entries
            if entry.submission.publish
            and not self._book.floors.above(entry.scope)
            and entry.valid_rows // page * page > entry.published_blocks * self._book.block_size
            and entry.keeps
        ]
        if not ready:
            return
        receipt = self._book.apply(Publish(tuple(held(entry) for entry in ready)), PublicationReceipt)
        for entry, path in zip(ready, receipt.entries, strict=True):
            self._note_published(entry, path)
            if self._on_publication is not None:
                self._on_publication(entry, path.tokens_before, path.tokens_after)

    def _publish_tail(self, entry: Entry) -> None:
        """Leave the rows after the last whole block of a request that ends well."""
        if (
            not self._book.tail_policy
            or entry.handle is None
            or not entry.submission.publish
            or not entry.keeps
        ):
            return
        if not self._book.floors.above(entry.scope):
            receipt = self._book.apply(PublishTail(held(entry), self._book.tail_policy), TailReceipt)
            self._note_published(entry, receipt.entry)

    def _note_published(self, entry: Entry, path: PublishedPath) -> None:
        first, end = path.tokens_before // self._book.block_size, path.tokens_after // self._book.block_size
        entry.published_blocks = end
        entry.terminal = path.path[-1] if path.path else None
        self.evictor.published(
            entry.scope.namespace,
            path.path,
            first,
            self._book.table(entry)[first:end],
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
        limit = min(entry.submission.max_new_tokens, self._book.genesis.max_model_len - len(entry.prompt))
        if stopped or len(entry.generated) >= limit:
            self._publish_tail(entry)
            self._book.finish(entry, "stop" if stopped else "length", entry.emitted)
