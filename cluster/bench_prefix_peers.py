"""vLLM's block manager and SGLang's radix caches as peers of ``copyhold bench prefix``: processes of their own environment.

``make bench-peers`` makes that environment in ``.venv-peers``. Invariant: where it is missing or a peer fails, there is a note
and no figure.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Samples = Mapping[str, Sequence[float]]
_ROOT = Path(__file__).resolve().parents[1]
_LONGEST_S = 1800
_SCRIPTS = {"vLLM": "vllm_prefix.py", "SGLang": "sglang_prefix.py"}


def measure_peers(
    load: Path, runs: int, plays: int, root: Path = _ROOT
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    """Samples by peer and row name, and notes. `root` holds `.venv-peers` and `benchmarks`."""
    python = root / ".venv-peers" / "bin" / "python"
    found: dict[str, Samples] = {}
    notes: list[str] = []
    for peer, script in _SCRIPTS.items():
        path = root / "benchmarks" / script
        if not python.exists() or not path.exists():
            notes.append(
                f"{peer} was not measured: `make bench-peers` installs it in an environment of its own"
            )
            continue
        asked = [str(python), str(path), str(load), str(runs), str(plays)]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
        except subprocess.TimeoutExpired:
            notes.append(f"{peer} was not measured: it took longer than {_LONGEST_S} s")
            continue
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no output"]
            notes.append(f"{peer} was not measured: {last[0]}")
            continue
        found |= json.loads(done.stdout.strip().splitlines()[-1])
    return found, tuple(notes)
