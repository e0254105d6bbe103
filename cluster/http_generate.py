"""Generations of one HTTP request: started together, read as text, cancelled together.

Owns the text of an answer (stop tokens and stop strings taken off, characters never split) and the duty to
free blocks. Invariants: whatever way a request ends, each generation it started has either delivered its last
item or been cancelled; text, token count and finish reason are functions of the token ids alone, however many
steps brought them and however far the engine ran past a stop string.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from copyhold.actors.errors import ActorError
from copyhold.actors.messages import Admitted, Failed, Finished, ReuseReceipt, StreamItem, TokenChunk
from copyhold.actors.retention import DEFAULT_RETENTION, Retention
from copyhold.models.sampling import SamplingParams
from copyhold.models.tokenizer import ChatTokenizer, Detokenizer
from copyhold.namespace.authority import Authorization

from .backend import Generation, TenantBackend
from .http_errors import GenerationFailed
from .http_sampling import StopChoice
from .http_stop import StopText

_log = logging.getLogger(__name__)
T = TypeVar("T")


class PromptPlan(msgspec.Struct, frozen=True):
    """One checked prompt: what the engine is asked for, and which strings end its text."""

    tokens: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    stop: StopChoice
    retention: Retention = DEFAULT_RETENTION


class Answer:
    """The text of one generation, as the engine's steps release it."""

    def __init__(
        self,
        generation: Generation,
        detokenizer: Detokenizer,
        stop_ids: frozenset[int],
        stop_text: StopText,
    ) -> None:
        self._generation = generation
        self._items = aiter(generation)
        self._detokenizer = detokenizer
        self._stop_ids = stop_ids
        self._stop_text = stop_text
        self._receipt: ReuseReceipt | None = None
        self._ended = False
        self._ahead: StreamItem | None = None
        self.finish_reason = ""
        self.token_ids: list[int] = []

    @property
    def receipt(self) -> ReuseReceipt:
        """The latest receipt; asking before admission is a bug."""
        assert self._receipt is not None, "receipt asked for before admission"
        return self._receipt

    async def first_step(self) -> None:
        """Wait until the request has its receipt and the engine's first result is here.

        A failure up to that point can still be answered with an HTTP status. Raises: GenerationFailed.
        """
        item = await self._next()
        if isinstance(item, Admitted):
            self._receipt = item.receipt
            item = await self._next()
        if self._receipt is None:
            raise GenerationFailed("internal_error", "the engine sent tokens before the admission")
        self._ahead = item

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> str:
        """New text of the next engine step, perhaps none; the tail last. Raises: GenerationFailed."""
        if self.finish_reason:
            raise StopAsyncIteration
        if self._stop_text.matched:
            await self._generation.finish(len(self.token_ids))
            item = await self._next()
            while not isinstance(item, Finished):
                item = await self._next()
            await self._end(item)
            return ""
        item, self._ahead = self._ahead or await self._next(), None
        if isinstance(item, TokenChunk):
            return self._take(item.tokens)
        if not isinstance(item, Finished):
            raise GenerationFailed("internal_error", "the engine admitted one request twice")
        text = self._stop_text.push(self._detokenizer.finish()) + self._stop_text.finish()
        await self._end(item)
        return text

    async def text(self) -> str:
        """The whole text, from the first step to the end. Raises: GenerationFailed."""
        return "".join([delta async for delta in self])

    async def cancel(self) -> None:
        """Give the generation's blocks back unless it has ended."""
        if self._ended:
            return
        self._ended = True
        await _cancel(self._generation)

    def _take(self, tokens: Sequence[int]) -> str:
        """Token by token, so that the one that completes a stop string is the last that counts."""
        text = ""
        for token in tokens:
            if token in self._stop_ids:
                continue
            self.token_ids.append(token)
            text += self._stop_text.push(self._detokenizer.push((token,)))
            if self._stop_text.matched:
                break
        return text

    async def _end(self, item: Finished) -> None:
        """Take the last item; the receipt of a text that a stop string ended says so, also in the store.

        The engine may have come to an end of its own while the text was read, and counted further.
        """
        receipt = item.receipt
        if self._stop_text.matched:
            count = len(self.token_ids)
            if (receipt.finish_reason, receipt.completion_tokens) != ("stop", count):
                receipt = msgspec.structs.replace(receipt, finish_reason="stop", completion_tokens=count)
                await _amend(self._generation, receipt)
        self._receipt = receipt
        self.finish_reason = "stop" if self._stop_text.matched else item.reason

    async def _next(self) -> StreamItem:
        try:
            item = await anext(self._items)
        except StopAsyncIteration:
            raise GenerationFailed("internal_error", "the engine's items ended without a last one") from None
        if isinstance(item, Finished | Failed):
            self._ended = True
        if isinstance(item, Failed):
            raise GenerationFailed(item.kind, item.message)
        return item


class LateStarts:
    """Generations whose client went while the engine was being asked; each is cancelled when it arrives."""

    def __init__(self) -> None:
        # The event loop keeps weak references to tasks only.
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, starting: asyncio.Future[Generation]) -> None:
        task = asyncio.ensure_future(_cancel_on_arrival(starting))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Answers:
    """All generations of one HTTP request."""

    def __init__(
        self,
        backend: TenantBackend,
        tokenizer: ChatTokenizer,
        authorization: Authorization,
        late: LateStarts,
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._authorization = authorization
        self._late = late
        self._answers: list[Answer] = []

    def __iter__(self) -> Iterator[Answer]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def receipts(self) -> list[ReuseReceipt]:
        return [answer.receipt for answer in self._answers]

    async def start(self, plans: Sequence[PromptPlan], request_id: str, stop_ids: tuple[int, ...]) -> None:
        """Start every prompt and wait for each one's first step.

        Raises: what the backend raised; what was started by then is freed by ``cancel``.
        """
        stops = frozenset(stop_ids)
        for index, plan in enumerate(plans):
            name = request_id if len(plans) == 1 else f"{request_id}-{index}"
            generation = await self._start_one(plan, name, stop_ids)
            stop_text = StopText(plan.stop.strings, plan.stop.included)
            self._answers.append(Answer(generation, self._tokenizer.detokenizer(), stops, stop_text))
        await gather_or_cancel([answer.first_step() for answer in self._answers])

    async def cancel(self) -> None:
        """Cancel what has not ended; calling it again changes nothing."""
        for answer in self._answers:
            await answer.cancel()

    async def _start_one(self, plan: PromptPlan, request_id: str, stop_ids: tuple[int, ...]) -> Generation:
        tokens = np.asarray(plan.tokens, dtype="<i4").tobytes()
        call = self._backend.generate(
            self._authorization,
            request_id,
            tokens,
            plan.max_new_tokens,
            stop_ids,
            plan.sampling,
            plan.retention,
        )
        starting = asyncio.ensure_future(call)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The client went while the engine was asked: whatever it still starts is cancelled on arrival.
            self._late.add(starting)
            raise


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all to the end; at the first error cancel the rest, wait for them, and raise it."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _cancel_on_arrival(starting: asyncio.Future[Generation]) -> None:
    try:
        generation = await starting
    except Exception as error:  # noqa: BLE001 - the request is over; nothing was started, so nothing is owed
        _log.info("a request whose client had gone was not started: %s", type(error).__name__)
        return
    await _cancel(generation)


async def _amend(generation: Generation, receipt: ReuseReceipt) -> None:
    try:
        await generation.amend(receipt)
    except ActorError as error:
        # The answer is whole; what is lost is its record.
        _log.warning("a receipt could not be amended: %s", error.kind)


async def _cancel(generation: Generation) -> None:
    try:
        await generation.cancel()
    except ActorError as error:
        # The replica is gone, and the blocks with it; the client has its answer or has left.
        _log.warning("a generation could not be cancelled: %s", error.kind)
