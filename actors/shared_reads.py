"""Shared reads of one rank: which schedule a step's attention takes, and what that saved.

Owns the choice per step and its counts. Invariant: a step takes a shared schedule only over a snapshot of this rank's own
ledger at the plan's log index, of requests that the plan dispatched, so authority and residency were decided before (K159);
the choice follows from the ledger's state, so every rank and every replay of the log makes the same one. Every
`SAMPLE_EVERY`-th shared step computes its first layer both ways, which measures the gain and the deviation.
Source: contracts K153, K155, K156, K158, K159.
"""

from __future__ import annotations

import time

import msgspec
import numpy as np

from copyhold.kernels.batch import StepBatch
from copyhold.kernels.choices import SharedPrefix
from copyhold.kernels.interface import Floats, KernelBackend, widen_rows
from copyhold.kernels.pool import split_table
from copyhold.kernels.shared_attention import SharedAttention, StateBuffers
from copyhold.kernels.shared_cost import Choice, Geometry, choose
from copyhold.kvcore.commands import Dispatch
from copyhold.kvcore.execution import ExecutionSnapshot, shares_anything, take_snapshot
from copyhold.kvcore.ledger import Ledger

SAMPLE_EVERY = 64


class SharedReadsReport(msgspec.Struct, frozen=True):
    """Totals of one cache group of one rank. Rows are K/V rows of one layer and KV head; `logical_rows` is what plain
    reads would be.

    `predicted_gain` is the mean over the shared steps, `measured_gain` and `max_abs_difference` over the `samples` that
    computed one layer both ways (0 without one).
    """

    mode: str
    steps: dict[str, int]
    refused: dict[str, int]
    logical_rows: int
    physical_rows: int
    predicted_gain: float
    measured_gain: float
    samples: int
    max_abs_difference: float


class _Sampled:
    """A shared attention whose first layer is also computed plainly, into memory of its own."""

    def __init__(self, shared: SharedAttention) -> None:
        self._shared = shared
        self.gain, self.difference = 0.0, 0.0

    def __call__(
        self, q: Floats, k_layer: np.ndarray, v_layer: np.ndarray, scale: np.float32, out: np.ndarray
    ) -> None:
        if self.gain:
            self._shared(q, k_layer, v_layer, scale, out)
            return
        began_ns = time.thread_time_ns()
        self._shared(q, k_layer, v_layer, scale, out)
        between_ns = time.thread_time_ns()
        plain = np.empty_like(out)
        self._shared.plainly(q, k_layer, v_layer, scale, plain)
        ended_ns = time.thread_time_ns()
        self.gain = max(ended_ns - between_ns, 1) / max(between_ns - began_ns, 1)
        self.difference = float(np.abs(widen_rows(out) - widen_rows(plain)).max())


class SharedReads:
    """Chooses and counts; one for each cache group of a rank."""

    def __init__(
        self,
        ledger: Ledger,
        kernels: KernelBackend,
        geometry: Geometry,
        mode: SharedPrefix,
        contract: str,
        group: int = 0,
    ) -> None:
        """`contract`: the name of the pool's layout, which a snapshot is bound to."""
        self._ledger, self._geometry, self._contract = ledger, geometry, contract
        self._kernels, self._group = kernels, group
        self._mode: SharedPrefix = mode
        self._buffers = StateBuffers(geometry.heads, geometry.head_dim)
        self._steps: dict[str, int] = {"plain": 0, "hydragen": 0, "chunk": 0}
        self._refused: dict[str, int] = {}
        self._logical_rows = self._physical_rows = 0
        self._predicted = 0.0
        self._sampled: _Sampled | None = None
        self._gain_sum, self._samples, self._difference = 0.0, 0, 0.0

    def attention(
        self, dispatch: Dispatch, batch: StepBatch, tiles_per_block: int
    ) -> SharedAttention | _Sampled | None:
        """The attention of a dispatched step in this group, or None where every sequence reads for itself."""
        self._keep_sample()
        handles = [row.request for row in dispatch.rows]
        if self._mode == "off" or len(handles) < 2 or not shares_anything(self._ledger, handles, self._group):
            self._steps["plain"] += 1
            return None
        snapshot = take_snapshot(self._ledger, handles, self._contract, self._group)
        counts = np.diff(batch.seq_starts).astype(np.int64)
        choice = choose(snapshot, counts, self._geometry, self._mode)
        self._count(choice)
        if choice.schedule.mode == "plain":
            return None
        blocks = batch.others[self._group - 1].block_tables if self._group else batch.block_tables
        tables = np.array(split_table(blocks, tiles_per_block), dtype=np.int32)
        where = (tables, batch.seq_starts, batch.context_lens)
        shared = SharedAttention(self._kernels, choice.schedule, *where, self._buffers)
        if self._shared_steps() % SAMPLE_EVERY == 1:
            self._check(snapshot, handles)
            self._sampled = _Sampled(shared)
            return self._sampled
        return shared

    def report(self) -> SharedReadsReport:
        """Totals so far; the sample of a step still running is not among them."""
        shared = self._shared_steps()
        return SharedReadsReport(
            mode=self._mode,
            steps=dict(self._steps),
            refused=dict(self._refused),
            logical_rows=self._logical_rows,
            physical_rows=self._physical_rows,
            predicted_gain=round(self._predicted / shared, 3) if shared else 0.0,
            measured_gain=round(self._gain_sum / self._samples, 3) if self._samples else 0.0,
            samples=self._samples,
            max_abs_difference=self._difference,
        )

    def _check(self, snapshot: ExecutionSnapshot, handles: list) -> None:
        snapshot.require_step(handles, self._contract)
        snapshot.require_current(self._ledger)
        snapshot.require_same_blocks(self._ledger, self._group)

    def _count(self, choice: Choice) -> None:
        self._steps[choice.schedule.mode] += 1
        for name, reason in choice.refused:
            self._refused[f"{name}:{reason}"] = self._refused.get(f"{name}:{reason}", 0) + 1
        if choice.schedule.mode != "plain":
            self._logical_rows += choice.schedule.rows.logical_pairs
            self._physical_rows += choice.schedule.rows.physical_rows
            self._predicted += choice.predicted_gain

    def _keep_sample(self) -> None:
        if self._sampled is not None and self._sampled.gain:
            self._samples += 1
            self._gain_sum += self._sampled.gain
            self._difference = max(self._difference, self._sampled.difference)
        self._sampled = None

    def _shared_steps(self) -> int:
        return self._steps["hydragen"] + self._steps["chunk"]
