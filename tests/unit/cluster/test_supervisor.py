"""The supervisor with real processes: a fake driver with bad manners, real Valkey, real signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from copyhold.cluster.config import Config, load_config
from copyhold.cluster.errors import (
    ConfigError,
    DriverFailed,
    NotRunning,
    PortInUse,
    RunFolderUnusable,
    StateInUse,
    StoreFailed,
)
from copyhold.cluster.processes import ProcessIdentity, identity, run_processes, summed_pss_mib
from copyhold.cluster.run_folder import sweep_stale_runs
from copyhold.cluster.run_signals import StopRequested
from copyhold.cluster.server_record import find_server
from copyhold.cluster.supervisor import Supervisor, check_port_free, leftovers
from copyhold.cluster.valkey_process import ValkeyProcess

FAKE_DRIVER = Path(__file__).with_name("fake_driver.py")

HOST_PROGRAM = """
import sys
from copyhold.cluster.config import load_config
from copyhold.cluster.supervisor import Supervisor
config = load_config(None, {"port": 0, "run_dir": sys.argv[1], "state_dir": sys.argv[2], "stop_grace_s": 0.2})
with Supervisor(config, driver_command=(sys.executable, sys.argv[3], sys.argv[4])) as server:
    print(server.run_dir, *server.pids(), flush=True)
    server.wait()
"""


@pytest.fixture
def run_base() -> Iterator[Path]:
    """A short folder for run folders that must be empty again at the end."""
    base = Path("/tmp") / f"chtest-{os.getpid()}"
    base.mkdir(mode=0o700)
    yield base
    left = list(base.iterdir())
    subprocess.run(["rm", "-rf", str(base)], check=True)
    assert left == []


Make = Callable[..., Supervisor]


@pytest.fixture
def make(run_base: Path, tmp_path: Path) -> Make:
    def supervisor(behaviour: str, **settings: Any) -> Supervisor:
        values = {
            "port": 0,
            "run_dir": str(run_base),
            "state_dir": str(tmp_path / "state"),
            "cache_dir": str(tmp_path / "cache"),
            "stop_grace_s": 0.2,
        }
        config = load_config(None, values | settings)
        return Supervisor(config, driver_command=(sys.executable, str(FAKE_DRIVER), behaviour))

    return supervisor


def family(server: Supervisor) -> list[ProcessIdentity]:
    """The fake driver's child and orphan."""
    pids = (server.state_dir / "family.txt").read_text().split()
    found = [identity(int(pid)) for pid in pids]
    assert len(found) == 2
    return [process for process in found if process is not None]


def test_a_run_serves_and_leaves_nothing(make: Make) -> None:
    stages: list[tuple[str, str]] = []
    server = make("serve")
    server.report_to(lambda stage, detail: stages.append((stage, detail)))
    with server:
        assert server.url == "http://127.0.0.1:1"
        assert Path(server.admin_socket).is_socket()
        assert [stage for stage, _ in stages] == ["stores", "stores", "ray", "gateway"]
        members = family(server)
        assert len(members) == 2, "child and orphan run"
        assert {process.pid for process in members} <= set(server.pids())
        assert len(server.pids()) == 6, "supervisor, two stores, driver, child, orphan"
        assert summed_pss_mib(server.pids()) > 10
        assert server.shared_memory, "the driver's named shared memory was noticed"
        kept = set(server.shared_memory)
        assert leftovers(server), "a running server is not nothing"
    assert leftovers(server) == []
    assert not any(process.alive for process in members)
    assert not any(Path("/dev/shm", name).exists() for name in kept)
    assert not server.run_dir.exists()
    server.stop()


def test_files_and_folders_are_for_their_owner_only(make: Make) -> None:
    with make("serve") as server:
        modes = {
            path: path.stat().st_mode & 0o777
            for path in (
                server.run_dir,
                server.state_dir,
                server.state_dir / "authority",
                server.run_dir / "tmp",
            )
        }
        assert set(modes.values()) == {0o700}, modes
        for path in (server.run_dir / "launch.json", server.state_dir / "server.json"):
            assert path.stat().st_mode & 0o777 == 0o600
        for name in ("authority", "sessions"):
            assert (server.run_dir / f"{name}.sock").stat().st_mode & 0o077 == 0


def test_stores_listen_on_no_port_and_outlive_a_run(make: Make) -> None:
    with make("serve") as server:
        store = redis.Redis(unix_socket_path=str(server.run_dir / "authority.sock"))
        store.set("generation", "7")
        assert store.config_get("port") == {"port": "0"}
        assert store.config_get("appendfsync") == {"appendfsync": "always"}
        assert store.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        store.close()
        sessions = redis.Redis(unix_socket_path=str(server.run_dir / "sessions.sock"))
        assert sessions.config_get("appendfsync") == {"appendfsync": "everysec"}
        sessions.close()
    with make("serve") as server:
        store = redis.Redis(unix_socket_path=str(server.run_dir / "authority.sock"))
        assert store.get("generation") == b"7"
        store.close()


def test_an_empty_state_folder_setting_keeps_nothing(make: Make) -> None:
    with make("serve", state_dir="") as server:
        assert server.state_dir.parent == server.run_dir
    assert leftovers(server) == []


def test_processes_see_the_mark_and_no_ray_setting_of_the_user(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/nowhere")
    with make("serve") as server:
        for process in server.processes():
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert f"COPYHOLD_RUN={server.run_dir}\0".encode() in environment
            assert f"TMPDIR={server.run_dir}/tmp\0".encode() in environment
            assert b"RAY_ADDRESS" not in environment and b"NUMBA_CACHE_DIR" not in environment


def test_who_joins_a_cluster_keeps_what_says_where_it_is_and_how_to_get_in(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": "token", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    for name, value in {**kept, "RAY_DEDUP_LOGS": "1", "RAY_AUTH_TOKEN_PATH": "/token"}.items():
        monkeypatch.setenv(name, value)
    with make("serve", address="auto") as server:
        for process in server.processes():
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert all(f"{name}={value}\0".encode() in environment for name, value in kept.items())
            assert b"RAY_AUTH_TOKEN_PATH=/token\0" in environment and b"RAY_DEDUP_LOGS" not in environment


def test_a_driver_that_ignores_sigterm_is_killed_after_its_grace(make: Make) -> None:
    with make("ignore_sigterm") as server:
        members = family(server)
    assert leftovers(server) == []
    assert not any(process.alive for process in members)


@pytest.mark.parametrize(
    ("behaviour", "type_name", "says"),
    [
        ("report_error", "model_folder_incomplete", "config.json is missing"),
        ("die_early", "driver_failed", "ended before it was ready (with status 7): out of luck"),
        ("say_nonsense", "driver_failed", "a line that is no report"),
        ("hang", "driver_failed", "no progress for 1 s"),
    ],
)
def test_a_failed_start_is_one_typed_line_and_leaves_nothing(
    make: Make, behaviour: str, type_name: str, says: str
) -> None:
    server = make(behaviour, start_timeout_s=1.0)
    with pytest.raises(DriverFailed) as failed:
        server.start()
    assert failed.value.type == type_name
    assert says in failed.value.message and "\n" not in failed.value.message
    assert leftovers(server) == []


def test_a_driver_that_cannot_be_started_leaves_nothing(make: Make) -> None:
    server = Supervisor(make("serve").config, driver_command=("/nonexistent/program",))
    with pytest.raises(DriverFailed, match="cannot be started"):
        server.start()
    assert leftovers(server) == []


def test_a_log_of_a_run_without_state_folder_outlives_it(make: Make, tmp_path: Path) -> None:
    with pytest.raises(DriverFailed) as failed:
        make("die_early", state_dir="").start()
    kept = tmp_path / "cache" / "driver-failed.log"
    assert kept.read_text() == "out of luck\n"
    assert str(kept) in failed.value.message


def test_a_driver_that_dies_while_serving_is_reported_and_cleaned_up(make: Make, run_base: Path) -> None:
    server = make("die_later")
    with pytest.raises(DriverFailed, match=r"ended while serving.*SIGKILL"), server:
        members = family(server)
        server.wait()
    assert leftovers(server) == []
    assert not any(process.alive for process in members)
    assert not list(Path("/dev/shm").glob(f"fake-driver*{run_base.name}*"))


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_inside_the_block_passes_and_leaves_nothing(make: Make, error: BaseException) -> None:
    server = make("serve")
    with pytest.raises(type(error)) as passed, server:
        raise error
    assert passed.value is error
    assert leftovers(server) == []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the suite itself runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_block_and_handlers_return(make: Make, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    server = make("serve")
    expected = KeyboardInterrupt if number == signal.SIGINT else StopRequested
    with pytest.raises(expected), server:
        os.kill(os.getpid(), number)
        server.wait()
    assert leftovers(server) == []
    assert signal.getsignal(number) is before


def start_host(
    run_base: Path, state_dir: Path, behaviour: str
) -> tuple[subprocess.Popen[bytes], Path, list[int]]:
    """A process of its own that supervises; its run folder and all process ids."""
    command = [sys.executable, "-c", HOST_PROGRAM, str(run_base), str(state_dir), str(FAKE_DRIVER), behaviour]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert host.stdout is not None
    run_dir, *pids = host.stdout.readline().split()
    return host, Path(run_dir.decode()), [int(pid) for pid in pids]


def test_two_quick_signals_end_a_stubborn_run_at_once(run_base: Path, tmp_path: Path) -> None:
    host, run_dir, pids = start_host(run_base, tmp_path / "state", "ignore_sigterm")
    with host:
        host.send_signal(signal.SIGTERM)
        host.send_signal(signal.SIGINT)
        assert host.wait(20) != 0
    assert not run_dir.exists()
    assert not [pid for pid in pids if identity(pid) is not None and run_processes(str(run_dir))]


def test_what_a_killed_supervisor_left_is_swept_by_the_next_start(
    run_base: Path, tmp_path: Path, make: Make
) -> None:
    host, run_dir, pids = start_host(run_base, tmp_path / "state", "ignore_sigterm")
    with host:
        host.kill()
    assert run_dir.exists()
    assert run_processes(str(run_dir)), "the deaf driver outlives its supervisor"
    with pytest.raises(NotRunning, match="has ended"):
        find_server(tmp_path / "state")
    with make("serve") as server:
        assert not run_dir.exists()
        assert find_server(tmp_path / "state").run_dir == str(server.run_dir)
    assert run_processes(str(run_dir)) == set()
    for name in Path("/dev/shm").glob(f"fake-driver*{run_base.name}*"):
        assert int(name.name.rsplit("-", 1)[1]) in pids
        name.unlink()


def test_a_living_owner_and_a_foreign_folder_are_not_swept(run_base: Path, make: Make) -> None:
    foreign = run_base / "copyhold-foreign"
    foreign.mkdir()
    with make("serve") as server:
        assert sweep_stale_runs(run_base) == []
        assert server.run_dir.exists() and foreign.exists()
    foreign.rmdir()


def test_a_second_server_on_the_same_state_is_refused_with_the_owner(make: Make, run_base: Path) -> None:
    with make("serve") as server:
        second = make("serve")
        with pytest.raises(StateInUse, match=f"process {os.getpid()} already serves"):
            second.start()
        assert list(run_base.iterdir()) == [server.run_dir]
        assert find_server(server.state_dir).url == server.url


def test_the_record_finds_a_running_server_and_no_other(make: Make, tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="no server runs"):
        find_server(tmp_path / "state")
    with make("serve") as server:
        record = find_server(tmp_path / "state")
        assert (record.process.pid, record.admin_socket) == (os.getpid(), server.admin_socket)
    with pytest.raises(NotRunning, match="no server runs"):
        find_server(tmp_path / "state")
    (tmp_path / "state" / "server.json").write_text("{")
    with pytest.raises(NotRunning, match="cannot be read"):
        find_server(tmp_path / "state")


def test_a_port_in_use_is_refused_before_anything_starts(make: Make, run_base: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}: Address already in use"):
            make("serve", port=port).start()
    assert list(run_base.iterdir()) == []
    assert not (tmp_path / "state").exists()
    check_port_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_ours_is_a_configuration_error(host: str) -> None:
    with pytest.raises(ConfigError, match="host"):
        check_port_free(host, 0)


def test_a_run_folder_too_long_for_sockets_is_refused(tmp_path: Path, make: Make) -> None:
    base = tmp_path / ("x" * 60)
    base.mkdir()
    with pytest.raises(RunFolderUnusable, match="too long for unix sockets"):
        make("serve", run_dir=str(base)).start()
    assert list(base.iterdir()) == []
    with pytest.raises(RunFolderUnusable, match="cannot make a run folder"):
        make("serve", run_dir=str(tmp_path / "absent")).start()


def test_an_admin_socket_elsewhere_is_used_and_removed(make: Make, run_base: Path) -> None:
    path = run_base / "admin"
    with make("serve", admin_socket=str(path)) as server:
        assert path.is_socket()
        with pytest.raises(ConfigError, match="in use by another server"):
            make("serve", admin_socket=str(path), state_dir="").start()
    assert leftovers(server) == [] and not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        make("serve", admin_socket=str(path)).start()
    assert path.read_text() == "mine"
    path.unlink()


def test_a_stale_admin_socket_is_replaced(make: Make, run_base: Path) -> None:
    path = run_base / "admin"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with make("serve", admin_socket=str(path)):
        assert path.is_socket()
    assert not path.exists()


def test_a_store_that_cannot_start_says_why(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    (data_dir / "appendonlydir").mkdir(parents=True)
    (data_dir / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(StoreFailed, match="the authority store ended with status 1"):
        ValkeyProcess.start(
            "authority",
            Path("/tmp", f"chstore-{os.getpid()}.sock"),
            data_dir,
            tmp_path / "log",
            dict(os.environ),
        )
    with pytest.raises(StoreFailed, match="over 107 bytes"):
        ValkeyProcess.start("x", tmp_path / ("s" * 100), data_dir, tmp_path / "log", {})


def test_stopping_a_run_that_never_started_does_nothing() -> None:
    server = Supervisor(Config())
    server.stop()
    assert leftovers(server) == []
    assert server.pids() == [os.getpid()]
