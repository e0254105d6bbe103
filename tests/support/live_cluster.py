"""Real servers for tests: real Ray, real stores, real HTTP, and what a test needs to talk to one."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from copyhold.cluster.admin_client import AdminClient
from copyhold.cluster.config import Config
from copyhold.cluster.prepare import prepared_model
from copyhold.cluster.sdk import Client
from copyhold.cluster.supervisor import Supervisor, leftovers
from copyhold.models.tokenizer import ChatTokenizer

_names = itertools.count(1)


@dataclass
class Tenant:
    """A fresh tenant of a shared server."""

    name: str
    key: str
    url: str
    client: Client


@dataclass
class LiveServer:
    """A running server and what tests need to talk to it."""

    supervisor: Supervisor
    admin: AdminClient
    tokenizer: ChatTokenizer
    clients: list[Client] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.supervisor.url

    def tenant(self) -> Tenant:
        name = f"tenant-{next(_names)}"
        key = self.admin.create_tenant(name)["key"]
        client = Client(self.url, key, timeout_s=60.0)
        self.clients.append(client)
        return Tenant(name, key, self.url, client)

    def pool(self) -> dict[str, Any]:
        return self.admin.pool()["replicas"][0]

    def replica(self) -> dict[str, Any]:
        return self.admin.status()["replicas"][0]

    def assert_quiet(self) -> None:
        """Nothing runs, nothing is held, the parts sum up (quiet check Q)."""
        wait_until(lambda: self.replica()["running"] == self.replica()["waiting"] == 0)
        pool = self.pool()
        assert pool["live"] == pool["reserved"] == 0, pool
        assert pool["free"] + pool["evictable"] == pool["total"], pool
        assert self.replica()["agreement"]["differing"] == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Ask until it holds; each question is a request to the server, which paces the loop."""
    import time

    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true in time"


def tiny_config(model: Path, cache: Path, **changes: Any) -> Config:
    """A small server on the tiny checkpoint, with state of its own that is gone on exit."""
    settings: dict[str, Any] = {
        "port": 0,
        "state_dir": "",
        "model": str(model),
        "cache_dir": str(cache),
        "pool_tokens": 16384,
        "max_model_len": 1024,
        "served_model_name": "tiny",
    }
    return Config(**(settings | changes))


def run_server(config: Config) -> Iterator[LiveServer]:
    with Supervisor(config) as supervisor:
        tokenizer = ChatTokenizer.load(Path(prepared_model(supervisor.run_dir).path))
        with AdminClient(supervisor.admin_socket) as admin:
            live = LiveServer(supervisor, admin, tokenizer)
            yield live
            for client in live.clients:
                client.close()
    assert leftovers(supervisor) == []


SERVE = [sys.executable, "-c", "from copyhold.cluster.cli import main; main()"]


def copyhold(*arguments: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    """The command line, as a process of its own."""
    return subprocess.run(
        [*SERVE, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )


def runs(base: Path) -> list[str]:
    """What is left in the folder that run folders are made in."""
    return sorted(path.name for path in base.iterdir()) if base.exists() else []


def marked_processes(base: Path) -> list[int]:
    """Processes whose environment carries the mark of a run below ``base``."""
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get("COPYHOLD_RUN", "")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if mark.startswith(str(base)) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def options(run_base: Path, model: Path, cache: Path) -> list[str]:
    return ["--model", str(model), "--cache-dir", str(cache), "--run-dir", str(run_base), "--port", "0"]


def default_interrupt() -> None:
    """For ``preexec_fn``: a suite started in the background of a script passes an ignored SIGINT on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def serving(arguments: list[str]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """``copyhold serve --json`` as a process, once it serves, and what it printed."""
    process = subprocess.Popen(
        [*SERVE, "serve", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_interrupt,
    )
    assert process.stdout is not None
    text = ""
    while "\n}\n" not in text:
        line = process.stdout.readline()
        assert line, process.communicate()
        text += line
    return process, json.loads(text)
