"""What the supervisor hands to the driver, and what the driver says back.

Owns ``LaunchSpec`` (a 0600 JSON file in the run folder) and the lines of the ready pipe: any number of
``Stage``, then one ``Ready`` or ``Failed``. No secret passes here: keys live in files under ``state_dir``
that their owner reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from copyhold.actors.pool_figures import PoolFigures
from copyhold.namespace.store_target import StoreTarget

from .config import Config

RUN_MARK = "COPYHOLD_RUN"
"""Names the run folder to every process of a run, so that they are found again; it changes no behaviour."""


class LaunchSpec(msgspec.Struct, frozen=True):
    """Everything the driver needs. All paths are absolute; the socket paths are short enough to bind."""

    config: Config
    run_dir: str
    ray_dir: str
    state_dir: str
    cache_dir: str
    authority_store: StoreTarget
    sessions_store: StoreTarget
    admin_socket: str
    pool: PoolFigures | None = None
    """Known to the driver once the checkpoint is."""


class Stage(msgspec.Struct, frozen=True):
    """A step of start-up has begun."""

    stage: str
    detail: str = ""


class Ready(msgspec.Struct, frozen=True):
    """Every rank is mapped and warmed; the tenant port and the admin socket answer."""

    url: str
    admin_socket: str
    ready: Literal[True] = True


class Failed(msgspec.Struct, frozen=True):
    """Start-up ended with an error. ``error`` is a stable name, ``message`` one line."""

    error: str
    message: str


Report = Stage | Ready | Failed


def decode_report(line: bytes) -> Report:
    """One line of the ready pipe; a key tells its kind. Raises ``msgspec.MsgspecError`` otherwise."""
    fields = msgspec.json.decode(line, type=dict[str, Any])
    kind = Ready if "ready" in fields else Failed if "error" in fields else Stage
    return msgspec.convert(fields, kind)


def write_launch_spec(path: Path, spec: LaunchSpec) -> None:
    """Write ``spec`` for its owner only."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(spec))


def read_launch_spec(path: str | Path) -> LaunchSpec:
    """The driver's view of its launch."""
    return msgspec.json.decode(Path(path).read_bytes(), type=LaunchSpec)


class ReadyPipe:
    """The driver's end of the pipe. ``ready`` and ``failed`` close it; further calls are errors."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def stage(self, stage: str, detail: str = "") -> None:
        """Say which step begins now."""
        self._send(Stage(stage, detail))

    def ready(self, url: str, admin_socket: str) -> None:
        """Say that requests are served, and close."""
        self._send(Ready(url, admin_socket))
        self._file.close()

    def failed(self, type_name: str, message: str) -> None:
        """Say why start-up ended, and close."""
        self._send(Failed(type_name, " ".join(message.split())))
        self._file.close()

    def _send(self, report: Report) -> None:
        self._file.write(msgspec.json.encode(report) + b"\n")
