"""Runs a script of this folder in a process of its own, since Triton decides once a process to interpret or to compile."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (extra `triton`, Linux)"
)
needs_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None and version("triton") < "3.7",
    reason="the interpreter of Triton before 3.7 cannot loop over a range with NumPy 2.4; its compiler can",
)


def results_of(script: str, *, interpret: bool) -> dict[str, Any]:
    """The JSON object that the script prints; compiled kernels are cached in the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(SUPPORT)]),
        "TRITON_CACHE_DIR": str(ROOT / ".cache" / "triton"),
        "OMP_NUM_THREADS": "1",
        **({"TRITON_INTERPRET": "1"} if interpret else {}),
    }
    command = [sys.executable, str(SUPPORT / script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
