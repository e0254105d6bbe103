"""What the client SDK returns: frozen values, lengths in tokens, times in seconds unless the name says
otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer; ``cached_tokens`` of the prompt's were reused."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Usage:
        """Read OpenAI's ``usage`` object."""
        details = body.get("prompt_tokens_details") or {}
        return cls(body["prompt_tokens"], body["completion_tokens"], details.get("cached_tokens", 0))


class ChatReply(msgspec.Struct, frozen=True):
    """One whole answer. ``time_to_first_token_s`` is the client's; of a plain call it is the whole call."""

    text: str
    receipt_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    time_to_first_token_s: float


class Lengths(msgspec.Struct, frozen=True):
    """How far a prefix matched; ``runtime`` is what was reused, ``recompute`` what was left of the prompt.

    ``junction``: the longest indexed boundary that every cache group of the model could serve.
    """

    semantic: int
    indexed: int
    cap: int
    runtime: int
    junction: int = 0
    recompute: int = 0


class Explanation(msgspec.Struct, frozen=True):
    """Why a prefix hit had its length: the limit, the reason, and both in one sentence."""

    receipt_id: str
    prompt_tokens: int
    cached_tokens: int
    lengths: Lengths
    block_size: int
    limit: str
    reason: str
    sentence: str = msgspec.field(name="explanation")
    time_to_first_token_ms: float = 0.0


class Receipt(msgspec.Struct, frozen=True):
    """The server's record of one request, as its tenant may see it."""

    receipt_id: str
    request_id: str
    namespace: str
    model: str
    created: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    lengths: Lengths
    block_size: int
    limit: str
    reason: str
    time_to_first_token_ms: float
    finish_reason: str
