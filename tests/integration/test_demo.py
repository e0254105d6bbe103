"""The demonstration itself, on the real checkpoint: it holds, its document is complete, an interrupt leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from live_cluster import SERVE, copyhold, default_interrupt, marked_processes, runs


def test_the_demonstration_holds_and_reports_everything(run_base: Path) -> None:
    done = copyhold("demo", "--json", "--run-dir", str(run_base), timeout_s=400)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    failed = [check for check in document["checks"] if not check["ok"]]
    assert not failed, failed
    assert document["ok"] and done.returncode == 0
    expected = {"ok", "checks", "turns", "isolation", "explain", "revocation", "ranks", "pool", "elapsed_s"}
    assert expected <= set(document)
    assert [turn["turn"] for turn in document["turns"]] == [1, 2, 3, 4] * 2
    assert document["revocation"]["not_covered"]
    assert document["ranks"]["agreement"]["compared_log_indices"] >= 50
    assert runs(run_base) == []
    assert marked_processes(run_base) == []


@pytest.mark.parametrize("stage", ["ray", "turns"])
def test_an_interrupted_demonstration_leaves_nothing(run_base: Path, stage: str) -> None:
    command = [*SERVE, "demo", "--run-dir", str(run_base)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupt
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(f"{stage}:"):
                break
        else:
            raise AssertionError(f"stage {stage} was never reached")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert runs(run_base) == []
    assert marked_processes(run_base) == []
    assert not [name for name in os.listdir("/dev/shm") if "copyhold" in name]


def test_a_demonstration_that_cannot_start_leaves_nothing(run_base: Path, tmp_path: Path) -> None:
    done = copyhold("demo", "--json", "--model", str(tmp_path / "absent.gguf"), "--run-dir", str(run_base))
    assert done.returncode not in (0, None)
    assert json.loads(done.stdout)["ok"] is False
    assert "absent.gguf" in done.stderr
    assert runs(run_base) == []
    assert marked_processes(run_base) == []
