"""The run of ``copyhold verify`` without a scheduler: one log written by hand that forks a request, cuts it back and goes on.

Owns the driver's ledger and what each branch is fed. Branches share the blocks of their past; whoever writes first into a
shared block is given a copy. After the fork each branch is fed a token of its own, so that a lost or wrong copy shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from copyhold.actors.errors import RanksDiffer
from copyhold.actors.in_process import INCARNATION, Logits, RankSet, ReplicaShape, count_shared_reads
from copyhold.actors.plan import KVAuditOrder, StepPlan
from copyhold.kvcore.commands import (
    Admit,
    Command,
    Complete,
    Dispatch,
    Fork,
    Release,
    RequestHandle,
    RowSpan,
    Scope,
    Truncate,
)
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.receipts import AdmitReceipt, DispatchReceipt, ForkReceipt
from copyhold.models.cold_run import cold_run
from copyhold.models.shard_set import ShardSet

from .verify_measure import Compared, RunFound
from .verify_plan import VerifyCase, VerifyPrompts

_STEPS = 3
"""Tokens of every branch after the fork."""
_IN_OTHERS = ("other_copies", "other_shared_reads")
"""Counts of the cache groups after the first, needed where there are any."""


@dataclass
class Branch:
    """One request of the log: what it was fed so far, and the logits behind each choice."""

    handle: RequestHandle
    prompt: tuple[int, ...]
    fed: list[int] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    logits: list[Logits] = field(default_factory=list)


class WrittenLog:
    """A ledger and ranks that follow commands as they are written."""

    def __init__(self, shards: ShardSet, shape: ReplicaShape) -> None:
        self._shards = shards
        self._set = RankSet.lent(shards, shape)
        self._ledger = Ledger()
        self._outbox: list[Command] = []
        self._sent, self._step = 0, 0
        self.counts: Counter[str] = Counter()
        self.apply(self._set.genesis)

    def apply(self, command: Command) -> object:
        """Apply here now, on the ranks with the next plan."""
        receipt = self._ledger.apply(command)
        self._outbox.append(command)
        if isinstance(receipt, DispatchReceipt):
            for copy in receipt.copies:
                self.counts["other_copies" if copy.group else "copies"] += 1
                self.counts["other_copied_rows" if copy.group else "copied_rows"] += copy.rows
        return receipt

    def admit(self, prompt: Sequence[int]) -> Branch:
        """A request that shares nothing, computed but for its first choice."""
        scope = Scope("tenant", 1, self._set.genesis.world)
        receipt = self.apply(Admit(1, scope, np.asarray(prompt, dtype="<i4").tobytes()))
        assert isinstance(receipt, AdmitReceipt)
        return Branch(receipt.request, tuple(prompt))

    def fork(self, parent: Branch, children: int) -> list[Branch]:
        """Branches with the parent's past."""
        receipt = self.apply(Fork(parent.handle, children))
        assert isinstance(receipt, ForkReceipt)
        self.counts["forks"] += children
        return [
            Branch(handle, parent.prompt, list(parent.fed), list(parent.chosen), list(parent.logits))
            for handle in receipt.children
        ]

    def cut(self, branch: Branch, num_tokens: int) -> Branch:
        """The branch with its first tokens only, as a prompt of its own; its last row is computed again."""
        self.apply(Truncate(branch.handle, num_tokens))
        self.counts["truncations"] += 1
        return Branch(branch.handle, branch.prompt[:num_tokens])

    def step(self, branches: Sequence[Branch], ranked: Sequence[int]) -> None:
        """One step of all branches; branch `i` is fed the choice of rank ``ranked[i]`` (0: the greedy one)."""
        spans = []
        for branch in branches:
            view = self._ledger.request(branch.handle)
            start = view.valid_rows
            spans.append(RowSpan(branch.handle, start, view.num_tokens - start))
        tables = [self._tables(branch.handle) for branch in branches]
        count_shared_reads(self.counts, zip(*tables, strict=True))
        self._step += 1
        self.apply(Dispatch(self._step, tuple(spans)))
        sample = tuple(range(len(spans)))
        self._send(StepPlan(INCARNATION, self._step, self._sent, tuple(self._outbox), sample))
        logits = self._shards.last_logits()
        sampled = []
        for place, (branch, rank) in enumerate(zip(branches, ranked, strict=True)):
            order = np.argsort(-logits[place], kind="stable")
            branch.chosen.append(int(order[0]))
            branch.fed.append(int(order[rank]))
            branch.logits.append(logits[place].copy())
            sampled.append((place, branch.fed[-1]))
        self.apply(Complete(self._step, tuple(sampled)))

    def audit(self, branch: Branch) -> tuple[int, float]:
        """Every sixth stored row of a branch on every rank against a cold recompute."""
        valid = self._ledger.request(branch.handle).valid_rows
        tokens = self._ledger.request_tokens(branch.handle, 0, valid)
        order = KVAuditOrder.of(tokens, self._tables(branch.handle), range(valid - 1, -1, -6))
        self._step += 1
        answers = self._send(StepPlan(INCARNATION, self._step, self._sent, tuple(self._outbox), audit=order))
        found = [answer.audit for answer in answers if answer.audit is not None]
        return sum(one.rows_compared for one in found), max(one.max_abs_difference for one in found)

    def close(self, branches: Sequence[Branch]) -> float:
        """Release everything; returns the largest value that was stored."""
        highest = self._set.largest_value()
        for branch in branches:
            self.apply(Release(branch.handle, "finish"))
        self._step += 1
        self._send(StepPlan(INCARNATION, self._step, self._sent, tuple(self._outbox)))
        self._set.close()
        return highest

    def _send(self, plan: StepPlan):
        answers = self._set.execute(plan)
        self._sent = self._ledger.log_index
        self._outbox.clear()
        for answer in answers:
            if answer.machine_digest != self._ledger.machine_digest:
                raise RanksDiffer(answer.rank, answer.machine_digest.hex(), self._ledger.machine_digest.hex())
        return answers

    def _tables(self, handle: RequestHandle) -> list[np.ndarray]:
        """The request's blocks in each cache group."""
        return [self._ledger.table(handle, group) for group in range(len(self._set.genesis.groups))]


def forked(shards: ShardSet, case: VerifyCase, prompts: VerifyPrompts) -> RunFound:
    """Fork twice, feed each branch something else, cut one back into a shared block, and go on with all."""
    prompt, size = prompts.prompts[0], case.block_size
    blocks = 4 * -(-(len(prompt) + 2 * _STEPS + 2) // size)
    several = bool(case.other_block_sizes)
    log = WrittenLog(shards, ReplicaShape(blocks, size, other_block_sizes=case.other_block_sizes))
    parent = log.admit(prompt)
    log.step([parent], [0])
    left, right = log.fork(parent, 2)
    for ranks in [(0, 1, 2)] + [(0, 0, 0)] * (_STEPS - 1):
        log.step([parent, left, right], ranks)
    back = log.cut(right, (len(prompt) // size - 1) * size + size // 2)
    for _ in range(_STEPS):
        log.step([parent, left, back], (0, 0, 0))
    audits = [log.audit(branch) for branch in (parent, left, back)]
    highest = log.close([parent, left, back])
    streams = tuple(_compared(shards, branch) for branch in (parent, left, right, back))
    return RunFound(
        "forked and cut back",
        streams,
        log.counts,
        ("forks", "copies", "truncations", "shared_reads", *(_IN_OTHERS if several else ())),
        sum(rows for rows, _ in audits),
        max(worst for _, worst in audits),
        highest,
    )


def _compared(shards: ShardSet, branch: Branch) -> Compared:
    cold = cold_run(shards, branch.prompt, len(branch.chosen), branch.fed)
    return Compared(tuple(branch.chosen), tuple(branch.logits), cold)
