"""The embedded stores of a run: started by one thread that watches them and brings back one that dies.

Owns the store processes. Invariant: they are forked, watched, restarted and stopped by the monitor's own thread alone, which
lives until the last of them has ended (a child is told to end when the thread that forked it does); after ``hold`` or ``stop``
nothing is started any more. A store that died starts again on the same data; clients connect again by themselves.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from .errors import StoreFailed
from .valkey_process import Appendfsync, ValkeyProcess

_RESTART_EVERY_S = 1.0
"""A store that dies again and again is started no more often than this; a first death is answered at once."""


class EmbeddedStore(msgspec.Struct, frozen=True):
    """One store to run. ``appendfsync`` says whether each answer waits for the disk."""

    name: str
    socket_path: Path
    data_dir: Path
    log_path: Path
    appendfsync: Appendfsync


class StoreMonitor:
    """``start``, then ``hold`` when the run begins to end, then ``stop``; each may be called again without effect."""

    def __init__(
        self,
        stores: Sequence[EmbeddedStore],
        env: Mapping[str, str],
        timeout_s: float,
        report: Callable[[str], None],
    ) -> None:
        self._specs = tuple(stores)
        self._env = dict(env)
        self._timeout_s = timeout_s
        self._report = report
        self._processes: dict[str, ValkeyProcess] = {}
        self._sessions: tuple[int, ...] = ()
        self._started = threading.Event()
        self._holding = threading.Event()
        self._stopping = threading.Event()
        self._restart = threading.Lock()
        self._failure: BaseException | None = None
        self._wake: tuple[int, int] | None = None
        # A daemon, so that an exit without ``stop`` reaches the exit handlers, which call it.
        self._thread = threading.Thread(target=self._run, name="stores", daemon=True)

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the stores as they are now."""
        return frozenset(process.pid for process in tuple(self._processes.values()))

    @property
    def sessions(self) -> tuple[int, ...]:
        """Every session id that a store has had, the ended ones too."""
        return self._sessions

    def start(self) -> None:
        """Start all stores; returns once each answers. Raises: StoreFailed, none of them runs."""
        self._wake = os.pipe()
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    def hold(self) -> None:
        """Restart nothing from now on; returns once no restart is under way."""
        self._holding.set()
        with self._restart:
            pass

    def stop(self) -> None:
        """End every store and the thread."""
        self._holding.set()
        self._stopping.set()
        if self._wake is None:
            return
        read_fd, write_fd = self._wake
        os.write(write_fd, b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        self._wake = None
        os.close(read_fd)
        os.close(write_fd)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            for spec in self._specs:
                self._launch(spec)
        except BaseException as error:  # noqa: BLE001 - raised again by start() in its caller's thread
            self._failure = error
        try:
            if self._failure is None:
                self._started.set()
                self._watch()
        finally:
            for process in reversed(tuple(self._processes.values())):
                process.stop()
            self._started.set()

    def _launch(self, spec: EmbeddedStore) -> None:
        process = ValkeyProcess.start(
            spec.name,
            spec.socket_path,
            spec.data_dir,
            spec.log_path,
            self._env,
            timeout_s=self._timeout_s,
            appendfsync=spec.appendfsync,
            owner=threading.current_thread(),
            give_up=self._holding.is_set,
        )
        self._processes[spec.name] = process
        self._sessions = (*self._sessions, process.pid)

    def _watch(self) -> None:
        """Until ``stop``: wait for a store's end and start it again."""
        retry_at_s = dict.fromkeys(self._processes, 0.0)
        while not self._stopping.is_set():
            self._await_change(retry_at_s)
            for spec in self._specs:
                ending = self._processes[spec.name].ending
                if ending and time.monotonic() >= retry_at_s[spec.name]:
                    retry_at_s[spec.name] = time.monotonic() + _RESTART_EVERY_S
                    with self._restart:
                        self._bring_back(spec, ending)

    def _await_change(self, retry_at_s: Mapping[str, float]) -> None:
        """Return when a store ends, a restart is due or the monitor is told to stop."""
        poll = select.poll()
        assert self._wake is not None, "watching before start()"
        poll.register(self._wake[0], select.POLLIN)
        descriptors: list[int] = []
        due_s: list[float] = []
        for name, process in self._processes.items():
            if process.running:
                descriptors.append(os.pidfd_open(process.pid))
                poll.register(descriptors[-1], select.POLLIN)
            elif not self._holding.is_set():
                due_s.append(max(0.0, retry_at_s[name] - time.monotonic()))
        try:
            poll.poll(min(due_s) * 1000 if due_s else None)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _bring_back(self, spec: EmbeddedStore, ending: str) -> None:
        if self._holding.is_set():
            return
        began_s = time.monotonic()
        try:
            self._launch(spec)
        except StoreFailed as error:
            if not self._holding.is_set():
                self._report(
                    f"the {spec.name} store ended {ending} and cannot be started again: {error.message}"
                )
            return
        took_s = time.monotonic() - began_s
        self._report(
            f"the {spec.name} store ended {ending}; it answers again after {took_s:.2f} s, on the same data"
        )
