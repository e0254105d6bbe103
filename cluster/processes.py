"""Processes of one run: finding them, measuring them, ending them, and seeing what they left.

Owns what the supervisor knows about the operating system (Linux). Invariant: a process is touched only when
it is known to belong to the run: it carries the run's mark in its environment, lives in the driver's session,
or descends from one that does. A process is identified by id *and* start time, so a recycled id is never
signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from .launch import RUN_MARK

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_LIBC = ctypes.CDLL(None, use_errno=True)


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process that no later one with the same id is taken for. ``start_ticks`` counts from boot."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """True while this very process runs; a zombie does not."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start_ticks and found[0] not in "ZX"

    def signal(self, number: int) -> bool:
        """Send a signal; False when the process has gone."""
        if not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def identity(pid: int) -> ProcessIdentity | None:
    """The process with this id now, ``None`` when there is none."""
    found = _stat(pid)
    return None if found is None else ProcessIdentity(pid, found[1])


def die_with_parent(owner: threading.Thread | None = None) -> Callable[[], None]:
    """A ``preexec_fn``: SIGTERM when the thread that started the child ends.

    ``owner`` is the calling thread's word that it outlives the child; without it only the main thread may call.
    Raises:
        RuntimeError: called from another thread, whose end would kill the child early.
    """
    if threading.current_thread() is not (owner or threading.main_thread()):
        raise RuntimeError("a child is started by the thread that lives as long as it")
    prctl = _LIBC.prctl
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


@contextlib.contextmanager
def child_subreaper() -> Iterator[None]:
    """Orphans below this process become its children, so that none escapes; restored afterwards."""
    before = ctypes.c_int(0)
    _LIBC.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def run_processes(run_dir: str, sessions: Iterable[int] = ()) -> set[ProcessIdentity]:
    """All live processes of the run but this one: marked with ``run_dir``, in ``sessions``, or below such."""
    mark = f"{RUN_MARK}={run_dir}".encode()
    members = set(sessions)
    children: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    roots: list[int] = []
    for pid in psutil.pids():
        found = _stat(pid)
        if found is None or found[0] in "ZX":
            continue
        children.setdefault(found[2], []).append(pid)
        starts[pid] = found[1]
        if found[3] in members or mark in _environment(pid).split(b"\0"):
            roots.append(pid)
    reached: set[int] = set()
    while roots:
        pid = roots.pop()
        if pid not in reached:
            reached.add(pid)
            roots.extend(children.get(pid, ()))
    reached.discard(os.getpid())
    return {ProcessIdentity(pid, starts[pid]) for pid in reached if pid in starts}


def end_processes(
    find: Callable[[], set[ProcessIdentity]], grace_s: float, deadline_s: float
) -> set[ProcessIdentity]:
    """SIGTERM all that ``find`` returns, SIGKILL after ``grace_s``, look again until none is left.

    Reaps those that are children of this process. Returns who still lived after ``deadline_s`` more seconds
    (a process in an uninterruptible call), empty as a rule.
    """
    started = time.monotonic()
    terminated: set[ProcessIdentity] = set()
    while True:
        living = find()
        reap_children(living | terminated)
        living = {process for process in living if process.alive}
        elapsed_s = time.monotonic() - started
        if not living or elapsed_s > grace_s + deadline_s:
            return living
        for process in living:
            if elapsed_s >= grace_s:
                process.signal(signal.SIGKILL)
            elif process not in terminated:
                process.signal(signal.SIGTERM)
        terminated |= living
        wait_for_end(living, min(0.1, max(grace_s - elapsed_s, 0.02)))


def wait_for_end(processes: Iterable[ProcessIdentity], timeout_s: float) -> None:
    """Return when all have ended, or after ``timeout_s``; waits on process descriptors, without polling."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not process.alive:
                continue
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(remaining_s * 1000)
        finally:
            os.close(descriptor)


def reap_children(processes: Iterable[ProcessIdentity]) -> None:
    """Collect ended children among ``processes``; adopted orphans have nobody else to do it."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def reap_adopted(sessions: Iterable[int]) -> None:
    """Collect every ended child of this process that belongs to one of ``sessions``, except their leaders."""
    own, members = os.getpid(), set(sessions)
    for pid in psutil.pids():
        found = _stat(pid)
        if found is not None and found[2] == own and found[0] == "Z" and found[3] in members - {pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def summed_pss_mib(pids: Iterable[int]) -> float:
    """Proportional set size of all ``pids`` together; a process that ended meanwhile counts nothing."""
    total_kib = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total_kib += int(line.split()[1])
    return total_kib / 1024


def shared_memory_names(pids: Iterable[int]) -> set[str]:
    """Entries of /dev/shm that these processes map or hold open and that still have a name."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, found, name = line.partition("/dev/shm/")
                if found and not name.endswith("(deleted)"):
                    names.add(name)
        with contextlib.suppress(OSError):
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(descriptor.path)
                    if target.startswith("/dev/shm/") and not target.endswith("(deleted)"):
                        names.add(target.removeprefix("/dev/shm/"))
    return names


def orphaned_shared_memory(run_name: str, pids: set[int], since_s: float) -> set[str]:
    """Entries of /dev/shm made since ``since_s`` (epoch) that bear the run's name or one of its process ids.

    For what a killed process left mapped by nobody, such as ``torch_<pid>_...``.
    """
    names: set[str] = set()
    for entry in os.scandir("/dev/shm"):
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            if status.st_uid != os.getuid() or status.st_ctime < since_s:
                continue
            if run_name in entry.name or pids & {int(digits) for digits in re.findall(r"\d+", entry.name)}:
                names.add(entry.name)
    return names


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    """(state, start ticks, parent, session) from /proc, ``None`` when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19]), int(fields[1]), int(fields[3])


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
