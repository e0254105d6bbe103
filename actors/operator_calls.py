"""The operator's calls to one replica: what it says of itself, and what it has audited.

Owns the JSON shapes of status, metrics and pool. Invariant: reads only; what looks at the ledger runs on the engine's thread
between two steps. ``Replica`` inherits these calls and owns every field that is read here.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from copyhold.kernels.dispatch import kernel_report

from .agreement import ledger_findings
from .errors import ReplicaStopped
from .plan import KVAuditOrder
from .recording_settings import RecordingReport

if TYPE_CHECKING:
    from copyhold.namespace.leases import LeaseHolder

    from .engine import Engine
    from .recording import Recording
    from .replica import ReplicaSpec
    from .request_counts import RequestCounts
    from .scheduler import Scheduler

_SLOW_STEP_S = 6.0
"""A step older than this turns health bad before the step's own timeout ends the replica."""


class OperatorCalls:
    """Everything that ``copyhold status``, ``/metrics``, pools and audits ask of a replica."""

    _spec: ReplicaSpec
    _engine: Engine | None
    _scheduler: Scheduler
    _lease: LeaseHolder
    _counts: RequestCounts
    _recording: Recording | None
    _draining: bool
    _lease_refusal: str
    receipts_lost: int

    async def status(self) -> dict[str, Any]:
        """Counts, agreement and times; JSON-ready."""
        engine = self._engine
        if engine is None or engine.failure is not None:
            failure = "starting" if engine is None else str(engine.failure)
            return {
                "replica": self._spec.name,
                "incarnation": self._spec.incarnation,
                "serving": False,
                "failure": failure,
            }
        running, waiting = self._scheduler.counts()
        return {
            "replica": self._spec.name,
            "incarnation": self._spec.incarnation,
            "serving": self._serving(),
            "draining": self._draining,
            "deterministic": self._spec.deterministic,
            "kernels": kernel_report(self._spec.kernels),
            "step_age_s": round(engine.step_age_s(), 3),
            "failure": self._lease_refusal,
            "running": running,
            "waiting": waiting,
            "preemptions": self._scheduler.preemptions,
            "admitted_requests": self._scheduler.admitted_requests,
            "cached_tokens": self._scheduler.cached_tokens,
            "receipts_lost": self.receipts_lost,
            "cache": msgspec.to_builtins(self._scheduler.cache_report()),
            "agreement": msgspec.to_builtins(self._scheduler.agreement.report()),
            "pool_size": msgspec.to_builtins(self._spec.pool),
            "recording": msgspec.to_builtins(self._recording_report()),
            "times": msgspec.to_builtins(engine.times()),
        }

    async def metrics(self) -> dict[str, Any]:
        """Status, totals of requests, lease and pool gauge: numbers of the whole replica, nothing of a tenant."""
        figures = await self.status()
        figures["requests"] = msgspec.to_builtins(self._counts.report())
        figures["lease_remaining_s"] = self._lease.remaining_s(time.monotonic())
        if "running" in figures:
            gauge = self._serving_engine().call(self._scheduler.ledger.gauge)
            figures["pool"] = msgspec.to_builtins(await asyncio.wrap_future(gauge))
        return figures

    async def pool(self) -> dict[str, Any]:
        """Gauge and, per namespace, the blocks its index holds; one snapshot between two steps."""
        return await asyncio.wrap_future(self._serving_engine().call(self._pool_snapshot))

    async def audit_ledger(self) -> list[str]:
        """Everything in which the scheduler's ledger contradicts itself; taken between two steps."""
        call = self._serving_engine().call(lambda: ledger_findings(self._scheduler.ledger))
        return await asyncio.wrap_future(call)

    async def audit_kv(self, namespace: str, samples: int) -> list[dict[str, Any]]:
        """Compare sampled K/V rows of the namespace's longest cached prefix with a cold recompute on every rank."""
        engine = self._serving_engine()
        ledger = self._scheduler.ledger
        call = engine.call(
            lambda: [ledger.paths(namespace, group) for group in range(len(ledger.group_tables))]
        )
        by_group = await asyncio.wrap_future(call)
        if not by_group[0]:
            return []
        paths = max(zip(*by_group, strict=True), key=lambda path: len(path[0][1]))
        tokens = paths[0][1]
        positions = np.unique(np.linspace(0, len(tokens) - 1, num=min(samples, len(tokens)), dtype=np.int64))
        order = KVAuditOrder.of(tokens, [blocks for _, _, blocks in paths], positions)
        reports = await asyncio.wrap_future(engine.audit(order))
        return [
            {**msgspec.structs.asdict(report.audit), "tokens": len(tokens)}
            for report in reports
            if report.audit is not None
        ]

    def _serving(self) -> bool:
        """Whether a request sent now would be admitted and computed."""
        engine = self._engine
        if engine is None or engine.failure is not None or self._draining:
            return False
        return self._lease.holds(time.monotonic()) and engine.step_age_s() < _SLOW_STEP_S

    def _recording_report(self) -> RecordingReport:
        return RecordingReport() if self._recording is None else self._recording.report()

    def _serving_engine(self) -> Engine:
        if self._engine is None:
            raise ReplicaStopped("the replica has not started")
        return self._engine

    def _pool_snapshot(self) -> dict[str, Any]:
        ledger = self._scheduler.ledger
        gauge = ledger.gauge()
        blocks: dict[str, set[int]] = {}
        for _, scope in ledger.state.scopes.all_scopes():
            for _, _, path_blocks in ledger.paths(scope.namespace):
                blocks.setdefault(scope.namespace, set()).update(path_blocks.tolist())
        return {
            **msgspec.to_builtins(gauge),
            "log_index": ledger.log_index,
            "floors": {
                name: msgspec.to_builtins(facts) for name, facts in self._scheduler.floor_facts().items()
            },
            "namespaces": {name: sorted(held) for name, held in sorted(blocks.items())},
        }
