"""A Ray cluster that is not the server's own: a head on ports, folder and token of its own, with a job server."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from store_servers import free_port

from copyhold.cluster.processes import die_with_parent, end_processes, run_processes

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = ROOT / "deploy" / "ray-job" / "submit.sh"
CPUS = 8
_FACTS = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
from ray.util.placement_group import placement_group_table
sum_of = ray.remote(num_cpus=1)(lambda a, b: a + b)
print(json.dumps({
    "answer": ray.get(sum_of.remote(40, 2)),
    "actors": [a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"].startswith("copyhold")],
    "groups": sorted({group["state"] for group in placement_group_table().values()}),
    "nodes": [node["Alive"] for node in ray.nodes()],
}))
"""


@dataclass
class RayHead:
    """A running head and how to talk to it. Nobody ends it but the test: `ray stop` would end every Ray there is."""

    folder: Path
    address: str
    dashboard: str
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """What the cluster's users have: where it is, and its token. `copyhold` and `python` are on PATH."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return kept | {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_ADDRESS": self.address,
            "RAY_API_SERVER_ADDRESS": self.dashboard,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """deploy/ray-job/submit.sh, as a user calls it."""
        return self._run([str(SUBMIT), *arguments])

    def job(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`ray job`."""
        return self._run(["ray", "job", *arguments])

    def facts(self) -> dict[str, Any]:
        """What a stranger on the cluster sees: actors of servers, states of placement groups, a task's answer."""
        done = self._run([sys.executable, "-c", _FACTS, self.address])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = self.environment
        if command[0] == "ray" or command[0] == str(SUBMIT):
            del environment["RAY_ADDRESS"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=environment
        )


@contextlib.contextmanager
def ray_head() -> Iterator[RayHead]:
    """Start a head; on exit its processes are ended by their ids and its folder is removed."""
    with tempfile.TemporaryDirectory(prefix="chr-", dir="/tmp") as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        script = folder / "bin" / "copyhold"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m copyhold "$@"\n')
        script.chmod(0o700)
        with os.fdopen(os.open(folder / "token", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        port, dashboard_port = free_port(), free_port()
        head = RayHead(
            folder,
            f"127.0.0.1:{port}",
            f"http://127.0.0.1:{dashboard_port}",
            _start(folder, port, dashboard_port),
        )
        try:
            yield head
        finally:
            left = end_processes(lambda: run_processes(str(folder), [head.process.pid]), 2.0, 10.0)
            head.process.wait()
            assert not left


def _start(folder: Path, port: int, dashboard_port: int) -> subprocess.Popen[bytes]:
    options = {
        "--port": port,
        "--dashboard-host": "127.0.0.1",
        "--dashboard-port": dashboard_port,
        "--dashboard-agent-listen-port": free_port(),
        "--ray-client-server-port": free_port(),
        "--node-ip-address": "127.0.0.1",
        "--num-cpus": CPUS,
        "--object-store-memory": 100 << 20,
        "--temp-dir": folder / "ray",
    }
    command = ["ray", "start", "--head", "--block", *(str(word) for pair in options.items() for word in pair)]
    environment = RayHead(folder, "", "", None).environment  # pyright: ignore[reportArgumentType]
    process = subprocess.Popen(
        command,
        env=environment | {"RAY_ADDRESS": "", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent(),
    )
    assert process.stdout is not None
    said = b""
    for line in process.stdout:
        said += line
        if b"--block" in line:
            break
    else:
        raise AssertionError(said.decode(errors="replace"))
    threading.Thread(target=process.stdout.read, daemon=True).start()
    _wait_for(dashboard_port)
    return process


def _wait_for(port: int) -> None:
    """Until somebody listens; the pause is the kernel's answer to a refused connection."""
    pause = threading.Event()
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        pause.wait(0.05)
    raise AssertionError(f"nothing listens on port {port}")
