"""Joining a Ray cluster, as far as it goes without one: what an address may be, what is kept, what is compared."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from copyhold.cluster.config import Config
from copyhold.cluster.errors import ClusterUnavailable, ConfigError
from copyhold.cluster.launch import LaunchSpec
from copyhold.cluster.ray_package import package_folder, shipped_package
from copyhold.cluster.ray_session import open_session
from copyhold.namespace.store_target import StoreTarget


@pytest.mark.parametrize("address", ["", "auto", "10.0.0.7:6379", "head.example:6379", "[fd00::7]:6379"])
def test_an_address_is_nothing_auto_or_host_and_port(address: str) -> None:
    assert Config(address=address).address == address


@pytest.mark.parametrize(
    "address", ["local", "10.0.0.7", "ray://head:10001", "http://head:8265", "head:", "a b:1"]
)
def test_any_other_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="neither auto nor HOST:PORT"):
        Config(address=address)


def test_where_nobody_listens_is_said_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    spec = launch_spec(Config(address=f"127.0.0.1:{port}"), tmp_path)
    with pytest.raises(ClusterUnavailable, match=f"127.0.0.1:{port}: nothing listens there"):
        open_session(spec, 3)


class FakeSession:
    """A session whose worker is a process with this path first; it runs the probe by value, as a Ray worker does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ray: Any = self

    def service_options(self) -> dict[str, Any]:
        return {}

    def remote(self, function: Any) -> FakeSession:
        self._function = function
        return self

    def options(self, **_: Any) -> Any:
        class Task:
            remote = staticmethod(lambda: self._function)

        return Task

    def get(self, function: Any, timeout: float) -> str:
        from ray.cloudpickle.cloudpickle import dumps

        code = (
            "import sys; sys.path = [sys.argv[1], *(p for p in sys.path if not p.endswith('/src'))]; "
            "from ray import cloudpickle; print(cloudpickle.loads(sys.stdin.buffer.read())())"
        )
        command = [sys.executable, "-P", "-c", code, str(self._path)]
        done = subprocess.run(command, input=dumps(function), stdout=subprocess.PIPE, check=True)
        return done.stdout.decode().strip()


def test_a_worker_with_the_very_sources_gets_nothing(tmp_path: Path) -> None:
    shutil.copytree(package_folder(), tmp_path / "copyhold", ignore=shutil.ignore_patterns("__pycache__"))
    session: Any = FakeSession(tmp_path)
    assert shipped_package(session) is None


def test_a_worker_with_other_sources_or_none_gets_the_package(tmp_path: Path) -> None:
    session: Any = FakeSession(tmp_path)
    assert shipped_package(session) == package_folder()
    shutil.copytree(package_folder(), tmp_path / "copyhold", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "copyhold" / "kvcore" / "errors.py").open("a") as file:
        file.write("# changed\n")
    assert shipped_package(session) == package_folder()


def launch_spec(config: Config, folder: Path) -> LaunchSpec:
    store = StoreTarget(url="unix:///nowhere")
    return LaunchSpec(
        config=config,
        run_dir=str(folder),
        ray_dir=str(folder / "ray"),
        state_dir=str(folder / "state"),
        cache_dir=str(folder / "cache"),
        authority_store=store,
        sessions_store=store,
        admin_socket=str(folder / "admin.sock"),
    )
