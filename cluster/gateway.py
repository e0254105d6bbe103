"""The gateway actor: the tenant port and the admin socket, in one process of their own.

Owns the two HTTP servers and the register of open streams that a revocation closes. It holds live credentials and grants
while they pass through, mints none (docs/isolation.md). The admin application listens on a 0600 unix socket only.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from copyhold.namespace.sessions import SessionStore
from copyhold.namespace.store_target import StoreTarget

from .http_admission import Admission
from .http_stream import OpenStreams
from .ray_backend import RayAdminBackend, RayTenantBackend


class GatewaySpec(msgspec.Struct, frozen=True):
    """Where the gateway listens and what it fronts."""

    host: str
    admin_socket: str
    model_path: str
    model_name: str
    max_model_len: int
    vocab_size: int
    max_tokens_default: int
    revocation_deadline_s: float
    sessions_store: StoreTarget


class Gateway:
    """Created as a Ray actor named ``gateway``."""

    def __init__(self, spec: GatewaySpec, authority: Any, coordinator: Any) -> None:
        self._spec = spec
        self._authority = authority
        self._coordinator = coordinator
        self._open_streams = OpenStreams()
        self._admission = Admission()
        self._port = 0
        self._servers: list[uvicorn.Server] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, port: int) -> int:
        """Listen on ``port`` (0: any); returns the port. One that listens already is left alone.

        Raises: ``OSError`` when the port is taken.
        """
        if self._servers:
            return self._port
        # Tokenizers and templates are for this process; whoever only creates the actor does without them.
        from copyhold.models.tokenizer import ChatTokenizer

        from .admin_app import create_admin_app
        from .http_app import create_tenant_app
        from .http_schema import GatewaySettings, ServedModelInfo

        spec = self._spec
        tokenizer = ChatTokenizer.load(Path(spec.model_path))
        backend = RayTenantBackend(
            self._authority, self._coordinator, SessionStore.connect(spec.sessions_store)
        )
        model = ServedModelInfo(
            name=spec.model_name, max_model_len=spec.max_model_len, vocab_size=spec.vocab_size
        )
        settings = GatewaySettings(max_tokens_default=spec.max_tokens_default)
        if await self._authority.draining.remote():
            self._admission.close()
        tenant_app = create_tenant_app(
            backend, tokenizer, model, settings, self._open_streams, admission=self._admission
        )
        tenant_socket = socket.create_server((spec.host, port), reuse_port=False)
        self._port = int(tenant_socket.getsockname()[1])
        await self._serve(tenant_app, tenant_socket)
        admin_app = create_admin_app(
            RayAdminBackend(self._authority), self._open_streams, self._admission, spec.revocation_deadline_s
        )
        await self._serve(admin_app, self._bind_admin())
        return self._port

    async def close_streams(self, namespace: str, below_generation: int) -> int:
        """Close every stream of older generations; returns once none is open."""
        return await self._open_streams.close(namespace, below_generation)

    async def stop(self) -> None:
        """Stop listening and end what is open."""
        for server in self._servers:
            server.should_exit = True
            server.force_exit = True
        await asyncio.gather(*self._tasks, return_exceptions=True)
        Path(self._spec.admin_socket).unlink(missing_ok=True)

    async def _serve(self, app: Any, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="off",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        self._servers.append(server)
        self._tasks.append(asyncio.create_task(server.serve(sockets=[listener])))
        while not server.started:
            if self._tasks[-1].done():
                self._tasks[-1].result()
            await asyncio.sleep(0.005)

    def _bind_admin(self) -> socket.socket:
        Path(self._spec.admin_socket).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(self._spec.admin_socket)
        finally:
            os.umask(before)
        listener.listen(64)
        return listener
