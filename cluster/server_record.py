"""Which server serves from a state folder: a lock for one, and a record by which others find it.

Owns ``lock`` and ``server.json`` (0600) in the state folder (0700). Invariant: a record counts only while the
process it names (id and start time) lives, so a file left by a killed server misleads nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .errors import ConfigError, NotRunning, StateInUse
from .processes import ProcessIdentity, identity

_RECORD_FILE = "server.json"
_LOCK_FILE = "lock"


class ServerRecord(msgspec.Struct, frozen=True):
    """Where a running server is reached. Holds no secret."""

    process: ProcessIdentity
    url: str
    admin_socket: str
    run_dir: str


def make_state_folder(state_dir: Path) -> None:
    """Make the folder readable by its owner only.

    Raises:
        ConfigError: it cannot be made or belongs to somebody else.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        state_dir.chmod(0o700)
    except OSError as error:
        raise ConfigError("state_dir", f"state_dir {state_dir} cannot be used: {error}") from error


@contextlib.contextmanager
def state_lock(state_dir: Path) -> Iterator[None]:
    """Hold the folder for this process; the kernel drops the lock when the process ends, however it ends.

    Raises:
        StateInUse: another process holds it.
    """
    descriptor = os.open(state_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0).strip()
            raise StateInUse(str(state_dir), int(text) if text.isdigit() else None) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def write_server_record(state_dir: Path, url: str, admin_socket: str, run_dir: Path) -> None:
    """Record this process as the folder's server; the file appears whole or not at all."""
    process = identity(os.getpid())
    assert process is not None, "a running process has an identity"
    partial = state_dir / f"{_RECORD_FILE}.partial"
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(ServerRecord(process, url, admin_socket, str(run_dir))))
    partial.replace(state_dir / _RECORD_FILE)


def remove_server_record(state_dir: Path) -> None:
    """Remove this process's record; a second call does nothing."""
    (state_dir / _RECORD_FILE).unlink(missing_ok=True)


def find_server(state_dir: Path) -> ServerRecord:
    """The server that serves from ``state_dir`` now.

    Raises:
        NotRunning: there is no record, or the process it names has gone.
    """
    try:
        record = msgspec.json.decode((state_dir / _RECORD_FILE).read_bytes(), type=ServerRecord)
    except FileNotFoundError:
        raise NotRunning(f"no server runs from {state_dir}; `copyhold serve` starts one") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise NotRunning(f"the server record in {state_dir} cannot be read: {error}") from error
    if not record.process.alive:
        raise NotRunning(f"the server recorded in {state_dir} (process {record.process.pid}) has ended")
    return record
