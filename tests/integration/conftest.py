"""Servers that the integration tests share: one per tensor-parallel size for the whole session.

Tests make tenants of their own, so that they do not meet in a namespace.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import LiveServer, run_server, tiny_config
from tiny_checkpoint import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def server(tiny_model: Path, model_cache: Path) -> Iterator[LiveServer]:
    """Two tensor-parallel ranks."""
    yield from run_server(tiny_config(tiny_model, model_cache, tp=2))


@pytest.fixture(scope="session")
def server_tp1(tiny_model: Path, model_cache: Path) -> Iterator[LiveServer]:
    """One rank, another chunk size, so that equal answers mean something."""
    yield from run_server(tiny_config(tiny_model, model_cache, tp=1, prefill_chunk_tokens=48))


@pytest.fixture
def run_base() -> Iterator[Path]:
    """Where run folders are made: a short path, because unix socket names have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="cht-", dir="/tmp") as folder:
        yield Path(folder)
