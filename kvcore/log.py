"""Recorded logs: every applied command with the digests after it, in a file that shows its own damage.

Owns the file format and its reader and writer. A file is a magic line, then framed records: length (u32, little-endian),
payload, checksum (16 bytes of BLAKE2b over the checksum before it, the length and the payload). The first frame is the
header, the second a checkpoint where the file does not begin with Genesis; the others are one ledger record each.
Invariant: what a reader yields was written completely, in this order, in a log of this world and incarnation; damage is
refused at the record where it starts. A log holds tenants' token ids: files are made with mode 0600 and bounded in size.
Source: LEDGER "Recording"; contracts K048, K077.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from .checkpoint import Checkpoint
from .commands import Command, Genesis, decode_command, encode_command
from .errors import (
    LogCorrupt,
    LogFull,
    LogIncarnationMismatch,
    LogTruncated,
    LogWithoutGenesis,
    LogWorldMismatch,
)
from .receipts import Receipt

_T = TypeVar("_T")
MAGIC = b"copyhold ledger log 1\n"
_LENGTH_BYTES = 4
_CHECKSUM_BYTES = 16
LARGEST_RECORD_BYTES = 1 << 28
DEFAULT_LIMIT_BYTES = 1 << 30


class LogHeader(msgspec.Struct, frozen=True, array_like=True):
    """Whose log it is, the index of its first record (0: Genesis) and when it was begun, Unix seconds."""

    world: bytes
    incarnation: str
    first_index: int = 0
    started_at_s: int = 0


class LogStart(msgspec.Struct, frozen=True):
    """How a log begins; `checkpoint` is the ledger before its first record, none for one that begins with Genesis."""

    header: LogHeader
    checkpoint: Checkpoint | None


class LogRecord(msgspec.Struct, frozen=True, array_like=True):
    """One applied command; `command` is its encoded form."""

    index: int
    command: bytes
    committed_after: bytes
    machine_after: bytes

    def decoded(self) -> Command:
        """The command. Raises: LogCorrupt when its bytes are no command."""
        try:
            return decode_command(self.command)
        except msgspec.DecodeError as error:
            raise LogCorrupt(self.index, str(error)) from error


class Recorder:
    """Writes the log of one ledger from its Genesis or a checkpoint on.

    Not thread-safe: the caller applies and records in turn.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        started_at_s: int = 0,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Makes the file and holds its lock until it is closed.

        Raises: FileExistsError, nothing is overwritten; LogFull for a checkpoint beyond the limit, nothing is made.
        """
        self._limit_bytes = limit_bytes
        self._started_at_s = started_at_s
        self._written_bytes = len(MAGIC)
        self._checksum = bytes(_CHECKSUM_BYTES)
        self._records = 0
        self._begun = False
        payload = b"" if checkpoint is None else msgspec.msgpack.encode(checkpoint)
        self._require_room(payload)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._file.write(MAGIC)
        if checkpoint is not None:
            self._begin(checkpoint.genesis, checkpoint.index)
            self._append(payload)

    @property
    def records(self) -> int:
        """Commands in the file."""
        return self._records

    @property
    def written_bytes(self) -> int:
        """Bytes of the file, those not flushed yet included."""
        return self._written_bytes

    def record(self, command: Command, receipt: Receipt) -> None:
        """Appends one applied command. Raises: LogFull, LogWithoutGenesis; nothing is appended."""
        payload = msgspec.msgpack.encode(
            LogRecord(
                receipt.log_index, encode_command(command), receipt.committed_after, receipt.machine_after
            )
        )
        self._require_room(payload)
        if not self._begun:
            if not isinstance(command, Genesis):
                raise LogWithoutGenesis(type(command).__name__)
            self._begin(command, 0)
        self._append(payload)
        self._records += 1

    def flush(self) -> None:
        """Hands everything recorded to the system: it outlives this process, not the machine."""
        self._file.flush()

    def close(self) -> None:
        """Flushes to the disk, lets the lock go and closes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _begin(self, genesis: Genesis, first_index: int) -> None:
        header = LogHeader(genesis.world, genesis.incarnation, first_index, self._started_at_s)
        self._append(msgspec.msgpack.encode(header))
        self._begun = True

    def _require_room(self, payload: bytes) -> None:
        framed = len(payload) + _LENGTH_BYTES + _CHECKSUM_BYTES
        if self._written_bytes + framed > self._limit_bytes or len(payload) > LARGEST_RECORD_BYTES:
            raise LogFull(self._records, self._written_bytes, self._limit_bytes)

    def _append(self, payload: bytes) -> None:
        length = len(payload).to_bytes(_LENGTH_BYTES, "little")
        self._checksum = _chained(self._checksum, length, payload)
        self._written_bytes += self._file.write(length + payload + self._checksum)


def read_log(path: Path, expected: LogHeader | None = None) -> Iterator[LogRecord]:
    """Records in order, checked one by one; of `expected`, world and incarnation are compared.

    Raises: LogCorrupt, LogTruncated at the first damaged record; LogWorldMismatch, LogIncarnationMismatch when the log
    is not the expected one or contradicts its own Genesis.
    """
    with path.open("rb") as file:
        start, frames = _start(file)
        if expected is not None:
            _compare(start.header, expected)
        for index, payload in enumerate(frames, start.header.first_index):
            record = _typed(payload, LogRecord, index)
            if record.index != index:
                raise LogCorrupt(index, f"the record says it is {record.index}")
            if index == 0:
                command = record.decoded()
                if not isinstance(command, Genesis):
                    raise LogWithoutGenesis(type(command).__name__)
                _compare(start.header, LogHeader(command.world, command.incarnation))
            yield record


def read_start(path: Path) -> LogStart:
    """How a log begins. Raises: LogCorrupt, LogTruncated, LogWorldMismatch, LogIncarnationMismatch."""
    with path.open("rb") as file:
        return _start(file)[0]


def read_header(path: Path) -> LogHeader:
    """Whose log it is. Raises: LogCorrupt, LogTruncated."""
    with path.open("rb") as file:
        return _header(file, _Frames(file))


def _start(file: BinaryIO) -> tuple[LogStart, Iterator[bytes]]:
    frames = _Frames(file)
    header = _header(file, frames)
    if not header.first_index:
        return LogStart(header, None), frames
    frames.next_record = header.first_index
    checkpoint = _typed(next(frames, None), Checkpoint, header.first_index)
    _compare(header, LogHeader(checkpoint.genesis.world, checkpoint.genesis.incarnation))
    if checkpoint.index != header.first_index:
        raise LogCorrupt(header.first_index, f"the checkpoint says it is before {checkpoint.index}")
    frames.next_record = header.first_index
    return LogStart(header, checkpoint), frames


def _header(file: BinaryIO, frames: _Frames) -> LogHeader:
    if file.read(len(MAGIC)) != MAGIC:
        raise LogCorrupt(0, "not a ledger log")
    header = _typed(next(frames, None), LogHeader, 0)
    frames.next_record = 0
    return header


def _compare(found: LogHeader, expected: LogHeader) -> None:
    if found.world != expected.world:
        raise LogWorldMismatch(found.world.hex(), expected.world.hex())
    if found.incarnation != expected.incarnation:
        raise LogIncarnationMismatch(found.incarnation, expected.incarnation)


class _Frames:
    """Payloads in order; `next_record` is the record that the next frame holds, which damage to it is refused as."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._checksum = bytes(_CHECKSUM_BYTES)
        self.next_record = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        file, record = self._file, self.next_record
        prefix = file.read(_LENGTH_BYTES)
        if not prefix:
            raise StopIteration
        length = int.from_bytes(prefix, "little")
        if len(prefix) == _LENGTH_BYTES and length > LARGEST_RECORD_BYTES:
            raise LogCorrupt(record, f"a length of {length} bytes")
        payload, found = file.read(length), file.read(_CHECKSUM_BYTES)
        if len(prefix) < _LENGTH_BYTES or len(payload) < length or len(found) < _CHECKSUM_BYTES:
            raise LogTruncated(record)
        self._checksum = _chained(self._checksum, prefix, payload)
        if found != self._checksum:
            raise LogCorrupt(record, "checksum")
        self.next_record += 1
        return payload


def _typed(payload: bytes | None, kind: type[_T], record: int) -> _T:
    if payload is None:
        raise LogTruncated(record)
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise LogCorrupt(record, str(error)) from error


def _chained(before: bytes, length: bytes, payload: bytes) -> bytes:
    return blake2b(before + length + payload, digest_size=_CHECKSUM_BYTES).digest()
