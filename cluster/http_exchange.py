"""One request's answer on its way out, whole or as events, and how it ends when it does not end well.

Invariant: exactly one of these leaves: a complete answer; an error with its own HTTP status, when nothing
was written yet; an error event that ends the stream without the end mark; nothing more, when the client has
gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable

import msgspec
from starlette.types import Receive, Scope, Send

from copyhold.actors.errors import ActorError
from copyhold.namespace.errors import NamespaceError

from .http_errors import ApiError, GenerationFailed, StreamCut, failure, to_api_error
from .http_generate import Answer, Answers, PromptPlan, gather_or_cancel
from .http_reply import FinishedChoice, Reply, receipt_headers
from .http_schema import Options
from .http_stream import AnswerWriter, ClientGone

_log = logging.getLogger(__name__)

# How long the last word of a failed answer may wait for a client that does not read.
_LAST_WRITE_TIMEOUT_S = 1.0
_JSON = "application/json"
_EVENTS = "text/event-stream; charset=utf-8"


class Plan(msgspec.Struct, frozen=True):
    """A request that has passed every check; ``listed``: the caller sent a list of prompts."""

    prompts: tuple[PromptPlan, ...]
    listed: bool
    options: Options


class Exchange:
    """Serves one plan through one writer."""

    def __init__(self, reply: Reply, plan: Plan, answers: Answers, writer: AnswerWriter) -> None:
        self._reply = reply
        self._plan = plan
        self._answers = answers
        self._writer = writer
        self._unfinished = len(plan.prompts)

    async def serve(self, request_id: str, stop_ids: tuple[int, ...]) -> None:
        """Start the generations and write their answer. Raises: what ended it early."""
        await self._answers.start(self._plan.prompts, request_id, stop_ids)
        headers = {"x-request-id": request_id, **receipt_headers(self._answers.receipts)}
        if self._plan.options.stream:
            await self._writer.start({**headers, "content-type": _EVENTS, "cache-control": "no-cache"})
            await gather_or_cancel([self._stream_one(i, answer) for i, answer in enumerate(self._answers)])
        else:
            texts = await gather_or_cancel([answer.text() for answer in self._answers])
            choices = [_finished(answer, text) for answer, text in zip(self._answers, texts, strict=True)]
            body = self._reply.whole(choices, self._answers.receipts)
            await self._writer.start({**headers, "content-type": _JSON, "content-length": str(len(body))})
            await self._writer.end(body)

    async def finish(self, serving: Awaitable[None], scope: Scope, receive: Receive, send: Send) -> None:
        """Await ``serve`` and turn what ended it early into the last thing the client reads."""
        try:
            await serving
        except ClientGone:
            return
        except (StreamCut, GenerationFailed, ActorError, NamespaceError) as error:
            refusal = to_api_error(error)
            _log.info("a request ended with %s", refusal.code)
            await self._refuse(refusal, scope, receive, send)
        except Exception:
            await self._refuse(failure("internal_error"), scope, receive, send)
            raise

    async def _stream_one(self, index: int, answer: Answer) -> None:
        """Write one choice: one write per engine step that brings text, then how it finished."""
        first = True
        async for text in answer:
            if text or first:
                await self._writer.write(self._reply.delta(index, text, first))
                first = False
        self._unfinished -= 1
        last = self._reply.last(index, _finished(answer, ""), self._answers.receipts)
        if self._unfinished:
            await self._writer.write(last)
        else:
            await self._writer.end(last + self._reply.end(self._answers.receipts))

    async def _refuse(self, refusal: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._writer.started:
            last_word = refusal.response()(scope, receive, send)
        elif self._plan.options.stream:
            last_word = self._writer.end_with_error_event(msgspec.json.encode(refusal.body()))
        else:
            # Half an answer without its promised length: the server closes the connection.
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(last_word, _LAST_WRITE_TIMEOUT_S)


def _finished(answer: Answer, text: str) -> FinishedChoice:
    return FinishedChoice(text, answer.finish_reason, answer.token_ids)
