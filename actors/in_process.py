"""A replica without Ray and sockets: the real scheduler, ledgers, ranks and pools, each rank a thread of this process.

Owns the loop over steps and the record of what each step did: what was read from the cache, shared, evicted, preempted, and
the logits behind every token. For verification and simulation; what serves is ``copyhold.actors.replica``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from copyhold.kernels.choices import SharedPrefix
from copyhold.kvcore.commands import Admit, Dispatch, Evict, Genesis, GroupSpec, Release, Scope
from copyhold.kvcore.identity import world_digest
from copyhold.models.layer_groups import LayerGroup, divided
from copyhold.models.llama import LlamaShard
from copyhold.models.shard_set import ShardSet
from copyhold.namespace.certificate import RankSigner
from copyhold.namespace.records import IncarnationRecord

from .dispatch import StepBudget
from .errors import RanksDiffer
from .executor import LocalExecutor, RankLike
from .group_room import blocks_for_all
from .messages import Admitted, Failed, Finished, ReuseReceipt, StreamItem, TokenChunk
from .plan import KVAuditOrder, StepEvidence, StepPlan
from .rank import Rank
from .rank_layout import attach
from .scheduler import Scheduler
from .submission import Entry, Submission
from .world import grouped_world

INCARNATION = "in-process.1"
Logits = npt.NDArray[np.float32]


class ReplicaShape(msgspec.Struct, frozen=True):
    """Sizes of one in-process replica: blocks, requests and tokens.

    ``other_block_sizes``: of further cache groups; the model's layers are divided among all of them in equal runs, and the
    further ones get as many blocks as keep the scheduler's policies right (actors/group_room.py).
    """

    num_blocks: int
    block_size: int = 16
    max_requests: int = 8
    max_model_len: int = 512
    chunk_tokens: int = 512
    step_tokens: int = 512
    shared_prefix: SharedPrefix = "off"
    other_block_sizes: tuple[int, ...] = ()

    def groups(self, num_layers: int) -> tuple[LayerGroup, ...]:
        """The division of so many layers."""
        return divided(num_layers, (self.block_size, *self.other_block_sizes))

    def specs(self, num_layers: int) -> tuple[GroupSpec, ...]:
        """The groups as a log's first record names them."""
        groups = self.groups(num_layers)
        first = GroupSpec(groups[0].name, self.block_size, self.num_blocks)
        others = [
            GroupSpec(
                group.name, group.block_size, blocks_for_all(first, group.block_size, self.max_requests)
            )
            for group in groups[1:]
        ]
        return (first, *others)


Wrap = Callable[[int, RankLike], RankLike]
"""(number, rank) -> what takes the rank's plans in its place."""


class RankSet:
    """Fresh ledgers behind shards and their pools; executes plans on every rank."""

    def __init__(
        self,
        world: bytes,
        shards: Sequence[LlamaShard],
        shape: ReplicaShape,
        wrap: Wrap = lambda _, rank: rank,
    ) -> None:
        """``wrap``: where a test plants a fault."""
        specs = shape.specs(shards[0].config.num_layers)
        self.genesis = Genesis(world, specs, shape.max_requests, shape.max_model_len, INCARNATION)
        self.pools = [shard.pool for shard in shards]
        """Of cache group 0"""
        self.group_pools = [shard.pools for shard in shards]
        self.signers = [RankSigner(bytes([number + 1]) * 32) for number in range(len(shards))]
        self.ranks = [
            Rank(number, INCARNATION, shard, signer, shape.shared_prefix)
            for number, (shard, signer) in enumerate(zip(shards, self.signers, strict=True))
        ]
        self._executor = LocalExecutor([wrap(number, rank) for number, rank in enumerate(self.ranks)])

    @classmethod
    def lent(cls, shards: ShardSet, shape: ReplicaShape) -> RankSet:
        """Ranks over loaded shards, which get fresh pools and are the caller's to close."""
        num_layers = shards.checkpoint.config.num_layers
        groups, num_blocks = shape.groups(num_layers), [spec.num_blocks for spec in shape.specs(num_layers)]
        world = grouped_world(shards.checkpoint, groups, shards.kv_dtype)
        served = world_digest(world)
        for rank, pools in enumerate(shards.new_group_pools(groups, num_blocks)):
            attach(world, served, rank, num_blocks, pools)
        return cls(served, shards.shards, shape)

    @property
    def member(self) -> IncarnationRecord:
        """What an authority would know of this incarnation."""
        keys = tuple(signer.public_key.hex() for signer in self.signers)
        return IncarnationRecord(INCARNATION, "in-process", len(self.ranks), keys)

    def execute(self, plan: StepPlan) -> list[StepEvidence]:
        """One plan on every rank. Raises: what a rank raises; the set is of no further use then."""
        return list(self._executor.execute(plan))

    def largest_value(self) -> float:
        """The largest magnitude that any rank's pool holds, K or V."""
        return float(np.max([pools.largest_value() for pools in self.group_pools]))

    def close(self) -> None:
        self._executor.close()


def count_shared_reads(counts: Counter[str], read: Iterable[Iterable[npt.NDArray[np.integer]]]) -> None:
    """Count reads of a block that other requests of a step read too; `read`: per cache group, the blocks of each request."""
    for group, requests in enumerate(read):
        readers: Counter[int] = Counter()
        for blocks in requests:
            readers.update(blocks.tolist())
        name = "other_shared_reads" if group else "shared_reads"
        counts[name] += sum(times - 1 for times in readers.values())


class InProcessStream:
    """Everything one request was sent, and the logits behind each of its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logits: list[Logits] = []
        self.receipt: ReuseReceipt | None = None
        self.failure: Failed | None = None
        self.ended = False
        self.entry: Entry | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that its admission found cached; 0 before it."""
        return 0 if self.receipt is None else self.receipt.cached_tokens

    def put(self, item: StreamItem) -> None:
        """Take one item of the stream."""
        if isinstance(item, Admitted):
            self.receipt = item.receipt
        elif isinstance(item, TokenChunk):
            self.tokens.extend(item.tokens)
        elif isinstance(item, Failed):
            self.failure, self.ended = item, True
        elif isinstance(item, Finished):
            self.ended = True


class InProcessReplica:
    """One replica; ``counts`` tallies what happened: cached_tokens, shared_reads, partial_chunks, evicted, preempted.

    Names that begin with ``other_`` are about the cache groups after the first.
    """

    def __init__(self, shards: ShardSet, shape: ReplicaShape) -> None:
        self._shards = shards
        self._set = RankSet.lent(shards, shape)
        self._shape = shape
        self.scheduler = Scheduler(self._set.genesis, StepBudget(shape.step_tokens, shape.chunk_tokens))
        self.counts: Counter[str] = Counter()
        self._streams: list[InProcessStream] = []
        self._submitted = 0

    def submit(
        self, tokens: Sequence[int], namespace: str, max_new_tokens: int, publish: bool = True
    ) -> InProcessStream:
        """Queue one greedy request. Raises: what ``Scheduler.submit`` raises."""
        self._submitted += 1
        stream = InProcessStream()
        submission = Submission(
            request_id=f"request-{self._submitted}",
            key_id="key",
            receipt_id=f"receipt-{self._submitted}",
            scope=Scope(namespace, 1, self._set.genesis.world),
            model="in-process",
            tokens=np.asarray(tokens, dtype="<i4").tobytes(),
            max_new_tokens=max_new_tokens,
            stop_token_ids=frozenset(),
            lookup=True,
            publish=publish,
            arrived_at_s=0.0,
            created_at=0.0,
            deterministic=self._shards.deterministic,
        )
        stream.entry = self.scheduler.submit(submission, stream.put)
        self._streams.append(stream)
        return stream

    def step(self, order: KVAuditOrder | None = None) -> list[StepEvidence]:
        """One plan through every rank; empty when there was nothing to say. Raises: ``RanksDiffer`` and a rank's own."""
        plan = self.scheduler.plan(None, order)
        if plan is None:
            return []
        self._count(plan)
        evidence = self._set.execute(plan)
        self._keep_logits(plan)
        self.scheduler.complete(plan, evidence, 0.0)
        return evidence

    def run(self, max_steps: int = 100_000) -> None:
        """Steps until every request has ended."""
        for _ in range(max_steps):
            if self.scheduler.idle:
                self.counts["preempted"] = self.scheduler.preemptions
                self._streams = [stream for stream in self._streams if not stream.ended]
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.scheduler.counts()}")

    def serve(
        self, prompts: Sequence[Sequence[int]], namespace: str, max_new_tokens: int
    ) -> list[InProcessStream]:
        """All of ``prompts`` at once in one namespace, until they have ended."""
        streams = [self.submit(prompt, namespace, max_new_tokens) for prompt in prompts]
        self.run()
        self.counts["cached_tokens"] += sum(stream.cached_tokens for stream in streams)
        return streams

    def audit(self, namespace: str, positions_each: int = 256) -> tuple[int, float]:
        """Rows of all that the namespace has cached, evenly spaced in a long path, on every rank, beside a cold run.

        Returns rows compared and the largest difference.
        """
        rows, worst = 0, 0.0
        ledger = self.scheduler.ledger
        by_group = [ledger.paths(namespace, group) for group in range(len(self._set.genesis.groups))]
        for paths in zip(*by_group, strict=True):
            tokens = paths[0][1]
            positions = np.unique(np.linspace(0, len(tokens) - 1, positions_each).astype(int))
            order = KVAuditOrder.of(tokens, [blocks for _, _, blocks in paths], positions)
            for report in self.step(order):
                assert report.audit is not None, "an audit order is answered with an audit"
                rows += report.audit.rows_compared
                worst = max(worst, report.audit.max_abs_difference)
        return rows, worst

    def attention_steps(self, group: int = 0) -> dict[str, int]:
        """Steps by how shared K/V of a cache group was read, as every rank counted them."""
        reports = [rank.group_reads[group].report() for rank in self._set.ranks]
        assert all(report.steps == reports[0].steps for report in reports), reports
        return reports[0].steps

    def largest_value(self) -> float:
        """The largest magnitude that any rank's pool holds, K or V."""
        return self._set.largest_value()

    def close(self) -> None:
        self._set.close()

    def _count(self, plan: StepPlan) -> None:
        for command in plan.commands:
            if isinstance(command, Admit | Dispatch):
                self.counts["evicted"] += len(command.evict)
            elif isinstance(command, Evict):
                self.counts["evicted"] += len(command.nodes)
            elif isinstance(command, Release) and command.reason == "preempt":
                self.counts["released_to_preempt"] += 1
        if plan.commands and isinstance(plan.commands[-1], Dispatch):
            self.counts["steps"] += 1
            self._count_rows(plan.commands[-1], plan.sample)

    def _count_rows(self, dispatch: Dispatch, sample: tuple[int, ...]) -> None:
        self.counts["partial_chunks"] += len(dispatch.rows) - len(sample)
        sizes = (self._shape.block_size, *self._shape.other_block_sizes)
        read = [
            [table[span.request.slot, : -(-(span.start + span.count) // size)] for span in dispatch.rows]
            for table, size in zip(self.scheduler.ledger.group_tables, sizes, strict=True)
        ]
        count_shared_reads(self.counts, read)

    def _keep_logits(self, plan: StepPlan) -> None:
        """Hand every sampled row's logits to its stream; the rows' requests still hold their slots here."""
        if not plan.sample:
            return
        dispatch = plan.commands[-1]
        assert isinstance(dispatch, Dispatch)
        logits = self._shards.last_logits()
        holders = {stream.entry.handle: stream for stream in self._streams if stream.entry is not None}
        for place, row in enumerate(plan.sample):
            stream = holders.get(dispatch.rows[row].request)
            if stream is None:
                raise RanksDiffer(0, "a stream for every sampled row", f"none for row {row}")
            stream.logits.append(logits[place].copy())
