"""The parent of a run: starts the stores and the driver, and removes every trace when it ends.

Owns the order of start-up and its exact reverse. Invariant: whatever ends a run (``stop``, an exception,
Ctrl-C, SIGTERM, a driver that dies), afterwards no process, socket, temporary folder or shared-memory entry
of it is left; ``leftovers`` looks. It imports no Ray: Ray belongs to the driver, a process of its own whose
session and environment mark all that it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from copyhold.namespace.store_target import StoreTarget

from .config import Config
from .driver_process import DriverProcess
from .errors import ConfigError, DriverFailed, PortInUse, RunFolderUnusable, StopFailed
from .launch import RUN_MARK, LaunchSpec, Ready, write_launch_spec
from .processes import (
    ProcessIdentity,
    child_subreaper,
    end_processes,
    orphaned_shared_memory,
    reap_adopted,
    run_processes,
    shared_memory_names,
)
from .run_folder import SOCKET_PATH_BYTES, make_run_folder, remove_run_folder, sweep_stale_runs
from .run_signals import signals_call, signals_unwind
from .server_record import make_state_folder, remove_server_record, state_lock, write_server_record
from .store_access import check_outside_stores, store_targets, without_passwords
from .store_monitor import EmbeddedStore, StoreMonitor
from .valkey_process import Appendfsync

DRIVER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "copyhold.cluster.driver")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_JOINING_VARIABLES = (
    "RAY_ADDRESS",
    "RAY_AUTH_",
    "RAY_USE_TLS",
    "RAY_TLS_",
    "RAY_TMPDIR",
    "RAY_JOB_CONFIG_JSON",
)
_KILL_DEADLINE_S = 10.0

Progress = Callable[[str, str], None]
"""Called with (stage, detail) at each step."""


class Supervisor:
    """One run: ``with Supervisor(config) as server`` serves inside the block, and nothing outlives the block.

    ``driver_command`` is called with ``--launch FILE --ready-fd N`` appended; see ``launch`` for both.
    """

    def __init__(
        self,
        config: Config,
        on_progress: Progress | None = None,
        driver_command: Sequence[str] | None = None,
    ) -> None:
        self.config = config
        self.url = ""
        self.admin_socket = ""
        self.run_dir = Path()
        self.state_dir = Path()
        self.shared_memory: set[str] = set()
        self._on_progress = on_progress or (lambda stage, detail: None)
        self._driver_command = tuple(driver_command or DRIVER_COMMAND)
        self._cleanup = contextlib.ExitStack()
        self._signals = contextlib.ExitStack()
        self._driver: DriverProcess | None = None
        self._stores = StoreMonitor((), {}, 0.0, self._report_store)
        self._targets: dict[str, StoreTarget] = {}
        self._driver_session: tuple[int, ...] = ()
        self._seen_pids: set[int] = set()
        self._started_s = 0.0
        self._log_path = Path()
        self._hurry = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and return once requests are served.

        Raises:
            ClusterError: one of its kinds; all that was started has been stopped and removed again.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "a run is started from the main thread: its children end with the thread that made them"
            )
        check_port_free(self.config.host, self.config.port)
        atexit.register(self.stop)
        self._started_s = time.time()
        self._signals.enter_context(signals_unwind())
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the run and remove its traces; a second call does nothing. A signal ends the grace."""
        with signals_call(self._shorten_grace):
            self._cleanup.close()
        self._signals.close()
        atexit.unregister(self.stop)

    def wait(self) -> None:
        """Block until the driver ends, which it should not.

        Raises:
            DriverFailed: always in the end; call ``stop`` (or leave the block) afterwards.
        """
        driver = self._driver
        assert driver is not None, "wait() before start()"
        while not driver.await_end(30.0):
            reap_adopted(self._sessions)
        raise self._with_log(driver.failure("the driver ended while serving"))

    @property
    def _sessions(self) -> set[int]:
        """Session ids of what this process started."""
        return {*self._stores.sessions, *self._driver_session}

    def report_to(self, on_progress: Progress) -> None:
        """Send the stages of the coming start to ``on_progress``."""
        self._on_progress = on_progress

    def pids(self) -> list[int]:
        """Ids of all live processes of the run, this one first."""
        return [os.getpid(), *sorted(process.pid for process in self.processes())]

    def processes(self) -> set[ProcessIdentity]:
        """All live processes of the run but this one."""
        return run_processes(str(self.run_dir), self._sessions) if self._sessions else set()

    def orphaned_shared_memory(self) -> set[str]:
        """Entries of /dev/shm that bear the name of this run or of one of its processes."""
        if not self.run_dir.name:
            return set()
        return orphaned_shared_memory(self.run_dir.name, self._seen_pids, self._started_s)

    def _start(self) -> None:
        base = Path(self.config.run_dir)
        for stale in sweep_stale_runs(base):
            self._on_progress("sweep", f"removed what a killed server left in {stale}")
        self._cleanup.enter_context(child_subreaper())
        self.run_dir = make_run_folder(base)
        self._cleanup.callback(remove_run_folder, self.run_dir)
        self._open_state()
        self._prepare_admin_socket()
        self._start_stores()
        ready = self._start_driver()
        self.url, self.admin_socket = ready.url, ready.admin_socket
        self._notice(self.processes())
        self._cleanup.callback(remove_server_record, self.state_dir)
        write_server_record(self.state_dir, self.url, self.admin_socket, self.run_dir)

    def _open_state(self) -> None:
        configured = self.config.state_dir
        self.state_dir = Path(configured).expanduser().absolute() if configured else self.run_dir / "state"
        make_state_folder(self.state_dir)
        self._cleanup.enter_context(state_lock(self.state_dir))
        logs = self.state_dir / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        self._log_path = logs / "driver.log"
        if self._log_path.exists():
            self._log_path.replace(logs / "driver.log.1")

    def _prepare_admin_socket(self) -> None:
        configured = self.config.admin_socket
        path = Path(configured).expanduser().absolute() if configured else self.run_dir / "admin.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
            raise RunFolderUnusable(f"admin_socket is over {SOCKET_PATH_BYTES} bytes: {path}")
        if path.exists():
            if not path.is_socket():
                raise ConfigError("admin_socket", f"admin_socket {path} exists and is not a socket")
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise ConfigError("admin_socket", f"admin_socket {path} is in use by another server")
            path.unlink()
        self.admin_socket = str(path)
        self._cleanup.callback(path.unlink, missing_ok=True)

    def _start_stores(self) -> None:
        """Outside stores are asked first, so that a run that lacks one starts nothing."""
        self._targets = store_targets(self.config, self.run_dir)
        check_outside_stores(self.config, self._targets)
        policies: dict[str, Appendfsync] = {"authority": "always", "sessions": "everysec"}
        embedded = [
            EmbeddedStore(
                name,
                self.run_dir / f"{name}.sock",
                self.state_dir / name,
                self._log_path.with_name(f"{name}.log"),
                policy,
            )
            for name, policy in policies.items()
            if self.config.store_address(f"{name}_store") is None
        ]
        for store in embedded:
            self._on_progress("stores", f"starting the {store.name} store")
        self._stores = StoreMonitor(
            embedded, self._environment(), self.config.start_timeout_s, self._report_store
        )
        self._cleanup.callback(self._stores.stop)
        self._stores.start()

    def _report_store(self, text: str) -> None:
        sys.stderr.write(f"supervisor: {text}\n")
        sys.stderr.flush()

    def _start_driver(self) -> Ready:
        launch_path = self.run_dir / "launch.json"
        write_launch_spec(launch_path, self._launch_spec())
        self._cleanup.callback(self._end_driver)
        driver = DriverProcess.start(self._driver_command, launch_path, self._log_path, self._environment())
        self._driver = driver
        self._cleanup.callback(driver.close)
        self._driver_session = (driver.pid,)
        self._seen_pids.add(driver.pid)
        try:
            return driver.await_ready(self._on_progress, self.config.start_timeout_s)
        except DriverFailed as error:
            raise self._with_log(error) from error

    def _launch_spec(self) -> LaunchSpec:
        model = self.config.model
        config = msgspec.structs.replace(
            without_passwords(self.config), model=str(Path(model).expanduser().absolute()) if model else ""
        )
        return LaunchSpec(
            config=config,
            run_dir=str(self.run_dir),
            ray_dir=str(self.run_dir / "ray"),
            state_dir=str(self.state_dir),
            cache_dir=str(self.config.cache_path.absolute()),
            authority_store=self._targets["authority"],
            sessions_store=self._targets["sessions"],
            admin_socket=self.admin_socket,
        )

    def _environment(self) -> dict[str, str]:
        """The user's environment, less what would steer Ray or numba elsewhere, plus the mark of this run.

        Who joins a cluster is steered by what says where it is and how to be let in.
        """
        joins = _JOINING_VARIABLES if self.config.address else ()
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("RAY_", "NUMBA_CACHE")) or (joins and key.startswith(joins))
        }
        return kept | {
            RUN_MARK: str(self.run_dir),
            "TMPDIR": str(self.run_dir / "tmp"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
        }

    def _with_log(self, error: DriverFailed) -> DriverFailed:
        """The same error; unless the driver named its reason, with its log at a place that outlives the run folder."""
        if error.reported_type is not None:
            return error
        kept = self._log_path
        if not self.config.state_dir:
            kept = self.config.cache_path / "driver-failed.log"
            with contextlib.suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self._log_path, kept)
        return DriverFailed(f"{error.message} (log: {kept})", error.reported_type)

    def _end_driver(self) -> None:
        """SIGTERM to the driver, its grace, then an end to all that it left, and to their shared memory."""
        driver = self._driver
        self._stores.hold()
        stores = self._stores.pids

        def others() -> set[ProcessIdentity]:
            if driver is not None:
                driver.await_end(0)
            reap_adopted(self._sessions)
            found = {process for process in self.processes() if process.pid not in stores}
            self._notice(found)
            return found

        others()
        if driver is not None and driver.running:
            driver.terminate(self.config.stop_grace_s, lambda: self._hurry)
        grace_s = 0.0 if self._hurry else min(self.config.stop_grace_s, 1.0)
        left = end_processes(others, grace_s, _KILL_DEADLINE_S)
        self.shared_memory |= self.orphaned_shared_memory()
        for name in self.shared_memory:
            Path("/dev/shm", name).unlink(missing_ok=True)
        if left:
            raise StopFailed(f"processes {sorted(process.pid for process in left)} do not end")

    def _shorten_grace(self) -> None:
        self._hurry = True

    def _notice(self, processes: set[ProcessIdentity]) -> None:
        """Remember who belonged to the run and which shared memory they held, for when they are gone.

        On a joined cluster they also hold what is the cluster's, so that there only names count.
        """
        self._seen_pids |= {process.pid for process in processes}
        if not self.config.address:
            self.shared_memory |= shared_memory_names(process.pid for process in processes)


def check_port_free(host: str, port: int) -> None:
    """Refuse a port that cannot be bound now; 0 always can.

    Raises:
        PortInUse: somebody listens there, or it is not ours to bind.
        ConfigError: the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigError("host", f"host {host!r} does not resolve: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError("host", f"host {host!r} is no address of this machine") from error
        raise PortInUse(host, port, os.strerror(error.errno or 0)) from error


def leftovers(server: Supervisor) -> list[str]:
    """What a stopped run left behind, one line each; empty is the promise."""
    found = [
        f"process {process.pid}" for process in sorted(server.processes(), key=lambda process: process.pid)
    ]
    if server.run_dir != Path() and server.run_dir.exists():
        found.append(f"run folder {server.run_dir}")
    if server.admin_socket and Path(server.admin_socket).exists():
        found.append(f"socket {server.admin_socket}")
    present = {name for name in server.shared_memory if Path("/dev/shm", name).exists()}
    found += [f"shared memory /dev/shm/{name}" for name in sorted(present | server.orphaned_shared_memory())]
    return found
