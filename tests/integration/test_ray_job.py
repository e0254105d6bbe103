"""Servers on a Ray cluster that was there before them and stays: joined from outside, and submitted as jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_cluster import copyhold, marked_processes, options, run_server, runs, tiny_config
from ray_head import CPUS, ROOT, RayHead, ray_head

from copyhold.cluster.admin_client import AdminClient
from copyhold.cluster.errors import NotRunning
from copyhold.cluster.sdk import Client
from copyhold.cluster.server_record import ServerRecord, find_server

PROMPT = [{"role": "user", "content": "Tell me of the harbour, its ropes and its ships. " * 8}]
JOINING = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head() as running:
        yield running


@pytest.fixture
def joining(head: RayHead, monkeypatch: pytest.MonkeyPatch) -> RayHead:
    """The head, with its token in this process's environment."""
    for name in JOINING:
        monkeypatch.setenv(name, head.environment[name])
    return head


def nothing_is_left(head: RayHead, run_base: Path) -> None:
    """No process, folder, shared memory, actor or placement group of a server; and the cluster works."""
    assert runs(run_base) == []
    assert marked_processes(run_base) == []
    assert [name for name in os.listdir("/dev/shm") if run_base.name in name] == []
    facts = head.facts()
    assert facts["actors"] == [], facts
    assert set(facts["groups"]) <= {"REMOVED"}, facts
    assert facts["answer"] == 42 and facts["nodes"] == [True]


def served_from(state: Path, head: RayHead, job: str) -> ServerRecord:
    """The record of a server that starts as a job. A look is a file read; a pause is an event that never comes."""
    deadline_s, pause = time.monotonic() + 120, threading.Event()
    while time.monotonic() < deadline_s:
        try:
            return find_server(state)
        except NotRunning:
            pause.wait(0.1)
    raise AssertionError(head.job("logs", job).stdout)


def chat(record: ServerRecord, tenant: str) -> tuple[str, str]:
    """Two equal questions of a new tenant: the second reuses the first; its text, and its key."""
    with AdminClient(record.admin_socket) as admin:
        key = admin.create_tenant(tenant)["key"]
        ranks = admin.ranks()["ranks"]
    assert [rank["kernel_compilations"] for rank in ranks] == [0, 0]
    client = Client(record.url, key, timeout_s=60.0)
    cold, warm = (client.chat(PROMPT, max_tokens=12, ignore_eos=True) for _ in range(2))
    client.close()
    assert cold.cached_tokens == 0 and warm.cached_tokens > 0 and warm.text == cold.text
    return warm.text, key


def test_a_served_job_answers_beside_another_server_until_it_is_stopped(
    joining: RayHead,
    run_base: Path,
    tiny_model: Path,
    model_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, state = joining, tmp_path / "state"
    arguments = [*options(run_base, tiny_model, model_cache), "--state-dir", str(state)]
    submitted = head.submit("--no-wait", "--submission-id", "served", "--", "serve", *arguments)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    record = served_from(state, head, "served")
    text, key = chat(record, "early")

    # A second server joins from outside, from sources that the cluster's workers do not have: they are sent.
    sources = tmp_path / "src"
    shutil.copytree(ROOT / "src" / "copyhold", sources / "copyhold", symlinks=False)
    with (sources / "copyhold" / "kvcore" / "errors.py").open("a") as file:
        file.write("\n# sources that only this server has\n")
    monkeypatch.setenv("PYTHONPATH", str(sources))
    config = tiny_config(tiny_model, model_cache, run_dir=str(run_base), address=head.address)
    for second in run_server(config):
        supervisor = second.supervisor
        own = ServerRecord(record.process, supervisor.url, supervisor.admin_socket, str(supervisor.run_dir))
        assert chat(own, "other")[0] == text, "the same model, in the first server's words"
        worker = rank_process(supervisor.pids())
        assert "/py_modules_files/" in worker.environ()["PYTHONPATH"]
        assert len({actor["namespace"] for actor in head.facts()["actors"]}) == 2
    with Client(record.url, key, timeout_s=60.0) as client:
        assert client.chat(PROMPT, max_tokens=12, ignore_eos=True).text == text, "the first serves on"

    log = head.job("logs", "served").stdout
    assert record.url in log and "ch_" not in log, log
    stopped = head.job("stop", "served")
    assert "was stopped" in stopped.stdout + stopped.stderr, stopped
    assert "stopping" in head.job("logs", "served").stdout
    nothing_is_left(head, run_base)


def rank_process(pids: list[int]) -> psutil.Process:
    """One of the ranks among these processes."""
    found = (psutil.Process(pid) for pid in pids)
    return next(process for process in found if "ray::TPWorker" in " ".join(process.cmdline()))


def test_a_demo_job_prints_its_checks_and_succeeds(head: RayHead, run_base: Path, model_cache: Path) -> None:
    done = head.submit("--", "demo", "--json", "--cache-dir", str(model_cache), "--run-dir", str(run_base))
    document = printed_document(done.stdout)
    assert document["ok"] and done.returncode == 0, [c for c in document["checks"] if not c["ok"]]
    assert {check["name"] for check in document["checks"]} >= {
        "turns/acme",
        "revocation/zeroed",
        "stop/leftovers",
    }
    nothing_is_left(head, run_base)


def printed_document(log: str) -> dict[str, Any]:
    """The one JSON document in a job's log, which has standard error in it too."""
    start = log.find("\n{\n")
    assert start >= 0, log
    return json.JSONDecoder().raw_decode(log[start + 1 :])[0]


@pytest.mark.parametrize(
    ("more", "token", "says"),
    [
        (["--replicas", "3"], None, f"cluster_too_small: 9 logical CPUs are needed, one .* has {CPUS} "),
        ([], "/dev/null", "cluster_unavailable: cannot join .* RAY_AUTH_TOKEN_PATH"),
    ],
    ids=["too many replicas", "no token"],
)
def test_a_cluster_that_cannot_be_joined_is_one_line(
    joining: RayHead,
    monkeypatch: pytest.MonkeyPatch,
    run_base: Path,
    tiny_model: Path,
    model_cache: Path,
    more: list[str],
    token: str | None,
    says: str,
) -> None:
    if token is not None:
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", token)
    arguments = [*options(run_base, tiny_model, model_cache), "--state-dir", "", "--address", joining.address]
    done = copyhold("serve", *arguments, *more)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("copyhold: ")]
    assert re.match(f"copyhold: {says}", line), line
    assert runs(run_base) == [] and marked_processes(run_base) == []
