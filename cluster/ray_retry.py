"""A generation that outlives its replica: what was sent becomes part of the prompt, and the rest is generated elsewhere.

Owns the tokens already released to one client. Exact by construction: sampling is counter-based (seed, position) and
greedy otherwise, so a successor continues where the lost replica stopped (docs/architecture.md, failure model; equal
tokens are promised where the arithmetic is: see there). Invariant: the client sees one ``Admitted`` and one last item,
every token once, and a retry never outlives its grant's generation: a revoked namespace is an answer, not a fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import numpy as np

from copyhold.actors.errors import ServiceUnavailable
from copyhold.actors.messages import (
    Admitted,
    Failed,
    Finished,
    GenerateRequest,
    ReuseReceipt,
    StreamItem,
    TokenChunk,
)

from .backend import Generation

RETRY_WITHIN_S = 45.0
"""How long a client waits for a successor; below a grant's life of 60 s."""

_RETRIABLE = frozenset(
    {"replica_stopped", "ranks_differ", "transport_closed", "stale_route", "service_unavailable"}
)
_PAUSE_S = 0.25

Start = Callable[[GenerateRequest], Awaitable[Generation]]
"""Routes a request anew and starts it; raises ``ServiceUnavailable`` while no replica serves."""


class RetryingGeneration:
    """``Generation`` over as many replica incarnations as it takes, one deadline per loss (a token ends it)."""

    def __init__(self, request: GenerateRequest, current: Generation, start: Start) -> None:
        self._request = request
        self._current = current
        self._start = start
        self._sent: list[int] = []
        self._first: ReuseReceipt | None = None
        self._sent_before_current = 0
        self._lost_at_s: float | None = None
        self._over = False
        self.retries = 0

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        while True:
            failure: Failed | None = None
            async for item in self._current:
                if isinstance(item, Failed) and item.kind in _RETRIABLE and not self._over:
                    failure = item
                    break
                shown = self._shown(item)
                if shown is not None:
                    yield shown
                if isinstance(item, Finished | Failed):
                    return
            if failure is None:
                failure = Failed("replica_stopped", "the replica's stream ended without a last item")
            if not await self._continued():
                yield failure
                return

    async def cancel(self) -> None:
        """Release the request's blocks wherever it runs; one that has ended is left alone."""
        self._over = True
        await self._current.cancel()

    async def finish(self, completion_tokens: int) -> None:
        """End the request as stopped after ``completion_tokens`` of its tokens, counted from its first replica on."""
        self._over = True
        await self._current.finish(completion_tokens - self._sent_before_current)

    async def amend(self, receipt: ReuseReceipt) -> None:
        """Have the replica keep this receipt instead of its own."""
        await self._current.amend(receipt)

    def _shown(self, item: StreamItem) -> StreamItem | None:
        """What the client sees of an item: its first receipt's lengths, whatever a successor reused."""
        if isinstance(item, TokenChunk):
            self._sent.extend(item.tokens)
            self._lost_at_s = None
            return item
        if isinstance(item, Admitted):
            if self._first is not None:
                return None
            self._first = item.receipt
            return item
        if isinstance(item, Finished) and self._first is not None and self.retries:
            return Finished(item.reason, self._whole_receipt(item.receipt))
        return item

    def _whole_receipt(self, last: ReuseReceipt) -> ReuseReceipt:
        assert self._first is not None
        return msgspec.structs.replace(
            self._first,
            completion_tokens=self._sent_before_current + last.completion_tokens,
            finish_reason=last.finish_reason,
        )

    async def _continued(self) -> bool:
        """Start the rest on another incarnation; ``False`` when none serves in time."""
        left = self._request.max_new_tokens - len(self._sent)
        if left <= 0:
            return False
        request = msgspec.structs.replace(
            self._request,
            tokens=self._request.tokens + np.asarray(self._sent, dtype="<i4").tobytes(),
            max_new_tokens=left,
        )
        if self._lost_at_s is None:
            self._lost_at_s = time.monotonic()
        while not self._over and time.monotonic() < self._lost_at_s + RETRY_WITHIN_S:
            await asyncio.sleep(_PAUSE_S)
            try:
                self._current = await self._start(request)
            except ServiceUnavailable:
                continue
            self.retries += 1
            self._sent_before_current = len(self._sent)
            return True
        return False
