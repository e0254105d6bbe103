"""Gloo groups in generations: sums are right, a lost peer is a typed error in time, the next generation works."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import pytest
import torch

from copyhold.models.collective import GlooCollective, RendezvousStore, SingleProcess
from copyhold.models.errors import CollectiveError

PEER_TIMEOUT_S = 60.0
"""Long, because a peer's patience is not what is tested."""
DETECTION_LIMIT_S = 15.0


def peer(connection: Connection, port: int) -> None:
    """A rank 1 under orders: join a generation, take part in one sum, or wait to be killed."""
    store = RendezvousStore.connect(port, PEER_TIMEOUT_S)
    connection.send("ready")
    group: GlooCollective | None = None
    while True:
        order = connection.recv()
        if order == "sum":
            assert group is not None
            tensor = torch.full((5,), 2.0)
            group.all_reduce(tensor)
            connection.send(tensor.tolist())
        elif order == "stop":
            return
        else:
            group = GlooCollective(store, 1, 2, order, PEER_TIMEOUT_S)


class Peer:
    """A rank 1 in its own process."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=peer, args=(theirs, port), daemon=True)
        self.process.start()
        self.ready = False

    def tell(self, order: int | str) -> None:
        if not self.ready:
            self.ready = self.connection.recv() == "ready"
        self.connection.send(order)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def test_a_lost_peer_is_reported_in_time_and_the_next_generation_works() -> None:
    store = RendezvousStore.open(30.0)
    first, second = Peer(store.port), Peer(store.port)
    first.tell(1)
    group = GlooCollective(store, 0, 2, 1, 30.0)
    _sum_with(first, group)
    first.kill()
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="collective generation 1 failed") as lost:
        group.all_reduce(torch.ones(5))
    assert time.monotonic() - began < DETECTION_LIMIT_S and "\n" not in str(lost.value)
    with pytest.raises(CollectiveError, match="generation 1"):
        group.all_gather(torch.ones(5))
    second.tell(2)
    _sum_with(second, GlooCollective(store, 0, 2, 2, 30.0))
    _stop(second)


def test_a_peer_that_does_not_enter_is_reported_after_the_timeout() -> None:
    store = RendezvousStore.open(30.0)
    idle = Peer(store.port)
    idle.tell(1)
    group = GlooCollective(store, 0, 2, 1, 3.0)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="generation 1"):
        group.all_reduce(torch.ones(5))
    assert 2.5 < time.monotonic() - began < DETECTION_LIMIT_S
    _stop(idle)


def _stop(other: Peer) -> None:
    other.tell("stop")
    other.process.join()
    assert other.process.exitcode == 0


def _sum_with(other: Peer, group: GlooCollective) -> None:
    other.tell("sum")
    tensor = torch.ones(5)
    group.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 5 == other.connection.recv()


def test_a_peer_that_never_joins_is_a_typed_error_and_poisons_nothing() -> None:
    store = RendezvousStore.open(30.0)
    with pytest.raises(CollectiveError, match="generation 7 failed: rank 0 could not join"):
        GlooCollective(store, 0, 2, 7, 0.5)

    def join(rank: int) -> list[list[int]]:
        mine = store if rank == 0 else RendezvousStore.connect(store.port, 30.0)
        return [
            t.tolist() for t in GlooCollective(mine, rank, 2, 8, 30.0).all_gather(torch.tensor([rank, 10]))
        ]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(join, range(2))) == [[[0, 10], [1, 10]]] * 2


def test_a_store_that_is_not_there_is_a_typed_error() -> None:
    port = RendezvousStore.open(1.0).port
    with pytest.raises(CollectiveError, match=str(port)):
        RendezvousStore.connect(port, 0.5)


def test_one_rank_alone_adds_nothing() -> None:
    alone = SingleProcess()
    tensor = torch.ones(3)
    alone.all_reduce(tensor)
    assert tensor.tolist() == [1, 1, 1] and alone.all_gather(tensor)[0] is tensor
