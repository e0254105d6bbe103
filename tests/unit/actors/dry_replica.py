"""A scheduler and one rank's ledger without a model: every sampled token is a function of what was known before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from copyhold.actors.cache_settings import CacheSettings
from copyhold.actors.dispatch import StepBudget
from copyhold.actors.messages import Admitted, Failed, Finished, StreamItem
from copyhold.actors.plan import StepEvidence
from copyhold.actors.retention import DEFAULT_RETENTION, Retention
from copyhold.actors.scheduler import Scheduler
from copyhold.actors.submission import Entry, Submission
from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import Genesis, GroupSpec, Scope
from copyhold.kvcore.ledger import Ledger

BLOCK, WORLD, INCARNATION = 4, b"w" * 32, "replica-0.1"


class DryStream:
    """What one request was sent."""

    def __init__(self) -> None:
        self.items: list[StreamItem] = []
        self.entry: Entry | None = None

    def put(self, item: StreamItem) -> None:
        self.items.append(item)

    @property
    def cached_tokens(self) -> int | None:
        """Of the first admission; ``None`` before it."""
        found = [item.receipt.cached_tokens for item in self.items if isinstance(item, Admitted)]
        return found[0] if found else None

    @property
    def failure(self) -> str:
        return next((item.kind for item in self.items if isinstance(item, Failed)), "")

    @property
    def ended(self) -> bool:
        return bool(self.items) and isinstance(self.items[-1], Finished | Failed)


class DryReplica:
    """``now_s`` is the clock of lifetimes; tests move it."""

    def __init__(
        self,
        cache: CacheSettings,
        num_blocks: int = 32,
        max_requests: int = 8,
        chunk_tokens: int = 64,
        windows: tuple[GroupSpec, ...] = (),
    ) -> None:
        self.now_s = 0.0
        groups = (GroupSpec("full", BLOCK, num_blocks), *windows)
        genesis = Genesis(WORLD, groups, max_requests, 512, INCARNATION)
        self.scheduler = Scheduler(
            genesis, StepBudget(256, chunk_tokens), cache=cache, clock=lambda: self.now_s
        )
        self.rank = Ledger()
        self._requests = 0

    @property
    def ledger(self) -> Ledger:
        return self.scheduler.ledger

    def submit(
        self,
        tokens: Sequence[int],
        namespace: str = "a",
        *,
        max_new: int = 1,
        publish: bool = True,
        retention: Retention = DEFAULT_RETENTION,
    ) -> DryStream:
        self._requests += 1
        stream = DryStream()
        submission = Submission(
            request_id=f"req-{self._requests}",
            key_id="key",
            receipt_id=f"rcp-{self._requests}",
            scope=Scope(namespace, 1, WORLD),
            model="dry",
            tokens=np.asarray(tokens, dtype="<i4").tobytes(),
            max_new_tokens=max_new,
            stop_token_ids=frozenset(),
            lookup=True,
            publish=publish,
            arrived_at_s=0.0,
            created_at=0.0,
            retention=retention,
        )
        stream.entry = self.scheduler.submit(submission, stream.put)
        return stream

    def step(self) -> bool:
        """One plan; False when there was nothing to say."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        for number, command in enumerate(plan.commands):
            self.rank.apply_at(plan.first_log_index + number, command)
        tokens = tuple(1000 + (plan.step * 7 + index) % 50 for index in plan.sample)
        evidence = StepEvidence(
            INCARNATION, plan.step, 0, self.rank.log_index, self.rank.machine_digest, tokens
        )
        self.scheduler.complete(plan, [evidence], 0.0)
        return True

    def run(self, most_steps: int = 3000) -> None:
        for _ in range(most_steps):
            if self.scheduler.idle:
                return
            self.step()
        raise AssertionError(f"not idle: {self.scheduler.counts()}")

    def serve(self, tokens: Sequence[int], namespace: str = "a", **options) -> DryStream:
        """One request from submission to its end."""
        stream = self.submit(tokens, namespace, **options)
        self.run()
        return stream

    def check(self) -> None:
        """The ledger audits, and ``check_books``."""
        audit(self.ledger)
        self.check_books()

    def check_books(self) -> None:
        """Books of blocks by namespace are those of the pool, and everything that may go is queued."""
        assert dict(self.held_in_pool()) == {
            name: blocks for name, blocks in self.scheduler.held_blocks().items() if blocks
        }
        queued = self.scheduler.evictor.candidates()
        missing = [leaf for leaf in self.ledger.evictable_leaves() if leaf.handle not in queued]
        assert missing == []

    def held_in_pool(self) -> Mapping[str, int]:
        """Blocks by namespace, counted from the pool's own columns."""
        pool, scopes = self.ledger.state.pools[0], self.ledger.state.scopes
        used = np.flatnonzero((pool.ref.array > 0) | (pool.node.array > 0))
        held: dict[str, int] = {}
        for owner in pool.owner.array[used].tolist():
            name = scopes.scope(owner).namespace
            held[name] = held.get(name, 0) + 1
        return held
