"""The private, short-lived folder of one run: sockets, Ray's session, logs, temporary files.

Owns ``<run_dir>/copyhold-XXXXXX`` (0700). Invariant: it names its owning process, so that what a killed owner
left is removed by the next start, and every socket path below it can be bound.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from .errors import RunFolderUnusable
from .processes import ProcessIdentity, end_processes, identity, run_processes

SOCKET_PATH_BYTES = 107
_PREFIX = "copyhold-"
_OWNER_FILE = "owner.json"
_LONGEST_SOCKET = "/ray/session_YYYY-MM-DD_HH-MM-SS_NNNNNN_PPPPPPP/sockets/plasma_store"


class RunOwner(msgspec.Struct, frozen=True):
    """Who made a run folder; ``pid_namespace`` tells containers that share a file system apart."""

    process: ProcessIdentity
    pid_namespace: str


def make_run_folder(base: Path) -> Path:
    """Make the folder with its ``tmp`` below; removed again with ``remove_run_folder``.

    Raises:
        RunFolderUnusable: nothing was left behind.
    """
    try:
        run_dir = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base.expanduser().resolve()))
    except OSError as error:
        raise RunFolderUnusable(f"cannot make a run folder in {base}: {error}") from error
    if len(os.fsencode(run_dir)) + len(_LONGEST_SOCKET) > SOCKET_PATH_BYTES:
        run_dir.rmdir()
        raise RunFolderUnusable(
            f"{base} is too long for unix sockets; pass a --run-dir of at most "
            f"{SOCKET_PATH_BYTES - len(_LONGEST_SOCKET) - len(_PREFIX) - 9} bytes"
        )
    process = identity(os.getpid())
    assert process is not None, "a running process has an identity"
    (run_dir / _OWNER_FILE).write_bytes(msgspec.json.encode(RunOwner(process, _pid_namespace())))
    (run_dir / "tmp").mkdir(mode=0o700)
    return run_dir


def remove_run_folder(run_dir: Path) -> None:
    """Remove the folder and all below it; a second call does nothing."""
    if run_dir.exists():
        shutil.rmtree(run_dir)


def sweep_stale_runs(base: Path) -> list[Path]:
    """End the processes and remove the folders of runs whose owner was killed. Returns the folders."""
    swept: list[Path] = []
    for run_dir in sorted(base.expanduser().resolve().glob(f"{_PREFIX}*")):
        owner = _dead_owner(run_dir)
        if owner is None:
            continue
        survivors = end_processes(
            lambda run_dir=run_dir: run_processes(str(run_dir)), grace_s=2.0, deadline_s=5.0
        )
        if not survivors:
            shutil.rmtree(run_dir, ignore_errors=True)
            swept.append(run_dir)
    return swept


def _dead_owner(run_dir: Path) -> RunOwner | None:
    try:
        if run_dir.is_symlink() or run_dir.stat().st_uid != os.getuid():
            return None
        owner = msgspec.json.decode((run_dir / _OWNER_FILE).read_bytes(), type=RunOwner)
    except (OSError, msgspec.MsgspecError):
        return None
    if owner.pid_namespace != _pid_namespace() or owner.process.alive:
        return None
    return owner


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
