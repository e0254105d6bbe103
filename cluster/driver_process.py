"""The driver seen from its parent: started with a launch file, heard through a pipe, ended by a signal.

Owns the process and the reading end of its ready pipe. Invariant: an end of the driver is never taken for readiness, and its
silence is never waited for longer than the configuration says.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from .errors import DriverFailed
from .launch import Failed, Ready, decode_report
from .processes import die_with_parent, identity, wait_for_end


class DriverProcess:
    """A started driver, leader of its own session. ``close`` gives back the pipe; ending it is ``terminate``'s."""

    def __init__(self, process: subprocess.Popen[bytes], ready_fd: int, log_path: Path) -> None:
        self._process = process
        self._ready_fd = ready_fd
        self._log_path = log_path

    @classmethod
    def start(
        cls, command: Sequence[str], launch_path: Path, log_path: Path, env: dict[str, str]
    ) -> DriverProcess:
        """Start ``command --launch FILE --ready-fd N`` in the run folder.

        Raises:
            DriverFailed: the program cannot be started; nothing runs.
        """
        read_fd, write_fd = os.pipe()
        try:
            with os.fdopen(write_fd, "wb"), log_path.open("ab") as log:
                process = subprocess.Popen(
                    [*command, "--launch", str(launch_path), "--ready-fd", str(write_fd)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=launch_path.parent,
                    env=env,
                    pass_fds=(write_fd,),
                    start_new_session=True,
                    preexec_fn=die_with_parent(),
                )
        except OSError as error:
            os.close(read_fd)
            raise DriverFailed(f"the driver cannot be started: {error}") from error
        return cls(process, read_fd, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Close the reading end; a driver that still writes gets a broken pipe."""
        os.close(self._ready_fd)

    def await_ready(self, on_stage: Callable[[str, str], None], silence_s: float) -> Ready:
        """Relay stages until the driver is ready.

        Raises:
            DriverFailed: it reported an error, ended, sent nonsense or was silent for ``silence_s``.
        """
        for line in self._lines(silence_s):
            try:
                report = decode_report(line)
            except msgspec.MsgspecError as error:
                raise DriverFailed(f"the driver sent a line that is no report: {error}") from error
            if isinstance(report, Ready):
                return report
            if isinstance(report, Failed):
                raise DriverFailed(report.message, report.error)
            on_stage(report.stage, report.detail)
        raise self.failure("the driver ended before it was ready")

    def await_end(self, timeout_s: float | None = None) -> bool:
        """True when the driver has ended within ``timeout_s``."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """SIGTERM, then wait for the end until ``grace_s`` have passed or ``hurry()`` says so."""
        self._process.terminate()
        waited_s = 0.0
        while waited_s < grace_s and not hurry() and not self.await_end(0.1):
            waited_s += 0.1

    def failure(self, what: str) -> DriverFailed:
        """The error for a driver that has ended, with its status and the last line it logged."""
        status = self._process.wait()
        ending = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return DriverFailed(f"{what} ({ending})" + (f": {lines[-1]}" if lines else ""))

    def _lines(self, silence_s: float) -> Iterator[bytes]:
        """Lines of the pipe until the driver ends."""
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(self._ready_fd, select.POLLIN)
            poll.register(pidfd, select.POLLIN)
            pending = b""
            while True:
                events = dict(poll.poll(silence_s * 1000))
                if not events:
                    raise DriverFailed(f"the driver showed no progress for {silence_s:g} s")
                if self._ready_fd not in events:
                    return
                chunk = os.read(self._ready_fd, 65536)
                if not chunk:
                    self._expect_end()
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                yield from lines
        finally:
            os.close(pidfd)

    def _expect_end(self) -> None:
        process = identity(self.pid)
        if process is not None:
            wait_for_end([process], timeout_s=5.0)
        if self.running:
            raise DriverFailed("the driver closed its report pipe before it was ready")
