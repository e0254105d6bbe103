"""One tensor-parallel rank: its own ledger, its own pools (one a cache group), its shard of the model.

Owns the execution of step plans on one rank. The rank applies the plan's commands to its own ledger, zeroes what the
receipts name, computes the dispatched rows through its own block tables and reports position, digest and tokens.
Invariant: nothing is computed for a plan whose incarnation or log position is not this rank's own; such a plan raises
and the rank is of no further use (docs/architecture.md, failure model).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from copyhold.kernels.batch import GroupRows, StepBatch
from copyhold.kernels.choices import SharedPrefix
from copyhold.kernels.interface import TILE
from copyhold.kernels.shared_cost import Geometry
from copyhold.kvcore.commands import Dispatch
from copyhold.kvcore.ledger import Ledger
from copyhold.models.llama import LlamaShard
from copyhold.models.oneshot import audit_kv
from copyhold.models.sampling import RowDraw, SamplingParams
from copyhold.namespace.certificate import RankSigner

from .errors import RanksDiffer
from .group_room import require_pools
from .plan import Draw, KVAuditOrder, KVAuditResult, StepEvidence, StepPlan
from .scrubbing import Scrubber
from .shared_reads import SharedReads


class Rank:
    """Executes plans; plain, without Ray and sockets, so that tests and simulation run it in process."""

    def __init__(
        self,
        rank: int,
        incarnation: str,
        shard: LlamaShard,
        signer: RankSigner,
        shared_prefix: SharedPrefix = "auto",
    ) -> None:
        """Computes in the shard's pools, one for each cache group of the ledger in its order."""
        self._rank = rank
        self._incarnation = incarnation
        self._shard = shard
        self._pools = shard.pools
        self._signer = signer
        # Audits are asked for on another thread than the one that runs plans.
        self._ledger = Ledger(threading.Lock())
        self._scrubber = Scrubber(self._ledger, self._pools)
        self.group_reads = self._group_reads("off" if shard.deterministic else shared_prefix)
        """Shared reads by cache group: each has blocks, and so prefixes in whole blocks, of its own"""

    @property
    def ledger(self) -> Ledger:
        """This rank's own ledger; read only for callers."""
        return self._ledger

    @property
    def shared_reads(self) -> SharedReads:
        """Those of cache group 0."""
        return self.group_reads[0]

    def execute(self, plan: StepPlan) -> StepEvidence:
        """Apply, compute, report.

        Raises ``RanksDiffer`` for a plan of another incarnation or position, ``CacheGroupsUnfit`` for a log whose groups
        are not those of this rank's pools.
        """
        started_ns = time.perf_counter_ns()
        if plan.incarnation != self._incarnation or plan.first_log_index != self._ledger.log_index:
            raise RanksDiffer(
                self._rank,
                f"incarnation {plan.incarnation} index {plan.first_log_index}",
                f"incarnation {self._incarnation} index {self._ledger.log_index}",
            )
        if plan.first_log_index == 0:
            require_pools(plan.commands, self._pools)
        for offset, command in enumerate(plan.commands):
            self._scrubber.apply(plan.first_log_index + offset, command)
        digest = self._ledger.machine_digest
        tokens: tuple[int, ...] = ()
        if plan.commands and isinstance(plan.commands[-1], Dispatch):
            tokens = self._compute(plan.commands[-1], plan.sample, plan.draws)
        return StepEvidence(
            incarnation=self._incarnation,
            step=plan.step,
            rank=self._rank,
            log_index=self._ledger.log_index,
            machine_digest=digest,
            tokens=tokens,
            execution_ns=time.perf_counter_ns() - started_ns,
            purge=None
            if plan.purge is None
            else self._signer.sign(
                self._scrubber.evidence(plan.purge, self._incarnation, self._rank, digest)
            ),
            audit=None if plan.audit is None else self._audit(plan.audit),
        )

    def _compute(
        self, dispatch: Dispatch, sample: tuple[int, ...], draws: tuple[Draw, ...]
    ) -> tuple[int, ...]:
        pools = self._pools.pools
        batch = step_batch(self._ledger, dispatch, sample, pools[0].block_size)
        if len(pools) > 1:
            batch.others = other_rows(self._ledger, dispatch, batch, [pool.block_size for pool in pools[1:]])
        attentions = [
            reads.attention(dispatch, batch, pool.tiles_per_block)
            for reads, pool in zip(self.group_reads, pools, strict=True)
        ]
        logits = self._shard.forward(batch, attentions)
        if not sample:
            return ()
        ends = [dispatch.rows[row].start + dispatch.rows[row].count for row in sample]
        drawn = [RowDraw(draw.index, ends[draw.index], draw.params) for draw in draws]
        return tuple(int(token) for token in self._shard.choose(logits, drawn))

    def _group_reads(self, mode: SharedPrefix) -> tuple[SharedReads, ...]:
        found = []
        for group, pool in enumerate(self._pools.pools):
            heads = Geometry(
                len(self._shard.partition.q_heads), pool.kv_heads, pool.head_dim, pool.k.itemsize
            )
            contract = f"{pool.k.dtype.name} {pool.kv_heads}x{pool.head_dim} tile {TILE}"
            found.append(SharedReads(self._ledger, self._shard.kernels, heads, mode, contract, group))
        return tuple(found)

    def _audit(self, order: KVAuditOrder) -> KVAuditResult:
        found = audit_kv(
            self._shard,
            np.frombuffer(order.tokens, dtype="<i4"),
            np.asarray(order.block_ids, dtype=np.int64),
            np.asarray(order.positions, dtype=np.int64),
            other_blocks=[np.asarray(blocks, dtype=np.int64) for blocks in order.other_blocks],
        )
        return KVAuditResult(self._rank, found.rows_compared, float(found.max_abs_difference))


def step_batch(ledger: Ledger, dispatch: Dispatch, sample: tuple[int, ...], block_size: int) -> StepBatch:
    """The arrays of one dispatched step, read from a ledger: token ids, positions, slots, tables, logit rows.

    Slots and tables are those of cache group 0.
    """
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    starts = [0]
    contexts: list[int] = []
    table_rows: list[int] = []
    widest = 1
    for span in dispatch.rows:
        slot, end = span.request.slot, span.start + span.count
        rows = np.arange(span.start, end, dtype=np.int64)
        blocks = ledger.tables[slot, rows // block_size].astype(np.int64)
        tokens.append(ledger.request_tokens(span.request, span.start, end))
        positions.append(rows)
        slots.append(blocks * block_size + rows % block_size)
        starts.append(starts[-1] + span.count)
        contexts.append(end)
        table_rows.append(slot)
        widest = max(widest, -(-end // block_size))
    logit_rows = [starts[index + 1] - 1 for index in sample]
    return StepBatch(
        tokens=np.concatenate(tokens).astype(np.int64),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        seq_starts=np.asarray(starts, dtype=np.int32),
        context_lens=np.asarray(contexts, dtype=np.int32),
        block_tables=np.ascontiguousarray(ledger.tables[table_rows, :widest], dtype=np.int32),
        logit_rows=np.asarray(logit_rows, dtype=np.int64),
    )


def other_rows(
    ledger: Ledger, dispatch: Dispatch, batch: StepBatch, block_sizes: Sequence[int]
) -> tuple[GroupRows, ...]:
    """Slots and tables of the same step in cache groups 1, 2, ..., whose block sizes are given."""
    table_rows = np.array([span.request.slot for span in dispatch.rows], dtype=np.int64)
    slot_of_row = np.repeat(table_rows, np.diff(batch.seq_starts))
    found = []
    for table, size in zip(ledger.group_tables[1:], block_sizes, strict=True):
        blocks = table[slot_of_row, batch.positions // size].astype(np.int64)
        widest = -(-int(batch.context_lens.max()) // size)
        tables = np.ascontiguousarray(table[table_rows, :widest], dtype=np.int32)
        found.append(GroupRows(blocks * size + batch.positions % size, tables))
    return tuple(found)


def warm_up_step(shard: LlamaShard) -> None:
    """One computed step on block 0, which is zeroed again: allocator, threads and collective have all run once.

    Its last row is chosen both ways, greedy and drawn.
    """
    count = min(shard.pool.block_size, 4)
    rows = np.arange(count, dtype=np.int64)
    table = np.zeros((1, 1), dtype=np.int32)
    others = len(shard.pools) - 1
    batch = StepBatch(
        tokens=np.zeros(count, dtype=np.int64),
        positions=rows,
        slots=rows,
        seq_starts=np.array([0, count], dtype=np.int32),
        context_lens=np.array([count], dtype=np.int32),
        block_tables=table,
        logit_rows=np.array([count - 1], dtype=np.int64),
        others=(GroupRows(rows, table),) * others,
    )
    logits = shard.forward(batch)
    shard.choose(logits)
    shard.choose(logits, [RowDraw(0, count, SamplingParams(1.0, 0.5))])
    shard.pools.zero_blocks([[0]] * (others + 1))
