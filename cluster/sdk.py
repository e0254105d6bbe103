"""The client: chat, stream, complete, and ask why a prefix was or was not reused.

Owns the mapping between HTTP bodies and small frozen values. It imports httpx and msgspec only, so that an
application does not load the server's libraries. Invariant: every failure is a ``CopyholdError``.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

import msgspec

from .sdk_errors import (
    AuthenticationError,
    ConnectionFailed,
    CopyholdError,
    InvalidRequestError,
    NamespaceRevoked,
    NotFoundError,
    RateLimited,
    ServiceUnavailable,
)
from .sdk_stream import TextStream
from .sdk_transport import Transport
from .sdk_values import ChatReply, Explanation, Lengths, Receipt, Usage

__all__ = [
    "AuthenticationError",
    "ChatReply",
    "Client",
    "ConnectionFailed",
    "CopyholdError",
    "Explanation",
    "InvalidRequestError",
    "Lengths",
    "NamespaceRevoked",
    "NotFoundError",
    "RateLimited",
    "Receipt",
    "Sampling",
    "ServiceUnavailable",
    "TextStream",
    "Usage",
]


class Sampling(TypedDict, total=False):
    """How tokens are chosen, which strings end the text, how the prefix is kept; None is as good as absent.

    Absent ``temperature`` is 0: the likeliest token, the same answer each time. With a temperature an absent ``seed`` is
    any; the same seed gives the same answer. ``stop`` is one string or up to four.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: str | Sequence[str] | None
    include_stop_str_in_output: bool
    cache_priority: int | None
    cache_ttl_s: float | None
    cache_no_store: bool


Message = Mapping[str, Any]
Prompt = str | Sequence[int]


class Client:
    """A connection to one Copyhold server with one key; use it as a context manager or ``close`` it.

    ``namespace`` narrows the key to one of its namespaces; ``model`` defaults to the first one served.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str,
        namespace: str | None = None,
        timeout_s: float = 600.0,
        model: str | None = None,
    ) -> None:
        self._transport = Transport(base_url, api_key, namespace, timeout_s)
        self._model = model

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        **sampling: Unpack[Sampling],
    ) -> ChatReply:
        """Answer a conversation. Raises: CopyholdError."""
        body = self._body(max_tokens, stop_token_ids, ignore_eos, sampling, messages=list(messages))
        return self._whole(_CHAT, body, _message_text)

    def stream(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        return_token_ids: bool = False,
        **sampling: Unpack[Sampling],
    ) -> TextStream:
        """Answer a conversation as it is made; ``return_token_ids`` fills the stream's ``token_ids`` at its end.

        Raises: CopyholdError, also while iterating.
        """
        body = self._body(max_tokens, stop_token_ids, ignore_eos, sampling, messages=list(messages))
        body["return_token_ids"] = return_token_ids
        return self._stream(_CHAT, body, _delta_text)

    def complete(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        **sampling: Unpack[Sampling],
    ) -> ChatReply:
        """Continue a text, or token ids. Raises: CopyholdError."""
        body = self._body(max_tokens, stop_token_ids, ignore_eos, sampling, prompt=_plain(prompt))
        return self._whole(_COMPLETION, body, _choice_text)

    def stream_complete(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        return_token_ids: bool = False,
        **sampling: Unpack[Sampling],
    ) -> TextStream:
        """Continue a text, or token ids, as it is made. Raises: CopyholdError, also while iterating."""
        body = self._body(max_tokens, stop_token_ids, ignore_eos, sampling, prompt=_plain(prompt))
        body["return_token_ids"] = return_token_ids
        return self._stream(_COMPLETION, body, _choice_text)

    def explain(self, receipt_id: str) -> Explanation:
        """Why that request's prefix hit had its length. Raises: NotFoundError."""
        return msgspec.json.decode(self._transport.get(_path("explain", receipt_id)), type=Explanation)

    def receipts(self, receipt_id: str) -> Receipt:
        """The record of one request. Raises: NotFoundError."""
        return msgspec.json.decode(self._transport.get(_path("receipts", receipt_id)), type=Receipt)

    def models(self) -> list[str]:
        """The names of the served models."""
        body = msgspec.json.decode(self._transport.get("/v1/models"))
        return [card["id"] for card in body["data"]]

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _body(
        self,
        max_tokens: int | None,
        stop_token_ids: Sequence[int],
        ignore_eos: bool,
        sampling: Sampling,
        **prompt: Any,
    ) -> dict[str, Any]:
        chosen = _sampling_fields(sampling)
        if self._model is None:
            self._model = self.models()[0]
        body = {"model": self._model, **prompt, **chosen}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if stop_token_ids:
            body["stop_token_ids"] = list(stop_token_ids)
        if ignore_eos:
            body["ignore_eos"] = True
        return body

    def _whole(self, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str]) -> ChatReply:
        sent_at = time.perf_counter()
        response = self._transport.post(path, body)
        elapsed_s = time.perf_counter() - sent_at
        answer = msgspec.json.decode(response.content)
        usage, choice = Usage.of(answer["usage"]), answer["choices"][0]
        return ChatReply(
            text_of(choice),
            answer["copyhold"]["receipt_id"],
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            choice["finish_reason"],
            elapsed_s,
        )

    def _stream(
        self, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str]
    ) -> TextStream:
        sent_at = time.perf_counter()
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return TextStream(self._transport.open_stream(path, streaming), text_of, sent_at)


_CHAT = "/v1/chat/completions"
_COMPLETION = "/v1/completions"


def _path(kind: str, receipt_id: str) -> str:
    return f"/v1/{kind}/{quote(receipt_id, safe='')}"


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The body's fields. Raises: TypeError for a name that is no argument, as any Python function does."""
    unknown = sorted(sampling.keys() - Sampling.__annotations__.keys())
    if unknown:
        raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
    fields: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    if not isinstance(fields.get("stop", ""), str):
        fields["stop"] = list(fields["stop"])
    return fields


def _plain(prompt: Prompt) -> str | list[int]:
    return prompt if isinstance(prompt, str) else [operator.index(token) for token in prompt]


def _message_text(choice: dict[str, Any]) -> str:
    return choice["message"]["content"]


def _delta_text(choice: dict[str, Any]) -> str:
    return choice["delta"].get("content") or ""


def _choice_text(choice: dict[str, Any]) -> str:
    return choice["text"]
