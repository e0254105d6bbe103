"""Drives an ASGI application in the test's own loop, with a client the test controls message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message


class DirectClient:
    """One POST. ``before_write`` runs inside every send, before the message counts as written."""

    def __init__(self, path: str, body: dict[str, Any], key: str = "key-a") -> None:
        self.path = path
        self.body = msgspec.json.encode(body)
        self.key = key
        self.written: list[Message] = []
        self.before_write: Callable[[Message], Awaitable[None]] | None = None
        self.gone = asyncio.Event()
        self._body_sent = False

    async def post(self, app: ASGIApp) -> None:
        scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": self.path, "raw_path": b"",
            "query_string": b"", "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80), "headers": [(b"authorization", f"Bearer {self.key}".encode())],
        }  # fmt: skip
        await app(scope, self._receive, self._send)

    @property
    def status(self) -> int | None:
        return self.written[0]["status"] if self.written else None

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.written)

    async def _receive(self) -> Message:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.before_write is not None:
            await self.before_write(message)
        self.written.append(message)
