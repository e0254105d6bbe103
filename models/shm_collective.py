"""Owns sums and gathers of a replica's ranks on one host, through one segment of memory that all of them map.

The segment is an anonymous file of rank 0, which the others open by its descriptor while everybody joins; it has no name, so
nothing remains however the ranks end. It belongs to one generation: a rank that is lost or does not come in time ends it
(`CollectiveError`), survivors say so in the segment, and meet in the next generation with a new one.

Layout in bytes: [0, 4096) header; then `WORDS` int64 a rank and one more line whose first word says that the generation is
over; from the next page on float32 [2, ranks, capacity]. Order of accesses and of sums: `copyhold.kernels.exchange`.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
from __future__ import annotations

import fcntl
import mmap
import os
import platform
import secrets
import select
import struct
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from copyhold.kernels import exchange

from .collective import GlooCollective, RendezvousStore
from .errors import CollectiveError, SharedMemoryRefused
from .layout import CollectiveChoice

_MAGIC = b"copyhold ranks 1"
_PAGE = 4096
_LIVENESS_PERIOD_S = 0.01
_AWAKE_S = 0.0003
_REST_S = 0.00005
"""A wait longer than `_AWAKE_S` looks once in `_REST_S`: a rank that only ever yields is charged for the time, and a busy
machine then keeps it waiting when it has work again (prefill took a third longer at a load of 7 on 2 cores)."""
CAPACITY_BYTES = 2 << 20
"""Longest message in one go: 512 rows of 1024 float32; longer ones go in several."""


class _Place(msgspec.Struct, frozen=True):
    """Where rank 0's segment is; `refusal` is why there is none."""

    host: str = ""
    pid: int = 0
    descriptor: int = 0
    header: bytes = b""
    refusal: str = ""


class _Answer(msgspec.Struct, frozen=True):
    """Whether a rank mapped the segment; `refusal` is why it did not."""

    pid: int
    refusal: str = ""


class ShmCollective:
    """One generation of ranks over shared memory; construction returns when every rank has mapped the segment.

    Raises: `SharedMemoryRefused` on every rank alike when one of them cannot map it (they may form another group at
    once); `CollectiveError` when a peer does not join within `timeout_s`. The store can be used again after both.
    """

    kind = "shm"

    def __init__(
        self,
        store: RendezvousStore,
        rank: int,
        world_size: int,
        generation: int,
        timeout_s: float,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.generation = generation
        self._timeout_s = timeout_s
        self._sequence = 0
        self._failure = ""
        shape = _Shape(generation, world_size, capacity_bytes)
        segment, pids = _meet(store, rank, shape, timeout_s)
        try:
            self._peers = _Processes(pids)
        except OSError as error:
            raise CollectiveError(generation, f"a rank ended while all joined: {error}") from error
        self._words = np.frombuffer(segment, np.int64, (world_size + 1) * exchange.WORDS, _PAGE)
        raw = np.frombuffer(segment, np.uint8, 2 * world_size * capacity_bytes, shape.buffers_at)
        self._bytes = raw.reshape(2, world_size, capacity_bytes)
        self._floats = self._bytes.view(np.float32)
        self._over = self._words[world_size * exchange.WORDS :]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks in float32, in place, with the same bits on every rank.

        Raises: `CollectiveError`.
        """
        if tensor.dtype != torch.float32:
            raise TypeError(f"ranks add float32, not {tensor.dtype}")
        flat = tensor.contiguous()
        values = flat.numpy().reshape(-1)
        label, most = 2 * values.size, self._floats.shape[2]
        for at in range(0, values.size, most):
            part = values[at : at + most]
            self._exchange(
                lambda number, first, part=part: exchange.sum_ranks(
                    self._words, self._floats, part, self.rank, number, label, first
                )
            )
        if flat is not tensor:
            tensor.copy_(flat)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order; all must have one shape and dtype.

        Raises: `CollectiveError`.
        """
        message = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        gathered = torch.empty((self.world_size, *tensor.shape), dtype=tensor.dtype)
        out = gathered.reshape(-1).view(torch.uint8).numpy().reshape(self.world_size, message.size)
        label, most = 2 * message.size + 1, self._bytes.shape[2]
        for at in range(0, message.size, most):
            part = message[at : at + most]
            self._exchange(
                lambda number, first, part=part, at=at: exchange.gather_ranks(
                    self._words, self._bytes, part, self.rank, number, label, first, out, at
                )
            )
        return list(gathered.unbind())

    def _exchange(self, attempt: Callable[[int, bool], int]) -> None:
        """Run one message to its end."""
        if self._failure:
            raise CollectiveError(self.generation, self._failure)
        self._sequence += 1
        found = attempt(self._sequence, True)
        if found == exchange.WAITING:
            found = self._wait(attempt)
        if found == exchange.DISAGREEMENT:
            raise self._end("a rank is in another call, or in this one with another shape")

    def _wait(self, attempt: Callable[[int, bool], int]) -> int:
        started_s = time.monotonic()
        looked_s = started_s
        while True:
            found = attempt(self._sequence, False)
            if found != exchange.WAITING:
                return found
            now_s = time.monotonic()
            if now_s - started_s > self._timeout_s:
                raise self._end(f"ranks {self._missing()} did not come within {self._timeout_s:g} s")
            if now_s - looked_s > _LIVENESS_PERIOD_S:
                looked_s = now_s
                over = bool(self._over[0])
                gone = self._peers.gone(self._missing())
                # What a rank announced before it ended still counts, so its number is read once more.
                if (over or gone) and attempt(self._sequence, False) == exchange.WAITING:
                    raise self._end(f"ranks {gone} ended" if gone else "another rank gave it up")
            if now_s - started_s > _AWAKE_S:
                time.sleep(_REST_S)

    def _missing(self) -> list[int]:
        numbers = self._words[: self.world_size * exchange.WORDS : exchange.WORDS]
        return [rank for rank, number in enumerate(numbers.tolist()) if number < self._sequence]

    def _end(self, failure: str) -> CollectiveError:
        """End the generation for this rank, and for whoever waits for it."""
        self._failure = failure
        self._over[0] = 1
        return CollectiveError(self.generation, failure)


def join_ranks(
    choice: CollectiveChoice,
    store: RendezvousStore,
    rank: int,
    world_size: int,
    generation: int,
    timeout_s: float,
) -> ShmCollective | GlooCollective:
    """The group that `choice` asks for; `auto` is gloo on every rank as soon as one refuses shared memory.

    Raises: `CollectiveError`, and `SharedMemoryRefused` where nothing but shared memory is asked for.
    """
    if choice != "gloo":
        try:
            return ShmCollective(store, rank, world_size, generation, timeout_s)
        except SharedMemoryRefused:
            if choice == "shm":
                raise
    return GlooCollective(store, rank, world_size, generation, timeout_s)


class _Processes:
    """Descriptors of the ranks' processes, which tell an end at once and never mean a later process."""

    def __init__(self, pids: list[int]) -> None:
        self._descriptors: list[int] = []
        weakref.finalize(self, _close, self._descriptors)
        for pid in pids:
            self._descriptors.append(os.pidfd_open(pid))

    def gone(self, ranks: list[int]) -> list[int]:
        """Which of `ranks` have no process any more."""
        poll = select.poll()
        for rank in ranks:
            poll.register(self._descriptors[rank], select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return [rank for rank in ranks if self._descriptors[rank] in ended]


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Shape(msgspec.Struct, frozen=True):
    """What all ranks must mean alike."""

    generation: int
    ranks: int
    capacity_bytes: int

    @property
    def buffers_at(self) -> int:
        return _PAGE * (1 + -(-(self.ranks + 1) * exchange.WORDS * 8 // _PAGE))

    @property
    def size_bytes(self) -> int:
        return self.buffers_at + 2 * self.ranks * self.capacity_bytes

    def header(self, nonce: bytes) -> bytes:
        return _MAGIC + struct.pack("<qqq", self.generation, self.ranks, self.capacity_bytes) + nonce


def _meet(store: RendezvousStore, rank: int, shape: _Shape, timeout_s: float) -> tuple[mmap.mmap, list[int]]:
    """The segment that all ranks map, and their process ids."""
    descriptor: int | None = None
    try:
        scoped = dist.PrefixStore(f"shm{shape.generation}", store.store)
        store.store.set_timeout(timedelta(seconds=timeout_s))
        if rank == 0:
            place, descriptor = _create(shape)
            scoped.set("place", msgspec.json.encode(place).decode())
        else:
            place = msgspec.json.decode(scoped.get("place"), type=_Place)
        segment = _attach(place, shape)
        refusal = segment if isinstance(segment, str) else ""
        scoped.set(f"rank{rank}", msgspec.json.encode(_Answer(os.getpid(), refusal)).decode())
        keys = [f"rank{other}" for other in range(shape.ranks)]
        answers = [msgspec.json.decode(scoped.get(key), type=_Answer) for key in keys]
    except (RuntimeError, ValueError, msgspec.MsgspecError) as error:
        raise CollectiveError(shape.generation, f"rank {rank} could not join: {error}") from error
    finally:
        if descriptor is not None:
            os.close(descriptor)
    refusals = [f"rank {number}: {found.refusal}" for number, found in enumerate(answers) if found.refusal]
    if refusals or isinstance(segment, str):
        raise SharedMemoryRefused("; ".join(refusals))
    return segment, [found.pid for found in answers]


def _create(shape: _Shape) -> tuple[_Place, int | None]:
    """An anonymous file that keeps its size, with its header; all else in it is zero."""
    if not exchange.supported():
        return _Place(refusal=f"not tested on {platform.machine()}"), None
    try:
        descriptor = os.memfd_create("copyhold-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _Place(refusal=f"no anonymous file: {error.strerror}"), None
    try:
        os.ftruncate(descriptor, shape.size_bytes)
        header = shape.header(secrets.token_bytes(16))
        os.pwrite(descriptor, header, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(descriptor)
        return _Place(refusal=f"no anonymous file: {error.strerror}"), None
    return _Place(_host(), os.getpid(), descriptor, header), descriptor


def _attach(place: _Place, shape: _Shape) -> mmap.mmap | str:
    """The segment, all of its memory in place; or why this rank cannot have it.

    Raises: ValueError when the ranks mean different groups.
    """
    if place.refusal:
        return place.refusal
    if not exchange.supported():
        return f"not tested on {platform.machine()}"
    if place.host != _host():
        return "it is not on rank 0's host, or in another space of process ids"
    header = shape.header(place.header[-16:])
    if header != place.header:
        raise ValueError("rank 0 means another generation, number of ranks or capacity")
    try:
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            segment = mmap.mmap(descriptor, shape.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        return f"cannot map rank 0's segment: {error}"
    if segment[: len(header)] != header:
        return "rank 0's descriptor is another file"
    return segment


def _host() -> str:
    """One kernel and one space of process ids, in which a descriptor of another process has a path."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"
