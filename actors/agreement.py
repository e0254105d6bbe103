"""The comparison of one scheduler's ledger with its ranks' ledgers, step by step.

Owns the record of what was compared. Invariant: ``check`` returns only if every rank reported the scheduler's own log
index and machine digest for the plan at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from .errors import RanksDiffer, ReplicaStopped
from .plan import StepEvidence, StepPlan

if TYPE_CHECKING:
    from copyhold.kvcore.ledger import Ledger


class AgreementReport(msgspec.Struct, frozen=True):
    """How many log indices were compared across all ledgers, and where the last comparison stood."""

    ledgers: int
    compared_steps: int
    compared_log_indices: int
    differing: int
    last_log_index: int
    last_machine_digest: str


class Agreement:
    """Expected position and digest of the plan in flight, and the tally of past comparisons."""

    def __init__(self) -> None:
        self._log_index = 0
        self._digest = b""
        self._ledgers = 1
        self._steps = 0
        self._indices: int = 0
        self._last_compared_index = -1
        self._differing = 0

    def expect(self, log_index: int, machine_digest: bytes) -> None:
        """The next evidence must report exactly this."""
        self._log_index, self._digest = log_index, machine_digest

    def check(self, plan: StepPlan, evidence: Sequence[StepEvidence]) -> None:
        """Compare every rank's report. Raises ``RanksDiffer`` at the first that is not equal."""
        self._ledgers = 1 + len(evidence)
        expected = f"index {self._log_index} digest {self._digest.hex()}"
        for rank, report in enumerate(evidence):
            if report.failure:
                self._differing += 1
                raise ReplicaStopped(f"rank {rank} failed: {report.failure}")
            same_place = (report.rank, report.incarnation, report.step) == (rank, plan.incarnation, plan.step)
            if not same_place or report.log_index != self._log_index or report.machine_digest != self._digest:
                self._differing += 1
                raise RanksDiffer(
                    rank, expected, f"index {report.log_index} digest {report.machine_digest.hex()}"
                )
        self._steps += 1
        if self._log_index != self._last_compared_index:
            self._indices += 1
            self._last_compared_index = self._log_index

    def report(self) -> AgreementReport:
        """The tally so far."""
        return AgreementReport(
            self._ledgers,
            self._steps,
            self._indices,
            self._differing,
            self._last_compared_index,
            self._digest.hex(),
        )


def ledger_findings(ledger: Ledger) -> list[str]:
    """What an audit from scratch finds wrong in one ledger; empty when nothing is. Commands wait meanwhile."""
    from copyhold.kvcore.audit import AuditViolation, audit

    try:
        with ledger.at_rest():
            audit(ledger)
    except AuditViolation as violation:
        return list(violation.findings)
    return []
