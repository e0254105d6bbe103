"""vLLM's engine as the peer of the rows ``56m``: a process of its own environment that answers one measure at a time.

``make bench-peers`` makes that environment in ``.venv-peers``. Owns the process. Invariant: where it is missing or fails, there
is a note and no figure; between measures it sleeps.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from .errors import BenchInvalid

_ROOT = Path(__file__).resolve().parents[1]
NOTE = "vLLM was not measured: {}"


class Measure(msgspec.Struct, frozen=True):
    """One batch: seconds to its earliest first token, and from there to its latest end."""

    first_s: float
    decode_s: float


class VllmEngine:
    """A running engine. Raises: ``BenchInvalid`` of ``measure`` and of a start that fails."""

    def __init__(self, model: Path, threads: int, root: Path = _ROOT) -> None:
        """`root` holds `.venv-peers` and `benchmarks`; ask ``is_installed`` first."""
        python, script = _files(root)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close(), with the process
        self._process = subprocess.Popen(
            [str(python), str(script), str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A session of its own, as the server's processes have: Linux shares a busy machine out by session.
            start_new_session=True,
        )
        try:
            self._answer()
        except BenchInvalid:
            self.close()
            raise

    def measure(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, cached_tokens: int | None
    ) -> Measure:
        """Raises: ``BenchInvalid`` when the engine ended or reused other than ``cached_tokens`` (None: any)."""
        asked = {"prompts": prompts, "new_tokens": new_tokens, "cached": cached_tokens}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise BenchInvalid(f"vLLM ended: {self._last_words()}") from error
        return msgspec.json.decode(self._answer(), type=Measure)

    def close(self) -> None:
        """End the process; safe to call twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            pipe.close()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchInvalid(f"vLLM ended: {self._last_words()}")
        return line

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self._process.returncode}"


def is_installed(root: Path = _ROOT) -> bool:
    """Whether the peer's environment and script are there."""
    return all(path.exists() for path in _files(root))


def _files(root: Path) -> tuple[Path, Path]:
    return root / ".venv-peers" / "bin" / "python", root / "benchmarks" / "vllm_serve.py"
