"""Checkpoints: a ledger made from one goes on as the one it was taken of, and nothing that is gone is in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore.audit import audit
from copyhold.kvcore.checkpoint import Checkpoint, restore, take_checkpoint
from copyhold.kvcore.commands import (
    Admit,
    AdvanceGeneration,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    RowSpan,
    Scope,
    Truncate,
)
from copyhold.kvcore.errors import LedgerRefusal, LogCorrupt, LogFull, LogTruncated, RequestInFlight
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.log import Recorder, read_log, read_start
from copyhold.kvcore.replay import compare_logs, replay

GENESIS = Genesis(b"w" * 32, (GroupSpec("full", 4, 96), GroupSpec("coarse", 6, 80)), 12, 96, "pool")


class Life:
    """Random commands over several ledgers at once; all must give the same receipts."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ledgers = [Ledger()]
        self.generations = {"alpha": 1, "beta": 1}
        self.number = 0
        self.applied: list[tuple[Any, Any]] = []
        self.apply(GENESIS)

    @property
    def ledger(self) -> Ledger:
        return self.ledgers[0]

    def apply(self, command: Any) -> Any:
        try:
            receipt = self.ledger.apply(command)
        except LedgerRefusal as refusal:
            for other in self.ledgers[1:]:
                with pytest.raises(type(refusal)):
                    other.apply(command)
            return None
        for other in self.ledgers[1:]:
            assert other.apply(command) == receipt
        self.applied.append((command, receipt))
        return receipt

    def turn(self) -> None:
        """One command, or a whole step; nothing is in flight afterwards."""
        rng, running = self.rng, self.ledger.running()
        kind = rng.randrange(12)
        self.number += 1
        if kind < 4:
            name = rng.choice(sorted(self.generations))
            tokens = np.array([rng.randrange(3) for _ in range(rng.randrange(1, 60))], dtype="<i4").tobytes()
            scope = Scope(name, self.generations[name], b"w")
            self.apply(Admit(self.number, scope, tokens, rng.random() < 0.9))
        elif kind < 8 and running:
            views = [self.ledger.request(handle) for handle in running]
            rows = tuple([RowSpan(v.handle, v.valid_rows, v.num_tokens - v.valid_rows) for v in views])
            rows = tuple([row for row in rows if row.count])
            if rows and self.apply(Dispatch(self.number, rows)):
                self.apply(
                    Complete(self.number, tuple([(row, rng.randrange(3)) for row in range(len(rows))]))
                )
                self.apply(Publish(tuple([row.request for row in rows])))
        elif kind == 8 and running:
            self.apply(Release(rng.choice(running), "finish"))
        elif kind == 9 and running:
            self.apply(Fork(rng.choice(running), 1))
        elif kind == 10 and running:
            self.apply(Truncate(rng.choice(running), rng.randrange(1, 20)))
        elif rng.random() < 0.3:
            name = rng.choice(sorted(self.generations))
            self.generations[name] += 1
            self.apply(AdvanceGeneration(name, self.generations[name]))
        elif leaves := self.ledger.evictable_leaves():
            self.apply(Evict((rng.choice(leaves).handle,)))


def _over_the_wire(checkpoint: Checkpoint) -> Checkpoint:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(checkpoint), type=Checkpoint)


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_ledger_goes_on_with_the_same_receipts(seed: int) -> None:
    life = Life(seed)
    for turn in range(240):
        life.turn()
        if turn % 24 == 0:
            checkpoint = take_checkpoint(life.ledger)
            restored = restore(_over_the_wire(checkpoint))
            assert restored.machine_digest == life.ledger.machine_digest
            assert restored.log_index == life.ledger.log_index
            assert take_checkpoint(restored) == checkpoint
            life.ledgers = [life.ledger, restored]
    for ledger in life.ledgers:
        audit(ledger)


def test_a_checkpoint_holds_no_token_that_is_gone() -> None:
    ledger = Ledger()
    ledger.apply(GENESIS)
    secret = np.full(24, 0x5EC2E7, dtype="<i4").tobytes()
    request = ledger.apply(Admit(1, Scope("alpha", 1, b"w"), secret)).request
    ledger.apply(Dispatch(1, (RowSpan(request, 0, 24),)))
    with pytest.raises(RequestInFlight):
        take_checkpoint(ledger)
    ledger.apply(Complete(1, ((0, 5),)))
    ledger.apply(Publish((request,)))
    ledger.apply(Release(request, "finish"))
    needle = secret[:4]
    assert needle in msgspec.msgpack.encode(take_checkpoint(ledger))
    assert take_checkpoint(ledger).held == (Scope("alpha", 1, b"w"),)
    ledger.apply(AdvanceGeneration("alpha", 2))
    assert needle not in msgspec.msgpack.encode(take_checkpoint(ledger))
    assert take_checkpoint(ledger).held == ()


def _two_logs(folder: Path) -> tuple[Life, Path, Path]:
    """One life, recorded as a whole and from a checkpoint on."""
    life = Life(7)
    for _ in range(60):
        life.turn()
    middle = len(life.applied)
    later = Recorder(folder / "later", checkpoint=take_checkpoint(life.ledger))
    for _ in range(60):
        life.turn()
    whole = Recorder(folder / "whole")
    for index, (command, receipt) in enumerate(life.applied):
        whole.record(command, receipt)
        if index >= middle:
            later.record(command, receipt)
    whole.close()
    later.close()
    return life, folder / "whole", folder / "later"


def test_a_log_that_begins_with_a_checkpoint_replays_to_the_same_digest(tmp_path: Path) -> None:
    life, whole, later = _two_logs(tmp_path)
    reports = replay(whole), replay(later)
    assert [report.difference for report in reports] == [None, None]
    assert {report.machine_digest for report in reports} == {life.ledger.machine_digest.hex()}
    assert reports[1].first_index + reports[1].records == reports[0].records == life.ledger.log_index
    assert compare_logs(whole, later) is None and compare_logs(later, whole) is None


def test_damage_to_a_checkpoint_is_refused_at_the_record_it_precedes(tmp_path: Path) -> None:
    _, _, later = _two_logs(tmp_path)
    content, start = later.read_bytes(), read_start(later)
    first = start.header.first_index
    assert start.checkpoint is not None
    for at in range(100, len(content), 997):
        damaged = bytearray(content)
        damaged[at] ^= 1
        later.write_bytes(damaged)
        with pytest.raises((LogCorrupt, LogTruncated)) as caught:
            replay(later)
        assert caught.value.record >= first
    later.write_bytes(content[:200])
    with pytest.raises(LogTruncated) as cut:
        list(read_log(later))
    assert cut.value.record == first


def test_a_checkpoint_that_makes_no_ledger_is_refused() -> None:
    life = Life(3)
    for _ in range(80):
        life.turn()
    good = take_checkpoint(life.ledger)
    records = bytearray(good.block_records[0])
    records[0] ^= 1
    for change in (
        {"block_records": (bytes(records), good.block_records[1])},
        {"node_records": good.node_records[:-8]},
        {"machine": bytes(16)},
        {"node_queue": good.node_queue[4:]},
        {"scopes": ()},
    ):
        with pytest.raises(LogCorrupt):
            restore(msgspec.structs.replace(good, **change))


def test_a_checkpoint_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogFull):
        Recorder(tmp_path / "log", limit_bytes=512, checkpoint=take_checkpoint(Life(1).ledger))
