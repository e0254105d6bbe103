"""Owns the content digest of a checkpoint's files, remembered per path, size and modification time."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); stages are `hash` in bytes and `convert` in layers."""

_CHUNK_BYTES = 4 << 20


class _Remembered(msgspec.Struct, frozen=True):
    size_bytes: int
    modified_ns: int
    digest: str


def content_digest(files: tuple[Path, ...], cache_dir: Path, progress: Progress) -> str:
    """SHA-256 in hex: of the file, or of the sorted names and digests of several."""
    total = sum(path.stat().st_size for path in files)
    done = 0
    digests = []
    for path in files:
        digests.append(_file_digest(path, cache_dir / "hashes", _shifted(progress, done, total)))
        done += path.stat().st_size
    if len(files) == 1:
        return digests[0]
    named = zip(files, digests, strict=True)
    return hashlib.sha256("".join(f"{path.name}\0{digest}\n" for path, digest in named).encode()).hexdigest()


def _shifted(progress: Progress, done: int, total: int) -> Callable[[int], None]:
    return lambda read: progress("hash", done + read, total)


def _file_digest(path: Path, memory: Path, report: Callable[[int], None]) -> str:
    stat = path.stat()
    note = memory / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    known = _recall(note)
    if known is not None and (known.size_bytes, known.modified_ns) == (stat.st_size, stat.st_mtime_ns):
        report(stat.st_size)
        return known.digest
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            report(file.tell())
    remembered = _Remembered(stat.st_size, stat.st_mtime_ns, hasher.hexdigest())
    memory.mkdir(parents=True, exist_ok=True)
    fresh = note.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    fresh.write_bytes(msgspec.json.encode(remembered))
    os.replace(fresh, note)
    return remembered.digest


def _recall(note: Path) -> _Remembered | None:
    """What is remembered, or None when there is nothing readable: then the file is hashed again."""
    try:
        return msgspec.json.decode(note.read_bytes(), type=_Remembered)
    except (OSError, msgspec.DecodeError):
        return None
