"""A fault at every write site of every kind of command: nothing half-done is ever continued, and replay restores it.

A commit cannot fail by the ledger's own rules, so a fault here is what only a defect or the lack of memory can do. The
write sites are found, not listed: every compiled loop that takes the digest's `sums`. One that no command below reaches
fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Command,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    Reset,
    RowSpan,
    Scope,
    Truncate,
)
from copyhold.kvcore.errors import LedgerBroken, OutOfMemory
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.log import Recorder, read_log
from copyhold.kvcore.model_faults import PlantedFault, WriteSites, write_sites

GROUPS = (GroupSpec("small", 2, 24), GroupSpec("large", 4, 16), GroupSpec("sliding", 2, 24, 7))
SCOPE = Scope("a", 1, b"w")


def _life(ledger: Ledger) -> Iterator[Command]:
    """Commands of every kind, each made from the ledger as it is then."""

    def admit(transaction: int, *tokens: int, namespace: str = "a") -> Admit:
        scope = Scope(namespace, 1, b"w")
        return Admit(transaction, scope, np.array(tokens, dtype="<i4").tobytes())

    def rows(*wanted: int) -> tuple[RowSpan, ...]:
        views = [ledger.request(handle) for handle in ledger.running()]
        return tuple(
            RowSpan(views[i].handle, views[i].valid_rows, views[i].num_tokens - views[i].valid_rows)
            for i in wanted
        )

    yield Genesis(b"w", GROUPS, 6, 24, "pool")
    yield admit(1, *range(9))
    yield admit(2, *range(9))
    yield Dispatch(1, rows(0, 1))
    yield Complete(1, ((0, 70), (1, 71)))
    yield Publish(ledger.running())
    yield Fork(ledger.running()[0], 1)
    yield Dispatch(2, rows(0, 2))
    yield Truncate(ledger.running()[2], 8)
    yield Release(ledger.running()[0], "cancel")
    yield Complete(2, ((0, 72), (1, 73)))
    yield Truncate(ledger.running()[1], 7)
    yield admit(3, 5, 6)
    yield Abort(3)
    yield admit(4, *range(50, 60), namespace="b")
    yield Dispatch(3, rows(2 if len(ledger.running()) > 2 else -1))
    yield Complete(3)
    yield Publish((ledger.running()[-1],))
    yield AdvanceGeneration("b", 2)
    for handle in ledger.running():
        yield Release(handle, "finish")
    yield admit(5, *range(8), 90, 91, 92, 93)
    yield Dispatch(4, rows(0))
    yield Complete(4)
    yield Truncate(ledger.running()[0], 11)
    yield Publish(ledger.running())
    yield Release(ledger.running()[0], "finish")
    yield Evict(tuple(leaf.handle for leaf in ledger.evictable_leaves()[:1]))
    yield Reset(SCOPE)
    yield admit(6, *range(14), namespace="c")
    yield Dispatch(5, rows(0))
    yield Complete(5)
    yield Publish(ledger.running())
    yield Release(ledger.running()[0], "finish")
    yield AdvanceGeneration("c", 2)


def test_every_write_site_is_reached() -> None:
    with WriteSites() as writes:
        ledger = Ledger()
        for command in _life(ledger):
            ledger.apply(command)
            audit(ledger)
    assert len(write_sites()) > 10 and set(write_sites()) - set(writes.calls) == set()


def _steps() -> list[tuple[str, int, int]]:
    """(kind, index of the command, write of that command) for every write of every command but Genesis."""
    with WriteSites() as writes:
        ledger = Ledger()
        found = []
        for index, command in enumerate(_life(ledger)):
            writes.begin()
            ledger.apply(command)
            if index:
                found += [(type(command).__name__, index, at) for at in range(len(writes.calls))]
    return found


def test_a_fault_at_each_write_breaks_the_ledger_and_replay_restores_it(tmp_path: Path) -> None:
    steps = _steps()
    assert len(steps) > 100 and len({kind for kind, _, _ in steps}) >= 11
    seen: set[tuple[str, int]] = set()
    for kind, index, at in steps:
        if (kind, at) in seen:
            continue
        seen.add((kind, at))
        _check_fault(tmp_path / f"{index}-{at}", index, at)


def _check_fault(log: Path, index: int, at: int) -> None:
    ledger, recorder = Ledger(), Recorder(log)
    life = _life(ledger)
    for _ in range(index):
        command = next(life)
        recorder.record(command, ledger.apply(command))
    recorder.close()
    command = next(life)
    committed, machine = ledger.committed_digest, ledger.machine_digest
    with WriteSites() as writes:
        writes.begin(at)
        with pytest.raises(PlantedFault):
            ledger.apply(command)
    assert (ledger.committed_digest, ledger.machine_digest, ledger.log_index) == (committed, machine, index)
    with pytest.raises(LedgerBroken):
        ledger.apply(command)
    restored = Ledger()
    for record in read_log(log):
        restored.apply_at(record.index, record.decoded())
    audit(restored)
    assert (restored.committed_digest, restored.machine_digest) == (committed, machine)
    restored.apply(command)
    audit(restored)


def test_a_step_of_a_batch_that_is_refused_leaves_the_batch_before_it_compensable() -> None:
    """Reservations of a batch whose later command is refused are given back by Abort, to the same committed digest."""
    ledger = Ledger()
    ledger.apply(Genesis(b"w", GROUPS, 6, 24, "pool"))
    committed = ledger.committed_digest
    tokens = np.arange(20, dtype="<i4").tobytes()
    done = []
    with pytest.raises(OutOfMemory):
        for transaction in range(6):
            ledger.apply(Admit(transaction, SCOPE, tokens, False))
            done.append(transaction)
    assert done
    for transaction in reversed(done):
        ledger.apply(Abort(transaction))
        audit(ledger)
    assert ledger.committed_digest == committed
