"""Fixtures of the HTTP tests: a scripted backend behind a real server on a free port."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Support modules of this folder; pytest's importlib mode does not put it on the path.
sys.path.insert(0, str(Path(__file__).parent))

from byte_model import MODEL, byte_tokenizer
from live_server import LiveServer
from scripted_backend import ScriptedBackend

from copyhold.cluster.http_app import create_tenant_app
from copyhold.cluster.http_schema import GatewaySettings
from copyhold.cluster.http_stream import OpenStreams
from copyhold.models.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return byte_tokenizer()


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def open_streams() -> OpenStreams:
    return OpenStreams()


@pytest.fixture
def settings() -> GatewaySettings:
    return GatewaySettings(max_tokens_default=32, max_body_bytes=256 * 1024, auth_failure_burst=1000)


@pytest.fixture(scope="session")
def live_server() -> Iterator[LiveServer]:
    """One server for all tests; each puts its own application in."""
    with LiveServer() as live:
        yield live


@pytest.fixture
def server(
    live_server: LiveServer,
    backend: ScriptedBackend,
    tokenizer: ChatTokenizer,
    open_streams: OpenStreams,
    settings: GatewaySettings,
) -> Iterator[LiveServer]:
    live_server.app = create_tenant_app(backend, tokenizer, MODEL, settings, open_streams)
    yield live_server
    live_server.run(backend.until_idle())
    assert backend.blocks_in_use == 0, "a request left blocks behind"
