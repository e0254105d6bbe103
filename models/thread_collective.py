"""Collectives between threads of one process: ranks meet at a barrier, sums are taken in rank order on every rank."""

from __future__ import annotations

import threading

import torch

from .errors import CollectiveError


class ThreadMeeting:
    """Where the threads of one replica meet; a rank that does not come within ``timeout_s`` breaks it for all."""

    def __init__(self, ranks: int, timeout_s: float = 20.0) -> None:
        self._ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=timeout_s)
        self._brought: list[torch.Tensor] = [torch.empty(0)] * ranks

    def collective(self, rank: int) -> ThreadCollective:
        return ThreadCollective(self, rank, self._ranks)

    def abort(self) -> None:
        """Send everybody who waits away with a ``CollectiveError``; nobody meets here again."""
        self._barrier.abort()

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What every rank brought, in rank order; copies, so that a rank may go on writing to its own."""
        try:
            self._brought[rank] = tensor.clone()
            self._barrier.wait()
            everything = list(self._brought)
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CollectiveError(rank, "a rank did not come to the meeting") from error
        return everything


class ThreadCollective:
    """One rank's end of a ``ThreadMeeting``; a ``Collective``."""

    kind = "threads"

    def __init__(self, meeting: ThreadMeeting, rank: int, world_size: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.world_size = world_size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        parts = self._meeting.exchange(self.rank, tensor)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._meeting.exchange(self.rank, tensor)
