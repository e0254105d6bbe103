"""Executors of step plans: over sockets to worker processes, or in this process.

``ChannelExecutor`` is what replicas use; ``LocalExecutor`` runs the same ranks in one process for tests, simulation
and single-process runs. Both decode what they sent, so the wire format is exercised either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from .plan import StepEvidence, StepPlan, decode_evidence, decode_plan, encode_evidence, encode_plan
from .transport import StepListener


class RankLike(Protocol):
    """One rank: applies a plan and reports."""

    def execute(self, plan: StepPlan) -> StepEvidence: ...


class ChannelExecutor:
    """Plans to worker processes over a ``StepListener``."""

    def __init__(self, listener: StepListener, timeout_s: float) -> None:
        self._listener = listener
        self._timeout_s = timeout_s

    def execute(self, plan: StepPlan) -> Sequence[StepEvidence]:
        """Raises ``TransportClosed`` when a rank is gone or silent for longer than the timeout."""
        answers = self._listener.execute(encode_plan(plan), self._timeout_s)
        return [decode_evidence(answer) for answer in answers]

    def close(self) -> None:
        self._listener.close()


class LocalExecutor:
    """Plans to ranks of this process, one thread each so that their collectives can meet."""

    def __init__(self, ranks: Sequence[RankLike]) -> None:
        self._ranks = ranks
        self._threads = ThreadPoolExecutor(max_workers=len(ranks), thread_name_prefix="copyhold-rank")

    def execute(self, plan: StepPlan) -> Sequence[StepEvidence]:
        message = encode_plan(plan)
        futures = [self._threads.submit(rank.execute, decode_plan(message)) for rank in self._ranks]
        return [decode_evidence(encode_evidence(future.result())) for future in futures]

    def close(self) -> None:
        self._threads.shutdown(wait=True)
