"""kill -9 of every kind of process of a serving cluster: noticed, answered, repaired, and nothing left (case B30)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_cluster import LiveServer, run_server, tiny_config, wait_until

from copyhold.cluster.sdk import CopyholdError

BAD_WITHIN_S = 10.0
GOOD_WITHIN_S = 60.0
LONG = 300
PROMPT = [{"role": "user", "content": "Tell me of the harbour, its ropes and its ships. " * 8}]


@pytest.fixture(scope="module")
def victim(tiny_model: Path, model_cache: Path) -> Iterator[LiveServer]:
    """A server of its own: its processes are killed."""
    yield from run_server(tiny_config(tiny_model, model_cache, tp=2))


def process_of(server: LiveServer, kind: str) -> psutil.Process:
    """The process of an actor or a store, by what it calls itself."""
    titles = {
        "rank": "ray::TPWorker",
        "replica": "ray::Replica",
        "coordinator": "ray::Coordinator",
        "authority": "ray::NamespaceActor",
        "gateway": "ray::Gateway",
    }
    for pid in server.supervisor.pids():
        try:
            process = psutil.Process(pid)
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if kind in titles and line.startswith(titles[kind]):
            return process
        if kind.endswith("-store") and f"/{kind.removesuffix('-store')}.sock" in line:
            return process
    raise AssertionError(f"no process of kind {kind}")


def is_ready(server: LiveServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health/ready", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def within(seconds: float, condition: Callable[[], bool], what: str) -> float:
    """Ask until it holds; how long that took. Each question waits for an answer of the server or of the kernel."""
    started_s = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - started_s < seconds, f"{what} did not happen within {seconds:g} s"
        pause.wait(0.02)
    return time.monotonic() - started_s


class Running:
    """Two long requests on threads; how each ended."""

    def __init__(self, client: Any) -> None:
        self.outcomes: list[str] = []
        self.started = threading.Barrier(3)
        self._threads = [threading.Thread(target=self._run, args=(client,)) for _ in range(2)]

    def __enter__(self) -> Running:
        for thread in self._threads:
            thread.start()
        self.started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(GOOD_WITHIN_S)
            assert not thread.is_alive(), "a request hangs"

    def _run(self, client: Any) -> None:
        waited = False
        try:
            with client.stream(PROMPT, max_tokens=LONG, ignore_eos=True, return_token_ids=True) as stream:
                for _ in stream:
                    if not waited:
                        waited = True
                        self.started.wait(60)
            self.outcomes.append(f"finished {stream.token_ids}")
        except CopyholdError as error:
            self.outcomes.append(f"error {error.code}")
            if not waited:
                self.started.wait(60)


@pytest.mark.parametrize(
    "kind", ["rank", "replica", "coordinator", "authority", "gateway", "authority-store", "sessions-store"]
)
def test_a_killed_process_is_noticed_answered_and_replaced(
    victim: LiveServer, kind: str, soak_round: int
) -> None:
    server = victim
    within(GOOD_WITHIN_S, lambda: is_ready(server), "the server being ready before")
    tenant = server.tenant()
    reference = tenant.client.chat(PROMPT, max_tokens=12, ignore_eos=True).text
    with tenant.client.stream(PROMPT, max_tokens=LONG, ignore_eos=True, return_token_ids=True) as stream:
        stream.reply()
    uninterrupted = f"finished {stream.token_ids}"
    doomed = process_of(server, kind)
    with Running(tenant.client) as running:
        os.kill(doomed.pid, signal.SIGKILL)
        if not kind.endswith("-store") and kind != "coordinator":
            within(BAD_WITHIN_S, lambda: not is_ready(server), "health turning bad")
    # A gateway takes its connections with it; of anything else a running request is not to know.
    expected = (
        {"error stream_incomplete", "error connection_failed"} if kind == "gateway" else {uninterrupted}
    )
    assert len(running.outcomes) == 2 and set(running.outcomes) <= expected, (running.outcomes, expected)
    within(GOOD_WITHIN_S, lambda: is_ready(server), "health turning good")
    wait_until(lambda: tenant_answers(tenant.client, reference), timeout_s=GOOD_WITHIN_S)
    server.assert_quiet()
    assert not doomed.is_running() or doomed.status() == psutil.STATUS_ZOMBIE


def test_a_rank_that_hangs_is_noticed_and_replaced(victim: LiveServer, soak_round: int) -> None:
    server = victim
    within(GOOD_WITHIN_S, lambda: is_ready(server), "the server being ready before")
    tenant = server.tenant()
    reference = tenant.client.chat(PROMPT, max_tokens=12, ignore_eos=True).text
    doomed = process_of(server, "rank")
    doomed.suspend()
    within(BAD_WITHIN_S, lambda: not is_ready(server), "health turning bad")
    within(GOOD_WITHIN_S, lambda: is_ready(server), "health turning good")
    wait_until(lambda: tenant_answers(tenant.client, reference), timeout_s=GOOD_WITHIN_S)
    server.assert_quiet()
    assert not doomed.is_running() or doomed.status() == psutil.STATUS_ZOMBIE


def tenant_answers(client: Any, reference: str) -> bool:
    """The same greedy answer as before, whatever was lost in between."""
    try:
        text = client.chat(PROMPT, max_tokens=12, ignore_eos=True).text
    except CopyholdError:
        return False
    assert text == reference
    return True
