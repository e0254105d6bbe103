"""How many requests one replica incarnation saw, and how they ended.

Owns plain counts fed by the stream items as they leave; no name, id or token is kept. Invariant: each request is counted once as
finished or failed, and as admitted only if its blocks were reserved. The replica's event loop owns it.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from .messages import Admitted, Failed, Finished, StreamItem, TokenChunk


class RequestReport(msgspec.Struct, frozen=True):
    """Totals since the incarnation began; ``finished`` by reason, ``failed`` by kind.

    ``unproved_routes``: requests of which the ledger proved less than their route expected.
    """

    admitted: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished: dict[str, int]
    failed: dict[str, int]
    unproved_routes: int = 0


class RequestCounts:
    """Counts stream items."""

    def __init__(self) -> None:
        self._admitted = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._unproved_routes = 0

    def count(self, item: StreamItem) -> None:
        """Count one item of a stream."""
        if isinstance(item, Admitted):
            self._admitted += 1
            self._prompt_tokens += item.receipt.prompt_tokens
            self._cached_tokens += item.receipt.cached_tokens
        elif isinstance(item, TokenChunk):
            self._generated_tokens += len(item.tokens)
        elif isinstance(item, Finished):
            self._finished[item.reason] += 1
        else:
            self._failed[item.kind] += 1

    def count_route(self, expected_hit_tokens: int, hit_tokens: int) -> None:
        """What the ledger proved, token by token, of a routed request."""
        self._unproved_routes += hit_tokens < expected_hit_tokens

    def count_abandoned(self) -> None:
        """Count a stream whose reader went away before its last item."""
        self.count(Failed("cancelled", ""))

    def report(self) -> RequestReport:
        """The totals now."""
        return RequestReport(
            self._admitted,
            self._prompt_tokens,
            self._cached_tokens,
            self._generated_tokens,
            dict(self._finished),
            dict(self._failed),
            self._unproved_routes,
        )
