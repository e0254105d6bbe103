"""Embedded stores under a monitor: killed and back on the same data, held, stopped at the worst moment, never orphaned."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from copyhold.cluster.errors import StoreFailed
from copyhold.cluster.processes import identity, wait_for_end
from copyhold.cluster.store_monitor import EmbeddedStore, StoreMonitor

BACK_WITHIN_S = 2.0


class Stores:
    """Two stores under one monitor, and what it reported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[str] = []
        self.reported = threading.Semaphore(0)
        self.specs = [
            EmbeddedStore("authority", folder / "a.sock", folder / "a", folder / "a.log", "always"),
            EmbeddedStore("sessions", folder / "s.sock", folder / "s", folder / "s.log", "everysec"),
        ]
        self.monitor = StoreMonitor(self.specs, dict(os.environ), 20.0, self.report)

    def report(self, text: str) -> None:
        self.reports.append(text)
        self.reported.release()

    def client(self, name: str) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.folder / f"{name}.sock"))

    def pid(self, name: str) -> int:
        client = self.client(name)
        pid = int(client.info("server")["process_id"])  # pyright: ignore[reportArgumentType, reportIndexIssue]
        client.close()
        return pid


@pytest.fixture
def stores() -> Iterator[Stores]:
    folder = Path("/tmp") / f"chmon-{os.getpid()}"
    folder.mkdir(mode=0o700)
    made = Stores(folder)
    yield made
    made.monitor.stop()
    gone = [identity(pid) for pid in made.monitor.sessions]
    shutil.rmtree(folder)
    assert gone == [None] * len(gone), "no store outlives its monitor"


@pytest.mark.parametrize("name", ["a", "s"])
def test_a_killed_store_is_back_on_its_data_within_two_seconds(stores: Stores, name: str) -> None:
    stores.monitor.start()
    client = stores.client(name)
    client.set("kept", "yes")
    client.waitaof(1, 0, 5000)
    before, other = stores.pid(name), stores.pid({"a": "s", "s": "a"}[name])
    began_s = time.monotonic()
    os.kill(before, signal.SIGKILL)
    assert stores.reported.acquire(timeout=BACK_WITHIN_S)
    assert time.monotonic() - began_s < BACK_WITHIN_S
    assert client.get("kept") == b"yes"
    client.close()
    assert stores.pid(name) != before and stores.pid({"a": "s", "s": "a"}[name]) == other
    assert "ended by signal SIGKILL; it answers again after" in stores.reports[0]
    assert stores.monitor.pids == {stores.pid("a"), stores.pid("s")}
    assert len(stores.monitor.sessions) == 3


def test_a_store_that_dies_again_is_brought_back_again(stores: Stores) -> None:
    stores.monitor.start()
    for _ in range(2):
        os.kill(stores.pid("s"), signal.SIGTERM)
        assert stores.reported.acquire(timeout=5.0)
    assert all("ended with status 0" in report for report in stores.reports)
    assert stores.pid("s")


def test_a_store_that_cannot_come_back_is_reported_and_tried_again(stores: Stores) -> None:
    stores.monitor.start()
    manifest = stores.folder / "a" / "appendonlydir" / "appendonly.aof.manifest"
    right = manifest.read_text()
    manifest.write_text("nonsense\n")
    os.kill(stores.pid("a"), signal.SIGKILL)
    assert stores.reported.acquire(timeout=5.0)
    assert "cannot be started again: the authority store ended with status 1" in stores.reports[0]
    manifest.write_text(right)
    while "answers again" not in stores.reports[-1]:
        assert stores.reported.acquire(timeout=5.0)
    assert stores.pid("a")


def test_nothing_comes_back_once_held(stores: Stores) -> None:
    stores.monitor.start()
    pid = stores.pid("a")
    victim = identity(pid)
    assert victim is not None
    stores.monitor.hold()
    os.kill(pid, signal.SIGKILL)
    wait_for_end([victim], 5.0)
    stores.monitor.stop()
    assert len(stores.monitor.sessions) == 2 and stores.reports == []


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.02, 0.05])
def test_stopping_while_a_store_comes_back_leaves_none(stores: Stores, delay_s: float) -> None:
    stores.monitor.start()
    os.kill(stores.pid("a"), signal.SIGKILL)
    threading.Event().wait(delay_s)
    stores.monitor.hold()
    stores.monitor.stop()
    assert not (stores.folder / "a.sock").exists()


def test_a_store_that_does_not_start_fails_the_start_and_leaves_none(stores: Stores) -> None:
    (stores.folder / "s" / "appendonlydir").mkdir(parents=True)
    (stores.folder / "s" / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(StoreFailed, match="the sessions store ended with status 1"):
        stores.monitor.start()
    assert not (stores.folder / "a.sock").exists()


def test_stores_end_with_a_killed_parent() -> None:
    folder = Path("/tmp") / f"chmonp-{os.getpid()}"
    folder.mkdir(mode=0o700)
    program = (
        "import os, sys; from pathlib import Path; "
        "from copyhold.cluster.store_monitor import EmbeddedStore, StoreMonitor; f = Path(sys.argv[1]); "
        "m = StoreMonitor([EmbeddedStore('a', f / 'a.sock', f / 'a', f / 'a.log', 'always')], "
        "dict(os.environ), 20.0, print); m.start(); print(*m.pids, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as host:
        assert host.stdout is not None
        store = identity(int(host.stdout.readline()))
        assert store is not None and store.alive
        host.kill()
        wait_for_end([store], 5.0)
        assert not store.alive
    shutil.rmtree(folder)
