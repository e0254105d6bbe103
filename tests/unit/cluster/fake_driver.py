"""A driver for supervisor tests: real processes with bad manners, chosen by the first argument.

Run as ``fake_driver.py BEHAVIOUR --launch FILE --ready-fd N``. It starts a child and an orphaned grandchild with a
session of its own, both deaf to SIGTERM, leaves named shared memory, answers on the admin socket, then behaves as asked.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any, ClassVar

from copyhold.cluster.launch import LaunchSpec, ReadyPipe, read_launch_spec

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def start_stubborn_family(spec: LaunchSpec) -> None:
    """A child, and an orphan in its own session; their ids go into ``family.txt``."""
    child = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    orphan_maker = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], stdout=subprocess.PIPE, start_new_session=True); "
        "p.stdout.readline(); print(p.pid, flush=True)"
    )
    orphan_pid = subprocess.run(
        [sys.executable, "-c", orphan_maker], stdout=subprocess.PIPE, check=True
    ).stdout
    Path(spec.state_dir, "family.txt").write_text(f"{child.pid} {orphan_pid.decode().strip()}")


def leave_shared_memory(spec: LaunchSpec) -> mmap.mmap:
    """Named memory that nobody unlinks; the name tells whose test made it, and the process."""
    path = f"/dev/shm/fake-driver{Path(spec.run_dir).parent.as_posix().replace('/', '_')}-{os.getpid()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(descriptor, 4096)
    return mmap.mmap(descriptor, 4096)


class Admin(BaseHTTPRequestHandler):
    """Enough of the admin API for the command line: tenants in memory."""

    tenants: ClassVar[dict[str, dict[str, Any]]] = {}

    def do_GET(self) -> None:
        if self.path == "/admin/tenants":
            self._answer(200, {"tenants": list(self.tenants.values())})
        elif self.path == "/admin/status":
            self._answer(
                200,
                {
                    "ready": True,
                    "pool": {"free": 3},
                    "replicas": [{"running": 0, "block_bytes": [8192, 4096]}],
                },
            )
        else:
            self._answer(404, {"error": {"type": "not_found", "message": "no such thing"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        name = body.get("name", "")
        if self.path != "/admin/tenants":
            self._answer(200, {"key": f"ch_{len(self.tenants)}_again"})
        elif name in self.tenants:
            self._answer(409, {"error": {"type": "name_taken", "message": f"tenant {name!r} exists"}})
        else:
            namespaces = body.get("namespaces") or [name]
            self.tenants[name] = {"tenant": name, "namespaces": namespaces}
            self._answer(201, self.tenants[name] | {"key": f"ch_{name}_secret"})

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Behave as the first argument says."""
    behaviour, launch, ready_fd = sys.argv[1], sys.argv[3], int(sys.argv[5])
    spec, pipe = read_launch_spec(launch), ReadyPipe(ready_fd)
    pipe.stage("ray", "starting")
    if behaviour == "report_error":
        pipe.failed("ModelFolderIncomplete", "config.json is\nmissing")
        return
    if behaviour == "die_early":
        print("out of luck", file=sys.stderr)
        sys.exit(7)
    if behaviour == "say_nonsense":
        os.write(ready_fd, b"not json\n")
    if behaviour == "hang":
        signal.pause()
    if behaviour == "close_pipe":
        os.close(ready_fd)
        signal.pause()
    start_stubborn_family(spec)
    kept = leave_shared_memory(spec)
    if behaviour == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with UnixStreamServer(spec.admin_socket, Admin) as server:
        pipe.stage("gateway")
        pipe.ready("http://127.0.0.1:1", spec.admin_socket)
        if behaviour == "die_later":
            os.kill(os.getpid(), signal.SIGKILL)
        server.serve_forever()
    del kept


if __name__ == "__main__":
    main()
