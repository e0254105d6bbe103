"""OpenAI's response shapes, with Copyhold's receipt beside them.

Owns how answers are written: ``chat.completion``, ``chat.completion.chunk`` and ``text_completion``, usage
with cached tokens, and the extra field ``copyhold``. Invariant: the joined deltas of a stream are the whole
answer's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from copyhold.actors.messages import ReuseReceipt

from .http_stream import SSE_DONE, sse_event

RECEIPT_HEADER = "X-Copyhold-Receipt"
_encode = msgspec.json.Encoder().encode


class ReplyHead(msgspec.Struct, frozen=True):
    """What every chunk of one answer repeats; ``listed``: the caller sent a list of prompts."""

    reply_id: str
    created: int
    model: str
    listed: bool
    include_usage: bool
    return_token_ids: bool = False


class FinishedChoice(msgspec.Struct, frozen=True):
    """One ended answer; ``token_ids`` are written only where the caller asked for them, in the choice itself."""

    text: str
    finish_reason: str
    token_ids: Sequence[int] = ()


class ReplyForm(Protocol):
    """Where chat and plain completions differ."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]: ...

    def delta(self, index: int, text: str, first: bool) -> dict[str, Any]: ...

    def last(self, index: int, finish_reason: str) -> dict[str, Any]: ...


class ChatForm:
    """``/v1/chat/completions``."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}

    def delta(self, index: int, text: str, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}


class CompletionForm:
    """``/v1/completions``."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def delta(self, index: int, text: str, first: bool) -> dict[str, Any]:
        return self.choice(index, text, None)

    def last(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self.choice(index, "", finish_reason)


def usage(receipts: Sequence[ReuseReceipt]) -> dict[str, Any]:
    """Token counts summed over an answer's choices."""
    prompt = sum(receipt.prompt_tokens for receipt in receipts)
    completion = sum(receipt.completion_tokens for receipt in receipts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(receipt.cached_tokens for receipt in receipts)},
    }


def receipt_headers(receipts: Sequence[ReuseReceipt]) -> dict[str, str]:
    return {RECEIPT_HEADER: ",".join(receipt.receipt_id for receipt in receipts)}


class Reply:
    """Renders one answer, whole or as events."""

    def __init__(self, form: ReplyForm, head: ReplyHead) -> None:
        self._form = form
        self._head = head

    def whole(self, choices: Sequence[FinishedChoice], receipts: Sequence[ReuseReceipt]) -> bytes:
        written = [
            {**self._form.choice(index, choice.text, choice.finish_reason), **self._ids(choice)}
            for index, choice in enumerate(choices)
        ]
        body = self._envelope(self._form.whole_object, written)
        return _encode({**body, "usage": usage(receipts), "copyhold": self._extra(receipts)})

    def delta(self, index: int, text: str, first: bool) -> bytes:
        return sse_event(_encode(self._chunk([self._form.delta(index, text, first)])))

    def last(self, index: int, choice: FinishedChoice, receipts: Sequence[ReuseReceipt]) -> bytes:
        chunk = self._chunk([{**self._form.last(index, choice.finish_reason), **self._ids(choice)}])
        return sse_event(_encode({**chunk, "copyhold": self._extra(receipts)}))

    def end(self, receipts: Sequence[ReuseReceipt]) -> bytes:
        """What follows the last choice: usage if it was asked for, then the end mark."""
        if not self._head.include_usage:
            return SSE_DONE
        chunk = {**self._chunk([]), "usage": usage(receipts), "copyhold": self._extra(receipts)}
        return sse_event(_encode(chunk)) + SSE_DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self._form.chunk_object, choices)
        if self._head.include_usage:
            chunk["usage"] = None
        return chunk

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.reply_id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": None,
            "choices": choices,
        }

    def _ids(self, choice: FinishedChoice) -> dict[str, Any]:
        return {"token_ids": list(choice.token_ids)} if self._head.return_token_ids else {}

    def _extra(self, receipts: Sequence[ReuseReceipt]) -> dict[str, Any]:
        ids = [receipt.receipt_id for receipt in receipts]
        return {"receipt_ids": ids} if self._head.listed else {"receipt_id": ids[0]}
