"""One request inside a scheduler: what was asked, and how far it has come.

``Submission`` is the frozen question; ``Entry`` is the scheduler's own record of it. The ledger owns blocks and rows;
``Entry`` repeats only the two counts the scheduler plans with.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from copyhold.kvcore.commands import NodeHandle, RequestHandle, Scope
from copyhold.kvcore.receipts import PrefixMatch
from copyhold.models.sampling import GREEDY, SamplingParams

from .messages import Failed, Finished, ReuseReceipt, StreamItem
from .retention import DEFAULT_RETENTION, Retention


class Submission(msgspec.Struct, frozen=True):
    """A verified request. ``tokens``: int32 little-endian; ``arrived_at_s``: the replica's monotonic clock."""

    request_id: str
    key_id: str
    receipt_id: str
    scope: Scope
    model: str
    tokens: bytes
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    lookup: bool
    publish: bool
    arrived_at_s: float
    created_at: float
    sampling: SamplingParams = GREEDY
    retention: Retention = DEFAULT_RETENTION
    deterministic: bool = False


class Entry:
    """The scheduler's record of one submission; changed by its scheduler only.

    ``terminal``: the last edge of the indexed path it leases. ``keeps``: what it computes
    is published. ``wanted_tokens``: after how many tokens its client said that it has what it wanted.
    """

    __slots__ = (
        "_ended",
        "cancelled",
        "emitted",
        "generated",
        "handle",
        "keeps",
        "prompt",
        "published_blocks",
        "put",
        "receipt",
        "submission",
        "terminal",
        "valid_rows",
        "wanted_tokens",
    )

    def __init__(self, submission: Submission, put: Callable[[StreamItem], None]) -> None:
        self.submission = submission
        self.put = put
        self.prompt = np.frombuffer(submission.tokens, dtype="<i4")
        self.generated: list[int] = []
        self.handle: RequestHandle | None = None
        self.receipt: ReuseReceipt | None = None
        self.keeps = True
        self.terminal: NodeHandle | None = None
        self.valid_rows = 0
        self.published_blocks = 0
        self.emitted = 0
        self.cancelled = False
        self.wanted_tokens: int | None = None
        self._ended = False

    @property
    def scope(self) -> Scope:
        return self.submission.scope

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.prompt) + len(self.generated)

    def known_tokens(self) -> bytes:
        """Prompt and generated tokens as int32 bytes: the prompt of a re-admission after preemption."""
        if not self.generated:
            return self.submission.tokens
        return self.submission.tokens + np.asarray(self.generated, dtype="<i4").tobytes()

    def end(self, item: Finished | Failed) -> None:
        """Send the stream's last item; a second call changes nothing."""
        if not self._ended:
            self._ended = True
            self.put(item)


def first_receipt(submission: Submission, match: PrefixMatch, block_size: int) -> ReuseReceipt:
    """The tenant's receipt as admission knows it."""
    return ReuseReceipt(
        receipt_id=submission.receipt_id,
        request_id=submission.request_id,
        namespace=submission.scope.namespace,
        model=submission.model,
        created_at=submission.created_at,
        prompt_tokens=match.prompt,
        cached_tokens=match.runtime,
        semantic_tokens=match.semantic,
        indexed_tokens=match.indexed,
        cap_tokens=match.cap,
        junction_tokens=match.junction,
        block_size=block_size,
        limit=match.limit,
        reason=match.reason,
        deterministic=submission.deterministic,
    )
