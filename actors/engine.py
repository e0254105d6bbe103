"""The loop that turns plans into tokens: one thread, one scheduler, one executor.

Owns the thread; everything that touches the scheduler runs on it. Calls from elsewhere are handed over as functions and
answered through futures. Invariant: after ``stop`` or a failed step no stream is open and nothing is computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

import msgspec

from .errors import ActorError, ReplicaStopped
from .messages import Failed, StreamItem
from .plan import KVAuditOrder, PurgeOrder, StepEvidence, StepPlan
from .scheduler import Scheduler
from .submission import Entry, Submission

_T = TypeVar("_T")

HEARTBEAT_S = 2.0
"""An idle replica asks its ranks for their position this often, so that a lost one is noticed without a request."""


class StepExecutor(Protocol):
    """Runs one plan on every rank; raises and stays broken when a rank does not answer."""

    def execute(self, plan: StepPlan) -> Sequence[StepEvidence]: ...

    def close(self) -> None: ...


class EngineTimes(msgspec.Struct, frozen=True):
    """Where the time of all steps went; seconds. Transport = step wall time less the slowest rank's execution."""

    steps: int
    step_s: float
    execution_s: float


class Engine:
    """Drives one replica's scheduler and ranks until stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        may_serve: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """``flush``: called on the engine's thread whenever streams may have been sent something."""
        self._scheduler = scheduler
        self._flush = flush
        self._executor = executor
        self._may_serve = may_serve
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[Callable[[], object], Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copyhold-engine", daemon=True)
        self._failure: ActorError | None = None
        self._stopping = False
        self._handing_over = threading.Lock()
        self._asking_ranks = False
        self._steps, self._step_s, self._execution_s = 0, 0.0, 0.0
        self._step_began_s: float | None = None
        self._last_step_s = clock()

    def start(self) -> None:
        """Start the loop; call once."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End every stream and the thread; safe to call twice."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self._executor.close()

    @property
    def failure(self) -> ActorError | None:
        """Why the engine stopped by itself; ``None`` while it serves."""
        return self._failure

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run ``function`` on the engine's thread between two steps. The future fails once the engine has stopped."""
        future: Future[_T] = Future()
        with self._handing_over:
            if self._failure is None and not self._stopping:
                self._inbox.put((function, future))
                return future
        future.set_exception(self._failure or ReplicaStopped("the engine is stopped"))
        return future

    def submit(self, submission: Submission, put: Callable[[StreamItem], None]) -> Future[Entry]:
        """Queue a request; its items arrive through ``put`` on the engine's thread."""
        return self.call(lambda: self._scheduler.submit(submission, put))

    def cancel(self, entry: Entry) -> Future[None]:
        """Release a request's blocks; a request that has ended is left alone."""
        return self.call(lambda: self._scheduler.cancel(entry))

    def finish(self, entry: Entry, completion_tokens: int) -> Future[None]:
        """End a request whose client has what it wanted; one that has ended is left alone."""
        return self.call(lambda: self._scheduler.finish(entry, completion_tokens))

    def purge(self, order: PurgeOrder) -> Future[list[StepEvidence]]:
        """Evidence of every rank for ``order``; the requests below the floor must have been ended before."""
        return self.call(lambda: self._ask_ranks(purge=order))

    def audit(self, order: KVAuditOrder) -> Future[list[StepEvidence]]:
        """Every rank's comparison of sampled K/V rows with a cold recompute."""
        return self.call(lambda: self._ask_ranks(audit=order))

    def step_age_s(self) -> float:
        """For how long the ranks have owed an answer; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else self._clock() - began_s

    def times(self) -> EngineTimes:
        """Step time so far."""
        return EngineTimes(self._steps, self._step_s, self._execution_s)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_calls(block=self._scheduler.idle)
                self._flush()
                if self._stopping:
                    break
                if not self._may_serve():
                    raise ReplicaStopped("the serving lease was lost")
                plan = self._scheduler.plan()
                self._flush()
                if plan is None and self._clock() - self._last_step_s >= HEARTBEAT_S:
                    plan = self._scheduler.heartbeat()
                if plan is not None:
                    self._step(plan)
        except ActorError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - the thread's last frame: whatever it was, the replica stops with its name
            self._failure = ReplicaStopped(f"{type(error).__name__}: {error}")
        self._end()

    def _step(self, plan: StepPlan) -> list[StepEvidence]:
        started_s = self._clock()
        self._step_began_s = started_s
        evidence = list(self._executor.execute(plan))
        finished_s = self._clock()
        self._step_began_s = None
        self._last_step_s = finished_s
        self._steps += 1
        self._step_s += finished_s - started_s
        self._execution_s += max(report.execution_ns for report in evidence) / 1e9
        self._scheduler.complete(plan, evidence, finished_s)
        self._flush()
        return evidence

    def _ask_ranks(
        self, purge: PurgeOrder | None = None, audit: KVAuditOrder | None = None
    ) -> list[StepEvidence]:
        self._asking_ranks = True
        plan = self._scheduler.plan(purge, audit)
        assert plan is not None, "a plan with an order is never empty"
        evidence = self._step(plan)
        self._asking_ranks = False
        return evidence

    def _take_calls(self, block: bool) -> None:
        """Run what was handed over; waits for the first call (at most one second) when there is no work."""
        while True:
            try:
                item = self._inbox.get(block=block, timeout=1.0 if block else None)
            except queue.Empty:
                return
            block = False
            if item is None:
                self._stopping = True
                return
            function, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(
                    error
                )  # handed to its caller, and the replica's end if a step was half done
                if self._asking_ranks or isinstance(error, ReplicaStopped):
                    raise

    def _end(self) -> None:
        failure = self._failure or ReplicaStopped("the replica was stopped")
        with self._handing_over:
            self._stopping = True  # what was handed over is in the inbox now, and nothing follows
        self._scheduler.fail_all(Failed(failure.kind, str(failure)))
        self._flush()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None and item[1].set_running_or_notify_cancel():
                item[1].set_exception(failure)
