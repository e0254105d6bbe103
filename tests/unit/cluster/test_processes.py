"""Processes of a run: found by mark, session and descent; identified by start time; ended to the last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from copyhold.cluster.launch import RUN_MARK
from copyhold.cluster.processes import (
    ProcessIdentity,
    die_with_parent,
    end_processes,
    identity,
    orphaned_shared_memory,
    run_processes,
    shared_memory_names,
    summed_pss_mib,
    wait_for_end,
)

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


@contextmanager
def sleeper(
    mark: str | None = None, code: str = DEAF, session: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    env = dict(os.environ) | ({RUN_MARK: mark} if mark else {})
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=session) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_process_is_known_by_its_start_time() -> None:
    with sleeper() as process:
        known = identity(process.pid)
        assert known is not None and known.alive
        stranger = ProcessIdentity(process.pid, known.start_ticks + 1)
        assert not stranger.alive
        assert not stranger.signal(signal.SIGKILL), "a recycled id must not be signalled"
        assert known.alive
        assert known.signal(signal.SIGKILL)
        wait_for_end([known], timeout_s=5.0)
        assert not known.alive, "a zombie is not alive"
    assert identity(process.pid) is None


def test_a_run_is_found_by_mark_session_and_descent_and_nobody_else_is() -> None:
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}], env={{}}).wait()"
    with sleeper("/tmp/run-a") as marked, sleeper("/tmp/run-ab") as other, sleeper(session=True) as led:
        found = {process.pid for process in run_processes("/tmp/run-a", [led.pid])}
        assert {marked.pid, led.pid} <= found
        assert other.pid not in found, "a longer folder name is another run"
        assert os.getpid() not in found
    with sleeper("/tmp/run-c", child) as parent:
        found = run_processes("/tmp/run-c")
        assert len(found) == 2, "an unmarked child of a marked process belongs to the run"
        assert not end_processes(lambda: run_processes("/tmp/run-c"), grace_s=0.0, deadline_s=5.0)
        parent.wait(5)


def test_processes_that_ignore_sigterm_are_killed_after_the_grace() -> None:
    with sleeper("/tmp/run-d") as process:
        known = identity(process.pid)
        assert not end_processes(lambda: run_processes("/tmp/run-d"), grace_s=0.2, deadline_s=5.0)
        assert known is not None and not known.alive


def test_proportional_set_size_is_summed_and_the_gone_count_nothing() -> None:
    alone = summed_pss_mib([os.getpid()])
    assert alone > 1.0
    with sleeper() as process:
        assert summed_pss_mib([os.getpid(), process.pid, 2**22 - 1]) > summed_pss_mib([process.pid]) > 0.5


def test_shared_memory_is_attributed_by_mapping_and_by_name() -> None:
    name = f"copyhold-test-{os.getpid()}"
    code = (
        f"import mmap, os, signal; f = os.open('/dev/shm/{name}', os.O_RDWR | os.O_CREAT, 0o600); "
        "os.ftruncate(f, 4096); m = mmap.mmap(f, 4096); os.close(f); print('up', flush=True); signal.pause()"
    )
    path = Path("/dev/shm", name)
    try:
        with sleeper(code=code) as process:
            assert shared_memory_names([process.pid]) == {name}
        assert shared_memory_names([process.pid]) == set()
        assert orphaned_shared_memory("nobody", {os.getpid()}, 0.0) >= {name}
        assert name in orphaned_shared_memory("copyhold-test", set(), 0.0)
        assert name not in orphaned_shared_memory("nobody", {1}, 0.0)
        assert name not in orphaned_shared_memory("nobody", {os.getpid()}, path.stat().st_ctime + 60)
    finally:
        path.unlink(missing_ok=True)


def test_children_that_die_with_their_parent_are_started_from_the_main_thread_only() -> None:
    seen: list[BaseException] = []

    def elsewhere() -> None:
        try:
            die_with_parent()
        except RuntimeError as error:
            seen.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(seen) == 1


def test_a_child_gets_sigterm_when_its_parent_is_killed() -> None:
    code = (
        "import os, subprocess, sys; from copyhold.cluster.processes import die_with_parent; "
        "p = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'], preexec_fn=die_with_parent()); "
        "print(p.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    output = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False).stdout
    orphan = identity(int(output))
    if orphan is not None:
        wait_for_end([orphan], timeout_s=5.0)
        assert not orphan.alive


def test_an_absent_process_has_no_identity() -> None:
    gone = 2**22 - 1
    assert identity(gone) is None
    assert not ProcessIdentity(gone, 1).signal(signal.SIGTERM)
