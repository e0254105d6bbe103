"""A whole replica in this process: scheduler, ledgers, pools and shards are the real ones, ranks are threads.

``cold_tokens`` is the oracle: a shard and block tables written by hand, no scheduler, no ledger, no cache.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from paged_run import make_batch

from copyhold.actors.cache_settings import DEFAULT_CACHE, CacheSettings
from copyhold.actors.dispatch import StepBudget
from copyhold.actors.engine import Engine
from copyhold.actors.in_process import RankSet, ReplicaShape, Wrap
from copyhold.actors.messages import Admitted, Failed, Finished, ReuseReceipt, StreamItem, TokenChunk
from copyhold.actors.plan import KVAuditOrder, PurgeOrder, StepEvidence, StepPlan
from copyhold.actors.scheduler import Scheduler
from copyhold.actors.submission import Entry, Submission
from copyhold.actors.world import grouped_world
from copyhold.kernels.cache_pools import CachePools
from copyhold.kernels.choices import SharedPrefix
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import Scope
from copyhold.kvcore.identity import chain_digests, world_digest
from copyhold.models.collective import SingleProcess
from copyhold.models.llama import LlamaShard
from copyhold.models.manifest import ConvertedCheckpoint
from copyhold.models.thread_collective import ThreadMeeting

BLOCK = 16
KEY = b"k" * 32


def run_of(first: int, count: int) -> list[int]:
    """The ``count`` token ids ``first``, ``first + 1``, ..."""
    return list(range(first, first + count))


def digests_of(tokens: Sequence[int]) -> set[bytes]:
    """Chain digests of every whole-block prefix of ``tokens``."""
    return set(chain_digests(KEY, np.asarray(tokens, dtype=np.int32), BLOCK))


class Stream:
    """Everything one request was sent, in order."""

    def __init__(self) -> None:
        self.items: list[StreamItem] = []
        self.ended = threading.Event()
        self.entry: Entry | None = None

    def put(self, item: StreamItem) -> None:
        self.items.append(item)
        if isinstance(item, Finished | Failed):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for item in self.items if isinstance(item, TokenChunk) for token in item.tokens]

    @property
    def admitted(self) -> ReuseReceipt:
        """The receipt of the one admission."""
        (receipt,) = [item.receipt for item in self.items if isinstance(item, Admitted)]
        return receipt

    @property
    def finished(self) -> Finished:
        (end,) = [item for item in self.items if isinstance(item, Finished)]
        assert self.items[-1] is end
        return end

    @property
    def failed(self) -> Failed:
        (end,) = [item for item in self.items if isinstance(item, Failed)]
        assert self.items[-1] is end
        return end


class LocalReplica:
    """``checkpoint.tp_size`` ranks behind a ``LocalExecutor``; ``wrap`` may plant a fault around a rank."""

    def __init__(
        self,
        checkpoint: ConvertedCheckpoint,
        *,
        num_blocks: int = 32,
        max_requests: int = 8,
        chunk_tokens: int = 1000,
        step_tokens: int = 2000,
        wrap: Wrap = lambda _, rank: rank,
        pools: Callable[[int], type[KVPool]] = lambda _: KVPool,
        shared_prefix: SharedPrefix = "auto",
        other_block_sizes: tuple[int, ...] = (),
        cache: CacheSettings = DEFAULT_CACHE,
    ) -> None:
        self.meeting = ThreadMeeting(checkpoint.tp_size)
        shape = ReplicaShape(
            num_blocks, BLOCK, max_requests, 512, chunk_tokens, step_tokens, shared_prefix, other_block_sizes
        )
        self.world = world_digest(grouped_world(checkpoint, shape.groups(checkpoint.config.num_layers)))
        shards = [self._shard(checkpoint, rank, pools(rank), shape) for rank in range(checkpoint.tp_size)]
        self.rank_set = RankSet(self.world, shards, shape, wrap)
        self.pools, self.ranks, self.member = self.rank_set.pools, self.rank_set.ranks, self.rank_set.member
        self.published: list[tuple[str, int, int]] = []
        budget = StepBudget(step_tokens, chunk_tokens)
        self.scheduler = Scheduler(self.rank_set.genesis, budget, self._note_publication, cache)
        self._clock_s = 0.0
        self._requests = 0

    def _shard(
        self, checkpoint: ConvertedCheckpoint, rank: int, kind: type[KVPool], shape: ReplicaShape
    ) -> LlamaShard:
        config, part = checkpoint.config, checkpoint.partitions[rank]
        groups, specs = shape.groups(config.num_layers), shape.specs(config.num_layers)
        made = [
            kind(len(group.layers), spec.num_blocks, len(part.kv_heads), config.head_dim, group.block_size)
            for group, spec in zip(groups, specs, strict=True)
        ]
        pool = CachePools(made, [group.layers for group in groups])
        collective = SingleProcess() if checkpoint.tp_size == 1 else self.meeting.collective(rank)
        return LlamaShard(config, part, checkpoint.shard_path(rank), pool, collective)

    def close(self) -> None:
        self.rank_set.close()

    @property
    def ledger(self):
        return self.scheduler.ledger

    def submission(
        self,
        tokens: Sequence[int],
        namespace: str = "a",
        *,
        generation: int = 1,
        max_new: int = 4,
        stop: Sequence[int] = (),
        lookup: bool = True,
        publish: bool = True,
    ) -> Submission:
        self._requests += 1
        return Submission(
            request_id=f"req-{self._requests}",
            key_id="key",
            receipt_id=f"rcp-{self._requests}",
            scope=Scope(namespace, generation, self.world),
            model="tiny",
            tokens=np.asarray(tokens, dtype="<i4").tobytes(),
            max_new_tokens=max_new,
            stop_token_ids=frozenset(stop),
            lookup=lookup,
            publish=publish,
            arrived_at_s=self._clock_s,
            created_at=0.0,
        )

    def submit(self, tokens: Sequence[int], namespace: str = "a", **options) -> Stream:
        stream = Stream()
        stream.entry = self.scheduler.submit(self.submission(tokens, namespace, **options), stream.put)
        return stream

    def cancel(self, stream: Stream) -> None:
        assert stream.entry is not None
        self.scheduler.cancel(stream.entry)

    def plan(self, purge: PurgeOrder | None = None, order: KVAuditOrder | None = None) -> StepPlan | None:
        return self.scheduler.plan(purge, order)

    def step(
        self, purge: PurgeOrder | None = None, order: KVAuditOrder | None = None
    ) -> list[StepEvidence] | None:
        """One plan through every rank; ``None`` when there was nothing to say."""
        plan = self.plan(purge, order)
        if plan is None:
            return None
        evidence = self.rank_set.execute(plan)
        self._clock_s += 0.5
        self.scheduler.complete(plan, evidence, self._clock_s)
        return evidence

    def run(self, max_steps: int = 2000) -> int:
        """Steps until idle; returns how many."""
        for steps in range(max_steps):
            if self.scheduler.idle:
                return steps
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: {self.scheduler.counts()}")

    def serve(self, tokens: Sequence[int], namespace: str = "a", **options) -> Stream:
        """One request from submission to its end."""
        stream = self.submit(tokens, namespace, **options)
        self.run()
        return stream

    def engine(self, may_serve: Callable[[], bool] = lambda: True) -> Engine:
        return Engine(self.scheduler, self.rank_set, may_serve)

    def check(self) -> None:
        """Every ledger audits, the ranks agree (with the scheduler too, once everything was sent), the pool reconciles."""
        ranks = [rank.ledger for rank in self.ranks]
        for ledger in (self.ledger, *ranks):
            audit(ledger)
        compared = [*ranks, self.ledger] if self.scheduler.idle else ranks
        assert len({(ledger.log_index, ledger.machine_digest) for ledger in compared}) == 1
        gauge = self.ledger.gauge()
        assert gauge.free + gauge.evictable + gauge.live + gauge.reserved == gauge.total

    def check_quiet(self) -> None:
        """``check``, and nothing is held by anybody."""
        assert self.scheduler.idle
        self.check()
        gauge = self.ledger.gauge()
        assert (gauge.live, gauge.reserved) == (0, 0)
        assert gauge.free + gauge.evictable == gauge.total

    def index(self, namespace: str = "a") -> dict[bytes, int]:
        """What a lookup can find: chain digest of each published whole-block prefix -> physical block."""
        found: dict[bytes, int] = {}
        for _, tokens, blocks in self.ledger.paths(namespace):
            found.update(zip(chain_digests(KEY, tokens, BLOCK), blocks.tolist(), strict=True))
        return found

    def block_bytes(self, rank: int, blocks: Sequence[int]) -> bytes:
        """The K/V bytes of some blocks in one rank's pool, copied."""
        pool, ids = self.pools[rank], list(blocks)
        return pool.k[:, ids].tobytes() + pool.v[:, ids].tobytes()

    def worst_audit(self, namespace: str = "a") -> float:
        """Largest difference between any cached row of the namespace and a cold recompute, over all ranks."""
        worst = 0.0
        by_group = [self.ledger.paths(namespace, group) for group in range(len(self.ledger.group_tables))]
        for (_, tokens, blocks), *others in zip(*by_group, strict=True):
            ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
            other_blocks = tuple(tuple(path.tolist()) for _, _, path in others)
            order = KVAuditOrder(ids, tuple(blocks.tolist()), tuple(range(len(tokens))), other_blocks)
            for report in self.step(order=order) or []:
                assert report.audit is not None and report.audit.rows_compared > 0
                worst = max(worst, report.audit.max_abs_difference)
        return worst

    def _note_publication(self, entry: Entry, before: int, after: int) -> None:
        self.published.append((entry.submission.request_id, before, after))


class ColdModel:
    """The oracle: one shard, empty memory, one request at a time."""

    def __init__(self, checkpoint: ConvertedCheckpoint, num_blocks: int = 32) -> None:
        assert checkpoint.tp_size == 1
        config, part = checkpoint.config, checkpoint.partitions[0]
        self._pool = KVPool(config.num_layers, num_blocks, len(part.kv_heads), config.head_dim, BLOCK)
        self._shard = LlamaShard(config, part, checkpoint.shard_path(0), self._pool, SingleProcess())
        self._table = np.arange(num_blocks, dtype=np.int32)[None]
        self.tokens = functools.lru_cache(maxsize=None)(self._tokens)

    def _tokens(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """``count`` greedy tokens after ``prompt``."""
        self._pool.zero_blocks(range(self._pool.num_blocks))
        known, start = list(prompt), 0
        while len(known) < len(prompt) + count:
            batch = make_batch([known[start:]], [start], self._table)
            start = len(known)
            with torch.no_grad():
                known.append(int(self._shard.greedy(self._shard.forward(batch))[0]))
        return known[len(prompt) :]

    def __call__(self, prompt: Sequence[int], count: int) -> list[int]:
        return self.tokens(tuple(prompt), count)
