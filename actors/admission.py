"""Admission: which requests can ever be served, and which get blocks now.

Owns the order (first come, first served, within what shares allow), the room made for a newcomer, and what admissions were
counted. Invariant: a request is admitted whole or nothing changed; what it hits is protected while room is made for it.
Policy outside the ledger: K191, K196, K231.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from copyhold.kvcore.commands import Admit
from copyhold.kvcore.receipts import AdmitReceipt

from .errors import InvalidRequest, NamespaceRevoked, NoRoom
from .messages import Admitted
from .request_book import RequestBook
from .retention import RetentionLimits
from .submission import Entry, first_receipt


class Admission:
    """One replica's way in."""

    def __init__(
        self, book: RequestBook, vocab_size: int, limits: RetentionLimits, clock: Callable[[], float]
    ) -> None:
        """``clock``: seconds, for lifetimes of cached prefixes only; ``vocab_size`` bounds the ids of a prompt."""
        self._book = book
        self._vocab_size = vocab_size
        self._limits = limits
        self._clock = clock
        self._transaction = 0
        self.admitted_requests = 0
        self.cached_tokens = 0

    def enter(self, entry: Entry) -> None:
        """Let a request wait that can be served some time.

        Raises: ``InvalidRequest`` (it can never be served, or asks for more than its namespace may), ``PoolAllotted``,
        ``NamespaceRevoked``; nothing is kept then.
        """
        submission, block_size = entry.submission, self._book.block_size
        self._check(entry.prompt, submission.max_new_tokens)
        if self._book.floors.above(entry.scope):
            raise NamespaceRevoked("the grant's generation has been revoked")
        namespace, retention = submission.scope.namespace, submission.retention
        prompt_blocks = len(entry.prompt) // block_size
        self._limits.check(retention, prompt_blocks, self._book.evictor.pinned_blocks(namespace))
        self._book.shares.admit_namespace(namespace)
        total = len(entry.prompt) + submission.max_new_tokens
        self._book.shares.check_fit(namespace, -(-(total - 1) // block_size))
        self._book.waiting.append(entry)

    def _check(self, prompt: np.ndarray, max_new_tokens: int) -> None:
        """Raises ``InvalidRequest`` for a prompt that can never be served."""
        total = len(prompt) + max_new_tokens
        if len(prompt) == 0:
            raise InvalidRequest("the prompt is empty", "prompt")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._vocab_size:
            raise InvalidRequest("the prompt holds a token id outside the vocabulary", "prompt")
        if total > self._book.genesis.max_model_len:
            raise InvalidRequest(
                f"prompt ({len(prompt)}) and max_tokens ({max_new_tokens}) exceed the context of "
                f"{self._book.genesis.max_model_len} tokens",
                "max_tokens",
            )

    def admit_waiting(self) -> None:
        """In order of arrival; who lacks room in its own share waits alone, who lacks it in the pool holds up all."""
        held_up: set[str] = set()
        for entry in list(self._book.waiting):
            if len(self._book.running) >= self._book.genesis.max_requests:
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
        probe = self._book.ledger.probe(entry.scope, tokens, entry.submission.lookup, self._book.tail_policy)
        blocks = -(-(len(tokens) // 4) // self._book.block_size)
        try:
            windows = self._book.ledger.prompt_window_blocks(len(tokens) // 4, probe.match.runtime)
            needs = {namespace: blocks - len(probe.blocks)}
            victims = self._book.evictor.choose(needs, frozenset((*probe.path, *probe.tail)), windows)
        except NoRoom as error:
            if any(error.namespace in (None, other.scope.namespace) for other in self._book.running):
                raise
            # Nothing runs and the matched path itself is in the way (its last edge is longer than the match). Every
            # block in question is free or evictable then, and ``enter`` checked that the request can be held.
            self._book.evict(self._book.evictor.choose({namespace: blocks}))
            self._admit(entry)
            return
        self._book.waiting.remove(entry)
        self._transaction += 1
        receipt: AdmitReceipt = self._book.apply(
            Admit(
                self._transaction,
                entry.scope,
                tokens,
                entry.submission.lookup,
                victims.nodes,
                victims.trim,
                self._book.tail_policy,
            ),
            AdmitReceipt,
        )
        self._book.evictor.evicted(victims)
        self._book.shares.take(namespace, len(receipt.new_blocks.blocks()))
        self._start(entry, receipt)

    def _start(self, entry: Entry, receipt: AdmitReceipt) -> None:
        entry.handle = receipt.request
        entry.valid_rows = receipt.match.runtime
        entry.published_blocks = receipt.match.runtime // self._book.block_size
        entry.terminal = receipt.path[-1] if receipt.path else None
        self._book.running.append(entry)
        namespace, asked = entry.scope.namespace, entry.submission.retention
        self._book.evictor.admitted(
            namespace,
            receipt.match.prompt,
            entry.terminal,
            self._book.table(entry)[: entry.published_blocks],
            asked,
            self._clock(),
        )
        self._book.evictor.hit_tail(receipt.match.tail)
        given = int(self._book.ledger.num_blocks[receipt.request.slot])
        growth = max(0, entry.num_tokens // self._book.block_size - given)
        entry.keeps = not asked.no_store and self._book.evictor.worth_keeping(
            namespace, entry.published_blocks, growth, asked, given - entry.published_blocks
        )
        if entry.receipt is None:
            self.admitted_requests += 1
            self.cached_tokens += receipt.match.runtime
            entry.receipt = first_receipt(entry.submission, receipt.match, self._book.block_size)
            entry.put(Admitted(entry.receipt))
