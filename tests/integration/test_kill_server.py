"""kill -9 of the driver and of the supervisor: nothing of the server goes on, and the next start clears what is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from live_cluster import marked_processes, options, run_server, runs, serving, tiny_config

GONE_WITHIN_S = 10.0


def within(seconds: float, condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} within {seconds:g} s"
        pause.wait(0.05)


def shared_memory_of(run: str) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if run in name]


def driver_pid(run_base: Path) -> int:
    for pid in marked_processes(run_base):
        if "copyhold.cluster.driver" in psutil.Process(pid).cmdline():
            return pid
    raise AssertionError("no driver runs")


def test_a_killed_driver_takes_everything_with_it(
    run_base: Path, tiny_model: Path, tmp_path: Path, model_cache: Path, soak_round: int
) -> None:
    state = str(tmp_path / "state")
    process, _ = serving([*options(run_base, tiny_model, model_cache), "--state-dir", state])
    (run,) = runs(run_base)
    os.kill(driver_pid(run_base), signal.SIGKILL)
    within(GONE_WITHIN_S, lambda: not marked_processes(run_base), "every process gone")
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    lines = [line for line in errors.splitlines() if line.startswith("copyhold: ")]
    assert len(lines) == 1 and "driver" in lines[0], errors
    assert runs(run_base) == []
    assert shared_memory_of(run) == []


def test_a_killed_supervisor_leaves_no_process_and_the_next_start_clears_its_files(
    run_base: Path, tiny_model: Path, tmp_path: Path, model_cache: Path, soak_round: int
) -> None:
    state = str(tmp_path / "state")
    arguments = [*options(run_base, tiny_model, model_cache), "--state-dir", state]
    process, _ = serving(arguments)
    (run,) = runs(run_base)
    process.kill()
    process.communicate(timeout=30)
    within(GONE_WITHIN_S, lambda: not marked_processes(run_base), "every process gone")
    config = tiny_config(tiny_model, model_cache, run_dir=str(run_base), state_dir=state, tp=1)
    for server in run_server(config):
        assert run not in runs(run_base), "the killed server's folder is gone"
        assert len(runs(run_base)) == 1
        key = server.admin.create_key("acme")["key"]
        assert key, "the state outlived the kill"
    assert runs(run_base) == []
    assert shared_memory_of(run) == []
