"""vLLM's block manager as the peer of ``copyhold bench ledger``: a process of its own environment, in the same call.

``make bench-peers`` makes that environment in ``.venv-peers``. Invariant: where it is missing or fails, there is a note and
no figure.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

Samples = Mapping[str, Sequence[float]]
_ROOT = Path(__file__).resolve().parents[1]
_LONGEST_S = 1800
_NOTE = "vLLM was not measured: {}"


def measure_vllm(
    runs: int, decoding: Sequence[int], pools: Sequence[int], root: Path = _ROOT
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    """Samples in us by peer and row name, and notes. `root` holds `.venv-peers` and `benchmarks`."""
    python, script = root / ".venv-peers" / "bin" / "python", root / "benchmarks" / "vllm_ledger.py"
    if not python.exists() or not script.exists():
        return {}, (_NOTE.format("`make bench-peers` installs it in an environment of its own"),)
    asked = json.dumps({"runs": runs, "decoding": list(decoding), "pools": list(pools)})
    try:
        done = subprocess.run(
            [str(python), str(script), asked], capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, (_NOTE.format(f"it took longer than {_LONGEST_S} s"),)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {}, (_NOTE.format(last[0]),)
    return {"vllm": json.loads(done.stdout.strip().splitlines()[-1])}, ()
