"""Owns how ranks of one replica add and gather tensors: alone, or in numbered generations of gloo groups.

A group belongs to one generation of one store. When a peer is lost the generation is over (`CollectiveError`)
and survivors meet the newcomer in the next one, on the same store; no global process group is involved, so a
failed start leaves nothing behind that could poison the next.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from .errors import CollectiveError


class Collective(Protocol):
    """What a tensor-parallel layer needs; every rank makes the same calls in the same order."""

    @property
    def kind(self) -> str:
        """What carries the tensors, for status reports."""
        ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place.

        Raises: `CollectiveError` (the tensor's values are unspecified).
        """
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order; all must have one shape and dtype.

        Raises: `CollectiveError`.
        """
        ...


class SingleProcess:
    """The collective of a replica with one rank: sums are already whole."""

    kind = "none"
    rank = 0
    world_size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Nothing to add."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor itself."""
        return [tensor]


class RendezvousStore:
    """Where ranks of a replica find each other; rank 0 opens it, the others connect.

    Raises: `CollectiveError` when it cannot be opened or reached in time.
    """

    def __init__(self, store: dist.TCPStore, host: str) -> None:
        self.host = host
        self.port = store.port
        self.store = store

    @classmethod
    def open(cls, timeout_s: float, host: str = "127.0.0.1") -> RendezvousStore:
        """Listen on a free port, which `port` then names; lives as long as this object."""
        return cls(_tcp_store(host, 0, True, timeout_s), host)

    @classmethod
    def connect(cls, port: int, timeout_s: float, host: str = "127.0.0.1") -> RendezvousStore:
        """Reach the store that rank 0 opened."""
        return cls(_tcp_store(host, port, False, timeout_s), host)


class GlooCollective:
    """One generation of a gloo group; construction returns when every rank has joined.

    `interface` is the network interface to bind, None to let gloo resolve the host name.

    Raises: `CollectiveError` when a peer does not join within `timeout_s` (the store can be used again).
    """

    kind = "gloo"

    def __init__(
        self,
        store: RendezvousStore,
        rank: int,
        world_size: int,
        generation: int,
        timeout_s: float,
        interface: str | None = "lo",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        timeout = timedelta(seconds=timeout_s)
        try:
            store.store.set_timeout(timeout)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            device = (
                dist.ProcessGroupGloo.create_device(interface=interface)
                if interface
                else dist.ProcessGroupGloo.create_default_device()
            )
            options._devices = [device]
            scoped = dist.PrefixStore(f"gen{generation}", store.store)
            self._group = dist.ProcessGroupGloo(scoped, rank, world_size, options)
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(generation, f"rank {rank} could not join: {error}") from error

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise CollectiveError(self.generation, str(error)) from error

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        try:
            self._group.allgather([gathered], [tensor]).wait()
        except RuntimeError as error:
            raise CollectiveError(self.generation, str(error)) from error
        return gathered


def _tcp_store(host: str, port: int, is_master: bool, timeout_s: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            host, port, None, is_master, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(0, f"rendezvous store at {host}:{port}: {error}") from error
