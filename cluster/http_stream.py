"""Answers in progress, and the cut that ends them.

Owns the registry of open answers per (namespace, generation) on one gateway, and the Server-Sent-Events
writer. Invariant: after ``OpenStreams.close`` has marked an answer nothing of its text is written any more,
not even what a blocked write still held; once ``close`` has returned the answer is over and its client has
been told ``namespace_revoked``. One event loop owns all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any

from starlette.types import Receive, Send

from .http_errors import StreamCut

SSE_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


class OpenStream:
    """One HTTP answer under a (namespace, generation); leaving the ``with`` block closes it."""

    def __init__(self, registry: OpenStreams, namespace: str, generation: int) -> None:
        self.namespace = namespace
        self.generation = generation
        self._registry = registry
        self._work: asyncio.Task[None] | None = None
        self._cut = False
        self._closed = asyncio.Event()

    @property
    def is_cut(self) -> bool:
        return self._cut

    def cut(self) -> None:
        """End the answer at its next await. A write that was waiting for the socket is dropped, not sent."""
        self._cut = True
        if self._work is not None:
            self._work.cancel()

    async def run(self, work: Coroutine[Any, Any, None], receive: Receive) -> None:
        """Run ``work`` until it ends, the answer is cut or the client goes.

        Raises: StreamCut, ClientGone (``work`` was cancelled and has ended), or what ``work`` raised.
        """
        task = asyncio.ensure_future(work)
        self._work = task
        if self._cut:
            task.cancel()
        gone = asyncio.ensure_future(_until_disconnected(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.wait({task, gone})
        if task.cancelled():
            raise StreamCut if self._cut else ClientGone
        task.result()

    async def closed(self) -> None:
        await self._closed.wait()

    def __enter__(self) -> OpenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._registry.forget(self)
        self._closed.set()


class OpenStreams:
    """The gateway's register of answers in progress, and the floors below which none may start."""

    def __init__(self) -> None:
        self._streams: dict[str, set[OpenStream]] = {}
        self._floors: dict[str, int] = {}

    def register(self, namespace: str, generation: int) -> OpenStream:
        """Open an answer. Raises: StreamCut if that generation was closed already, nothing registered."""
        if generation < self._floors.get(namespace, 0):
            raise StreamCut
        stream = OpenStream(self, namespace, generation)
        self._streams.setdefault(namespace, set()).add(stream)
        return stream

    def forget(self, stream: OpenStream) -> None:
        """Take an ended answer off the register; calling it again changes nothing."""
        streams = self._streams.get(stream.namespace)
        if streams is not None:
            streams.discard(stream)
            if not streams:
                del self._streams[stream.namespace]

    def count(self, namespace: str) -> int:
        return len(self._streams.get(namespace, ()))

    def total(self) -> int:
        """Open answers of every namespace together."""
        return sum(len(streams) for streams in self._streams.values())

    async def close(self, namespace: str, below_generation: int) -> int:
        """Cut every answer of ``namespace`` below a generation; return how many, after all have ended.

        Answers of those generations are refused from here on, so that one authorized before the cut and
        started after it cannot slip through.
        """
        self._floors[namespace] = max(below_generation, self._floors.get(namespace, 0))
        doomed = [s for s in self._streams.get(namespace, ()) if s.generation < below_generation]
        for stream in doomed:
            stream.cut()
        for stream in doomed:
            await stream.closed()
        return len(doomed)


class AnswerWriter:
    """Writes one answer; every write looks at the cut first."""

    def __init__(self, send: Send, stream: OpenStream) -> None:
        self._send = send
        self._stream = stream
        self._started = False

    @property
    def started(self) -> bool:
        """Whether the status line has left, so that a failure can no longer choose it."""
        return self._started

    async def start(self, headers: Mapping[str, str]) -> None:
        """Send the response head. Raises: StreamCut, nothing sent."""
        self._check()
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def write(self, body: bytes) -> None:
        """Send a part in one write. Raises: StreamCut, nothing sent."""
        self._check()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        """Send the last part and complete the response. Raises: StreamCut, nothing sent."""
        self._check()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def end_with_error_event(self, error: bytes) -> None:
        """Complete a started event stream with one error event, which holds nothing of the answer."""
        await self._send({"type": "http.response.body", "body": sse_event(error), "more_body": False})

    def _check(self) -> None:
        if self._stream.is_cut:
            raise StreamCut


def sse_event(json_bytes: bytes) -> bytes:
    """One Server-Sent Event."""
    return b"data: " + json_bytes + b"\n\n"


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
