"""Processes that a benchmark asks for figures: peers in an environment of their own, and children of this interpreter.

``make bench-peers`` makes the peers' environment in ``.venv-peers``; the variable ``COPYHOLD_PEERS`` names another. Owns how a
process is started, asked and ended. Invariant: a peer that is missing or fails is a note with its last line, a child that fails
is ``BenchInvalid`` with its last line; neither leaves a figure, and nobody waits on a full pipe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from .errors import BenchInvalid

PEERS_VARIABLE = "COPYHOLD_PEERS"
_ROOT = Path(__file__).resolve().parents[1]
_LONGEST_S = 1800


class PeerNote(msgspec.Struct, frozen=True):
    """Why a peer has no figure, as the report says it."""

    text: str


class Peer(msgspec.Struct, frozen=True):
    """A peer by the name its notes carry and its script; ``root`` holds ``benchmarks`` and ``.venv-peers``."""

    name: str
    script: str
    root: Path = _ROOT

    @property
    def python(self) -> Path:
        """The interpreter of the peers' environment."""
        named = os.environ.get(PEERS_VARIABLE)
        return (Path(named) if named else self.root / ".venv-peers") / "bin" / "python"

    @property
    def path(self) -> Path:
        """The peer's script."""
        return self.root / "benchmarks" / self.script

    @property
    def is_installed(self) -> bool:
        return self.python.exists() and self.path.exists()

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), str(self.path), *arguments]

    def note(self, reason: object) -> PeerNote:
        return PeerNote(f"{self.name} was not measured: {reason}")

    def not_installed(self) -> PeerNote:
        return self.note("`make bench-peers` installs it in an environment of its own")


def run_peer(peer: Peer, *arguments: str) -> dict[str, Any] | PeerNote:
    """The document on the last line of the peer's standard output, or why there is none."""
    if not peer.is_installed:
        return peer.not_installed()
    try:
        done = subprocess.run(
            peer.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return peer.note(f"it took longer than {_LONGEST_S} s")
    except OSError as error:
        return peer.note(error)
    if done.returncode:
        return peer.note(_last_words(done.stderr, done.returncode))
    return json.loads(done.stdout.strip().splitlines()[-1])


class PeerProcess:
    """A running peer that answers a line with a line. Raises: ``BenchInvalid`` when it ended, with its last words."""

    def __init__(self, peer: Peer, *arguments: str, own_session: bool = False) -> None:
        """Returns when its first line came; ask ``is_installed`` first. ``own_session``: Linux shares a busy machine
        out by session."""
        self._peer = peer
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                peer.command(*arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=own_session,
            )
        except OSError as error:
            self._errors.close()
            raise BenchInvalid(str(error)) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asked, self._answers = self._process.stdin, self._process.stdout
        if not self._answers.readline():
            last = self._end()
            self.close()
            raise BenchInvalid(last)

    def ask(self, line: str) -> str:
        """The line that answers."""
        try:
            self._asked.write(f"{line}\n")
            self._asked.flush()
        except BrokenPipeError as error:
            raise BenchInvalid(f"{self._peer.name} ended: {self._end()}") from error
        answer = self._answers.readline()
        if not answer:
            raise BenchInvalid(f"{self._peer.name} ended: {self._end()}")
        return answer

    def close(self) -> None:
        """End the process; safe to call twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._asked, self._answers, self._errors):
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # what a peer that ended was still to read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _end(self) -> str:
        """Wait for the end; the last words."""
        self._process.wait()
        self._errors.seek(0)
        return _last_words(self._errors.read(), self._process.returncode)


def run_child(name: str, module: str, *arguments: str, timeout_s: float | None = None) -> str:
    """The last line of a module's standard output, from a process of its own, so that nothing it loads stays in this one.

    Raises: ``BenchInvalid`` with the last line of a child that failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise BenchInvalid(f"{name} failed: it took longer than {timeout_s:g} s") from error
    if done.returncode:
        raise BenchInvalid(
            f"{name} failed: {_last_words(done.stderr.decode(errors='replace'), done.returncode)}"
        )
    return done.stdout.splitlines()[-1].decode()


def _last_words(errors: str, returncode: int) -> str:
    lines = errors.strip().splitlines()
    return lines[-1] if lines else f"exit code {returncode}"
