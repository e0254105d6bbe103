"""Recorded files that nobody writes any more: which may stay, and which hold what was revoked.

Owns the deletion of recorded logs. Invariants: a file that is being written (its writer holds its lock) is never
touched; what cannot be read to its end is taken to hold what it may not. The files of every replica that recorded into
the folder are looked at, those of incarnations and servers that ended too.
Source: LEDGER "Recording".
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from copyhold.kvcore.commands import Admit
from copyhold.kvcore.errors import LedgerRefusal
from copyhold.kvcore.log import read_header, read_log, read_start

SUFFIX = ".ledger"
_ADMIT_TAG = b"admit"
_TAG_WITHIN = 8
"""An encoded command begins with one byte of array and one of string header, then its tag."""


def files_of(folder: Path, replica: str) -> list[Path]:
    """The files of one replica, of all its incarnations."""
    return sorted(folder.glob(f"{replica}-*{SUFFIX}"))


def prune(folder: Path, replica: str, keep_bytes: int, not_before_s: float) -> int:
    """Delete the replica's files that began before ``not_before_s`` (Unix seconds), then the oldest beyond
    ``keep_bytes``; returns how many went. Raises: OSError."""
    found = [(_began_at_s(path), path, size) for path, size in _unwritten(files_of(folder, replica))]
    kept_bytes = gone = 0
    for began_at_s, path, size in sorted(found, reverse=True):
        kept_bytes += size
        if began_at_s < not_before_s or kept_bytes > keep_bytes:
            path.unlink(missing_ok=True)
            gone += 1
    return gone


def erase_below(folder: Path, floors: Mapping[str, int]) -> int:
    """Delete every file that holds a token of a generation below ``floors``; returns how many went.

    Raises: OSError when one cannot be deleted.
    """
    gone = 0
    for path, size in _unwritten(sorted(folder.glob(f"*{SUFFIX}"))):
        if size and _holds_below(path, floors):
            path.unlink(missing_ok=True)
            gone += 1
    return gone


def _holds_below(path: Path, floors: Mapping[str, int]) -> bool:
    try:
        checkpoint = read_start(path).checkpoint
        held = () if checkpoint is None else checkpoint.held
        if any(scope.generation < floors.get(scope.namespace, 0) for scope in held):
            return True
        for record in read_log(path):
            if _ADMIT_TAG not in record.command[:_TAG_WITHIN]:
                continue
            command = record.decoded()
            if isinstance(command, Admit) and command.scope.generation < floors.get(
                command.scope.namespace, 0
            ):
                return True
    except LedgerRefusal:
        return True
    return False


def _began_at_s(path: Path) -> float:
    try:
        return float(read_header(path).started_at_s)
    except LedgerRefusal:
        return path.stat().st_mtime


def _unwritten(paths: list[Path]) -> list[tuple[Path, int]]:
    """(path, bytes) of those that nobody writes; a file is written only from its making on, so that stays so."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            found.append((path, os.fstat(file.fileno()).st_size))
    return found
