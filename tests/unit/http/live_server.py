"""A real uvicorn server in a thread, on a free port or a unix socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

T = TypeVar("T")
_START_TIMEOUT_S = 20.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.ready.set()


class LiveServer:
    """Serves what ``app`` is set to while the ``with`` block is open; ``run`` runs on the server's loop."""

    def __init__(self, app: ASGIApp | None = None) -> None:
        self.app = app
        config = uvicorn.Config(
            self._dispatch,
            interface="asgi3",
            log_level="critical",
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 10.0) -> T:
        assert self._server.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._server.loop).result(timeout_s)

    def call(self, function: Any, *args: Any) -> Any:
        """Call a plain function on the server's loop."""

        async def run() -> Any:
            return function(*args)

        return self.run(run())

    def http(self, key: str | None = "key-a", **headers: str) -> httpx.Client:
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return httpx.Client(base_url=self.url, headers=headers, timeout=10.0, trust_env=False)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None, "no application was put in"
        await self.app(scope, receive, send)

    def __enter__(self) -> LiveServer:
        self._thread.start()
        assert self._server.ready.wait(_START_TIMEOUT_S), "the server did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(_START_TIMEOUT_S)
        self._socket.close()
        assert not self._thread.is_alive(), "the server did not stop"
