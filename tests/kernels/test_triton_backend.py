"""The Triton backend where it cannot run: it says why, costs nothing, and its benchmark measures nothing."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton_process import needs_interpreter, needs_triton

from copyhold.kernels import triton_backend
from copyhold.kernels.dispatch import choose_kernels, kernel_report
from copyhold.kernels.errors import NoKernelBackend
from copyhold.kernels.interface import KernelBackend, KernelRequest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = ROOT / "benchmarks" / "triton_h200.py"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


def run(*arguments: str, interpret: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_backend.unavailable() == (
        "triton_not_installed",
        "triton is not installed: the extra `triton` brings it",
    )


@needs_triton
@needs_no_gpu
def test_without_a_gpu_it_says_so() -> None:
    found = triton_backend.unavailable()
    assert found is not None and found[0] == "no_cuda_device" and found[1].startswith("no CUDA device")


@needs_triton
@needs_no_gpu
def test_the_choice_shows_why_it_was_passed_over() -> None:
    shown = kernel_report(choose_kernels("auto", "auto", 3, 64, 16))
    first = shown["considered"][0]
    assert shown["backend"] == "cpu" and (first["backend"], first["outcome"]) == ("triton", "no_cuda_device")
    with pytest.raises(NoKernelBackend, match="triton: no CUDA device"):
        choose_kernels("triton", "auto", 3, 64, 16)


def test_with_a_gpu_the_layout_is_checked_and_models_are_still_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_backend, "unavailable", lambda: None)
    for block_size, outcome in ((24, "unsupported_kernel_block_size"), (16, "host_activations")):
        refused = triton_backend.refusal(KernelRequest("float32", 3, 64, block_size))
        assert refused is not None and refused.outcome == outcome and refused.why


def test_it_has_every_function_with_the_interfaces_parameters() -> None:
    checked = 0
    for name, asked in inspect.getmembers(KernelBackend, inspect.isfunction):
        if not name.startswith("_") and name not in ("NAME", "refusal"):
            parameters = list(inspect.signature(getattr(triton_backend, name)).parameters)
            assert parameters == list(inspect.signature(asked).parameters)[1:], name
            checked += 1
    assert checked >= 10


def test_asking_it_loads_no_triton_and_importing_it_no_torch() -> None:
    code = (
        "import sys; from copyhold.kernels import triton_backend; "
        "heavy = {'torch', 'triton', 'numba'} & set(sys.modules); assert not heavy, heavy; "
        "triton_backend.unavailable(); assert 'triton' not in sys.modules"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr


@needs_no_gpu
def test_the_benchmark_measures_nothing_without_a_gpu() -> None:
    done = run(str(BENCHMARK), "--json")
    shown = json.loads(done.stdout)
    assert done.returncode == 3 and shown["ok"] is False and shown["rows"] == []
    assert "nothing was measured" in done.stderr and ("CUDA" in done.stderr or "triton" in done.stderr)


@needs_triton
@needs_interpreter
def test_every_line_of_the_benchmark_runs_in_the_interpreter() -> None:
    done = run(str(BENCHMARK), "--rehearse", "--json", interpret=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    errors = [row for name, row in rows.items() if name.startswith("error, ")]
    assert len(errors) == 24 and all(row["meets"] for row in errors)
    assert rows["row kernels exact"]["meets"] and "shared 3x32" in rows
    assert rows["decode bf16, 64 x 4096"]["peers"].keys() == {"torch sdpa, contiguous"}
