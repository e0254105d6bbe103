"""Ranks over shared memory: same bits everywhere, a lost or idle peer is an error in time, nothing remains."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch

from copyhold.kernels import exchange
from copyhold.models import shm_collective
from copyhold.models.collective import Collective, RendezvousStore
from copyhold.models.errors import CollectiveError, SharedMemoryRefused
from copyhold.models.layout import CollectiveChoice
from copyhold.models.shm_collective import ShmCollective, join_ranks

pytestmark = pytest.mark.skipif(not exchange.supported(), reason="shared-memory sums are for x86-64")

PEER_TIMEOUT_S = 60.0
DETECTION_LIMIT_S = 5.0
CAPACITY_BYTES = 4096
SIZES = (1, 7, 1024, 576, 1025, 3, 5000, 1023, 2048)
"""Elements in turn; a message of more than 1024 goes in several."""


@pytest.fixture(autouse=True)
def nothing_remains():
    before = set(os.listdir("/dev/shm"))
    exchange.warm_up()
    yield
    new = {name for name in set(os.listdir("/dev/shm")) - before if "copyhold" in name or "shm_" in name}
    assert not new


def numbers(rank: int, turn: int, size: int) -> np.ndarray:
    """What a rank brings: magnitudes so different that the order of a sum shows."""
    rng = np.random.default_rng((rank, turn))
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)).astype(np.float32)


def run_turns(group: Collective) -> list[bytes]:
    sums = []
    for turn, size in enumerate(SIZES * 3):
        tensor = torch.from_numpy(numbers(group.rank, turn, size).copy())
        group.all_reduce(tensor)
        sums.append(tensor.numpy().tobytes())
        mine = torch.full((turn % 3, 2), group.rank * 1000.0 + turn, dtype=torch.float64)
        for rank, row in enumerate(group.all_gather(mine)):
            assert torch.equal(row, torch.full_like(mine, rank * 1000.0 + turn))
    return sums


def peer(connection: Connection, port: int, rank: int, ranks: int) -> None:
    """A rank under orders: join a generation, run the turns, enter one sum, or stop."""
    exchange.warm_up()
    store = RendezvousStore.connect(port, PEER_TIMEOUT_S)
    connection.send("ready")
    group: ShmCollective | None = None
    while (order := connection.recv()) != "stop":
        if isinstance(order, int):
            group = ShmCollective(store, rank, ranks, order, PEER_TIMEOUT_S, CAPACITY_BYTES)
            continue
        assert group is not None
        if order == "turns":
            connection.send(run_turns(group))
            continue
        try:
            group.all_reduce(torch.ones(5))
            connection.send("summed")
        except CollectiveError as error:
            connection.send(str(error))


class Peer:
    """A rank in a process of its own."""

    def __init__(self, port: int, rank: int, ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=peer, args=(theirs, port, rank, ranks), daemon=True)
        self.process.start()

    def tell(self, order: int | str) -> None:
        self.connection.send(order)

    def answer(self):
        assert self.connection.poll(PEER_TIMEOUT_S)
        return self.connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        self.tell("stop")
        self.process.join()
        assert self.process.exitcode == 0


@pytest.fixture
def store() -> RendezvousStore:
    return RendezvousStore.open(PEER_TIMEOUT_S)


def peers_of(store: RendezvousStore, ranks: int) -> list[Peer]:
    peers = [Peer(store.port, rank, ranks) for rank in range(1, ranks)]
    assert [other.answer() for other in peers] == ["ready"] * (ranks - 1)
    return peers


def joined(
    store: RendezvousStore, peers: list[Peer], generation: int, timeout_s: float = PEER_TIMEOUT_S
) -> ShmCollective:
    for other in peers:
        other.tell(generation)
    return ShmCollective(store, 0, len(peers) + 1, generation, timeout_s, CAPACITY_BYTES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_bits_of_a_sum_in_rank_order(store: RendezvousStore, ranks: int) -> None:
    peers = peers_of(store, ranks)
    group = joined(store, peers, 1)
    for other in peers:
        other.tell("turns")
    mine = run_turns(group)
    for turn, size in enumerate(SIZES * 3):
        expected = numbers(0, turn, size)
        for rank in range(1, ranks):
            expected = expected + numbers(rank, turn, size)
        assert mine[turn] == expected.tobytes()
    for other in peers:
        assert other.answer() == mine
        other.stop()


def test_a_killed_rank_ends_the_generation_for_all_at_once_and_the_next_one_works(
    store: RendezvousStore,
) -> None:
    peers = peers_of(store, 3)
    group = joined(store, peers, 1)
    peers[1].kill()
    peers[0].tell("sum")
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"collective generation 1 failed: .*") as lost:
        group.all_reduce(torch.ones(5))
    assert "generation 1 failed" in peers[0].answer()
    assert time.monotonic() - began < DETECTION_LIMIT_S and "\n" not in str(lost.value)
    with pytest.raises(CollectiveError, match="generation 1"):
        group.all_gather(torch.ones(5))
    newcomer = Peer(store.port, 2, 3)
    assert newcomer.answer() == "ready"
    peers[1] = newcomer
    second = joined(store, peers, 2)
    for other in peers:
        other.tell("turns")
    mine = run_turns(second)
    assert [other.answer() for other in peers] == [mine, mine]
    for other in peers:
        other.stop()


def test_a_rank_that_does_not_come_is_reported_at_the_timeout_and_learns_of_it(
    store: RendezvousStore,
) -> None:
    peers = peers_of(store, 2)
    group = joined(store, peers, 1, timeout_s=1.0)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"ranks \[1\] did not come within 1 s"):
        group.all_reduce(torch.ones(5))
    assert 0.9 < time.monotonic() - began < 1.0 + DETECTION_LIMIT_S
    peers[0].tell("sum")
    assert peers[0].answer() == "summed"
    peers[0].tell("sum")
    assert "another rank gave it up" in peers[0].answer()
    peers[0].stop()


def test_a_peer_that_never_joins_is_a_typed_error_and_poisons_nothing(store: RendezvousStore) -> None:
    with pytest.raises(CollectiveError, match="generation 7 failed: rank 0 could not join"):
        ShmCollective(store, 0, 2, 7, 0.3, CAPACITY_BYTES)
    peers = peers_of(store, 2)
    group = joined(store, peers, 8)
    peers[0].tell("sum")
    tensor = torch.ones(5)
    group.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 5 and peers[0].answer() == "summed"
    peers[0].stop()


def on_two_threads(store: RendezvousStore, work):
    def run(rank: int):
        mine = store if rank == 0 else RendezvousStore.connect(store.port, 5.0)
        return work(mine, rank)

    with ThreadPoolExecutor(2) as threads:
        return [threads.submit(run, rank) for rank in range(2)]


def test_a_rank_elsewhere_refuses_on_all_ranks_alike(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = iter(["one host", "one host", "another host"])
    monkeypatch.setattr(shm_collective, "_host", lambda: next(places))
    tries = on_two_threads(store, lambda mine, rank: ShmCollective(mine, rank, 2, 1, 5.0))
    for attempt in tries:
        with pytest.raises(SharedMemoryRefused, match="rank 1: it is not on rank 0's host"):
            attempt.result()


def test_ranks_that_cannot_share_memory_add_over_sockets_unless_told_otherwise(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kinds(choice: CollectiveChoice, generation: int) -> list[str]:
        def work(mine: RendezvousStore, rank: int) -> str:
            group = join_ranks(choice, mine, rank, 2, generation, 5.0)
            tensor = torch.ones(3)
            group.all_reduce(tensor)
            assert tensor.tolist() == [2, 2, 2]
            return group.kind

        return [attempt.result() for attempt in on_two_threads(store, work)]

    assert kinds("auto", 1) == kinds("shm", 2) == ["shm", "shm"] and kinds("gloo", 3) == ["gloo", "gloo"]
    monkeypatch.setattr(exchange, "supported", lambda: False)
    assert kinds("auto", 4) == ["gloo", "gloo"]
    with pytest.raises(SharedMemoryRefused, match="rank 0: not tested on"):
        kinds("shm", 5)


def test_different_calls_are_an_error_and_strided_tensors_are_summed_in_place(store: RendezvousStore) -> None:
    def work(mine: RendezvousStore, rank: int) -> None:
        group = ShmCollective(mine, rank, 2, 1, 5.0)
        whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
        group.all_reduce(whole[:, 1])
        assert whole[:, 1].tolist() == [2, 10, 18] and whole[:, 2].tolist() == [2, 6, 10]
        assert [t.item() for t in group.all_gather(torch.tensor(rank, dtype=torch.int64))] == [0, 1]
        halves = group.all_gather(torch.full((2,), rank + 0.5, dtype=torch.bfloat16))
        assert [half.tolist() for half in halves] == [[0.5, 0.5], [1.5, 1.5]]
        with pytest.raises(TypeError, match="float32"):
            group.all_reduce(torch.ones(2, dtype=torch.float64))
        group.all_reduce(torch.ones(4 + rank))

    for attempt in on_two_threads(store, work):
        with pytest.raises(CollectiveError, match=r"another (call|rank)"):
            attempt.result()


def test_a_group_holds_no_descriptor_after_it_is_dropped(store: RendezvousStore) -> None:
    def held() -> list[str]:
        links = []
        for link in Path("/proc/self/fd").iterdir():
            try:
                links.append(os.readlink(link))
            except FileNotFoundError:
                continue
        return sorted(link for link in links if "copyhold-ranks" in link or "pidfd" in link)

    # Whatever else this process did may still watch processes of its own.
    gc.collect()
    before = held()

    for attempt in on_two_threads(store, lambda mine, rank: ShmCollective(mine, rank, 2, 1, 5.0).world_size):
        assert attempt.result() == 2
    del attempt
    gc.collect()
    assert held() == before


def test_after_warming_up_no_loop_is_compiled(store: RendezvousStore) -> None:
    before = exchange.compile_counts()

    def work(mine: RendezvousStore, rank: int) -> None:
        group = ShmCollective(mine, rank, 2, 1, 5.0)
        group.all_reduce(torch.ones(9000))
        group.all_gather(torch.ones(3))

    for attempt in on_two_threads(store, work):
        attempt.result()
    assert exchange.compile_counts() == before
