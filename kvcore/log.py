"""Recorded logs: every applied command with the digests after it, in a file that shows its own damage.

Owns the file format and its reader and writer. A file is a magic line, then framed records: length (u32, little-endian),
payload, checksum (16 bytes of BLAKE2b over the checksum before it, the length and the payload). Record 0 of the frames
is the header; the others are one ledger record each. Invariant: what a reader yields was written completely, in this
order, in a log of this world and incarnation; damage is refused at the record where it starts. A log holds tenants'
token ids: files are made with mode 0600 and bounded in size.
Source: LEDGER "Recording"; contracts K048, K077.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

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
    """Whose log it is."""

    world: bytes
    incarnation: str


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
    """Writes the log of one ledger, from its Genesis on. Not thread-safe: the caller applies and records in turn."""

    def __init__(self, path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        """Makes the file. Raises: FileExistsError, nothing is overwritten."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: BinaryIO = os.fdopen(descriptor, "wb")
        self._limit_bytes = limit_bytes
        self._written_bytes = self._file.write(MAGIC)
        self._checksum = bytes(_CHECKSUM_BYTES)
        self._records = 0

    def record(self, command: Command, receipt: Receipt) -> None:
        """Appends one applied command. Raises: LogFull, LogWithoutGenesis; nothing is appended."""
        payload = msgspec.msgpack.encode(
            LogRecord(
                receipt.log_index, encode_command(command), receipt.committed_after, receipt.machine_after
            )
        )
        framed = len(payload) + _LENGTH_BYTES + _CHECKSUM_BYTES
        if self._written_bytes + framed > self._limit_bytes or len(payload) > LARGEST_RECORD_BYTES:
            raise LogFull(self._records, self._written_bytes, self._limit_bytes)
        if self._records == 0:
            if not isinstance(command, Genesis):
                raise LogWithoutGenesis(type(command).__name__)
            self._append(msgspec.msgpack.encode(LogHeader(command.world, command.incarnation)))
        self._append(payload)
        self._records += 1

    def close(self) -> None:
        """Flushes to the disk and closes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _append(self, payload: bytes) -> None:
        length = len(payload).to_bytes(_LENGTH_BYTES, "little")
        self._checksum = _chained(self._checksum, length, payload)
        self._written_bytes += self._file.write(length + payload + self._checksum)


def read_log(path: Path, expected: LogHeader | None = None) -> Iterator[LogRecord]:
    """Records in order, checked one by one.

    Raises: LogCorrupt, LogTruncated at the first damaged record; LogWorldMismatch, LogIncarnationMismatch when the log
    is not the expected one or contradicts its own Genesis.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise LogCorrupt(0, "not a ledger log")
        frames = _frames(file)
        header = _typed(next(frames, None), LogHeader, 0)
        if expected is not None:
            _compare(header, expected)
        for index, payload in enumerate(frames):
            record = _typed(payload, LogRecord, index)
            if record.index != index:
                raise LogCorrupt(index, f"the record says it is {record.index}")
            if index == 0:
                command = record.decoded()
                if not isinstance(command, Genesis):
                    raise LogWithoutGenesis(type(command).__name__)
                _compare(header, LogHeader(command.world, command.incarnation))
            yield record


def read_header(path: Path) -> LogHeader:
    """Whose log it is. Raises: LogCorrupt, LogTruncated."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise LogCorrupt(0, "not a ledger log")
        return _typed(next(_frames(file), None), LogHeader, 0)


def _compare(found: LogHeader, expected: LogHeader) -> None:
    if found.world != expected.world:
        raise LogWorldMismatch(found.world.hex(), expected.world.hex())
    if found.incarnation != expected.incarnation:
        raise LogIncarnationMismatch(found.incarnation, expected.incarnation)


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """Payloads in order; frame 0 is the header, so record n is frame n + 1."""
    checksum = bytes(_CHECKSUM_BYTES)
    frame = 0
    while prefix := file.read(_LENGTH_BYTES):
        record = max(frame - 1, 0)
        length = int.from_bytes(prefix, "little")
        if len(prefix) == _LENGTH_BYTES and length > LARGEST_RECORD_BYTES:
            raise LogCorrupt(record, f"a length of {length} bytes")
        payload, found = file.read(length), file.read(_CHECKSUM_BYTES)
        if len(prefix) < _LENGTH_BYTES or len(payload) < length or len(found) < _CHECKSUM_BYTES:
            raise LogTruncated(record)
        checksum = _chained(checksum, prefix, payload)
        if found != checksum:
            raise LogCorrupt(record, "checksum")
        yield payload
        frame += 1


def _typed(payload: bytes | None, kind: type[_T], record: int) -> _T:
    if payload is None:
        raise LogTruncated(record)
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise LogCorrupt(record, str(error)) from error


def _chained(before: bytes, length: bytes, payload: bytes) -> bytes:
    return blake2b(before + length + payload, digest_size=_CHECKSUM_BYTES).digest()
