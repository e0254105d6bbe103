"""An answer as it arrives: an iterator of text that knows its receipt, usage and times.

Invariant: it ends normally only after the server's end mark; a stream that breaks off, or that the server
ends with an error, raises. Closing it early closes the connection, upon which the server cancels the
request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any

import httpx
import msgspec

from .sdk_errors import ConnectionFailed, error_of_fields
from .sdk_transport import connection_errors
from .sdk_values import ChatReply, Usage

_PREFIX = "data: "
_DONE = "[DONE]"


class TextStream:
    """Iterate for text; after the end ``usage``, ``finish_reason`` and ``time_to_first_token_s`` are set."""

    def __init__(
        self,
        response: httpx.Response,
        text_of: Callable[[dict[str, Any]], str],
        sent_at: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._response = response
        self._text_of = text_of
        self._sent_at = sent_at
        self._clock = clock
        self._texts = self._read()
        self.receipt_id: str = response.headers.get("x-copyhold-receipt", "")
        self.usage: Usage | None = None
        self.token_ids: tuple[int, ...] = ()
        self.finish_reason: str | None = None
        self.time_to_first_token_s: float | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._texts)

    def reply(self) -> ChatReply:
        """Read to the end and return what is left of the text with the whole answer's figures."""
        text = "".join(self)
        if self.usage is None or self.finish_reason is None or self.time_to_first_token_s is None:
            raise ConnectionFailed(
                "the stream ended without usage or finish reason", code="stream_incomplete"
            )
        usage = self.usage
        return ChatReply(
            text,
            self.receipt_id,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            self.finish_reason,
            self.time_to_first_token_s,
        )

    def close(self) -> None:
        """Stop reading; the server cancels the request if it still runs. Calling it again changes nothing."""
        self._texts.close()
        self._response.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> Generator[str, None, None]:
        try:
            with connection_errors():
                for line in self._response.iter_lines():
                    if not line.startswith(_PREFIX):
                        continue
                    if line == _PREFIX + _DONE:
                        return
                    yield from self._take(msgspec.json.decode(line[len(_PREFIX) :]))
        finally:
            self._response.close()
        raise ConnectionFailed("the stream broke off before its end", code="stream_incomplete")

    def _take(self, chunk: dict[str, Any]) -> Iterator[str]:
        if chunk.get("error"):
            raise error_of_fields(None, chunk["error"])
        if chunk.get("usage"):
            self.usage = Usage.of(chunk["usage"])
        for choice in chunk["choices"]:
            if self.time_to_first_token_s is None:
                self.time_to_first_token_s = self._clock() - self._sent_at
            if choice.get("finish_reason"):
                self.finish_reason = choice["finish_reason"]
                self.token_ids = tuple(choice.get("token_ids", ()))
            text = self._text_of(choice)
            if text:
                yield text
