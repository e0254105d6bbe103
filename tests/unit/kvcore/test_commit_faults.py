"""A fault at every write site in every kind of command: nothing half-done is ever continued, and replay restores it.

A commit cannot fail by the ledger's own rules, so a fault here is what only a defect or the lack of memory can do. The
write sites are found, not listed: every compiled loop that takes the digest's `sums`. One that no command below reaches
fails the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

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
    PublishTail,
    Release,
    Reset,
    RowSpan,
    Scope,
    Truncate,
    pack,
)
from copyhold.kvcore.errors import OutOfMemory
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.log import Recorder, read_log
from copyhold.kvcore.model_faults import WriteSites, interrupted, write_sites

GROUPS = (GroupSpec("small", 2, 24), GroupSpec("large", 4, 16), GroupSpec("sliding", 2, 24, 7))
ONE_GROUP = (GroupSpec("only", 4, 16),)
SCOPE = Scope("a", 1, b"w")


def admit(transaction: int, *tokens: int, namespace: str = "a", policy: int = 0) -> Admit:
    content = np.array(tokens, dtype="<i4").tobytes()
    return Admit(transaction, Scope(namespace, 1, b"w"), content, tail_policy=policy)


def _rows(ledger: Ledger, *wanted: int) -> tuple[RowSpan, ...]:
    """All rows that running requests have still to compute."""
    views = [ledger.request(handle) for handle in ledger.running()]
    return tuple(
        RowSpan(views[i].handle, views[i].valid_rows, views[i].num_tokens - views[i].valid_rows)
        for i in wanted
    )


def _life(ledger: Ledger) -> Iterator[Command]:
    """Commands of every kind but those of tails, each made from the ledger as it is then."""

    def rows(*wanted: int) -> tuple[RowSpan, ...]:
        return _rows(ledger, *wanted)

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
    yield pack(Dispatch(5, rows(0)))
    yield pack(Complete(5))
    yield Publish(ledger.running())
    yield Release(ledger.running()[0], "finish")
    yield Evict((), ledger.evictable_window_blocks()[0].handles(0, 1))
    yield AdvanceGeneration("c", 2)


def _life_of_tails(ledger: Ledger) -> Iterator[Command]:
    """Tails are entered, hit, evicted by name, taken along by their edge, by a reset and by a risen floor."""
    yield Genesis(b"w", ONE_GROUP, 4, 24, "pool")
    for turn, namespace in enumerate("aaab", 1):
        yield admit(2 * turn, *range(7), namespace=namespace)
        yield Dispatch(2 * turn, _rows(ledger, 0))
        yield Complete(2 * turn)
        yield PublishTail(ledger.running()[0], 1)
        yield Release(ledger.running()[0], "finish")
        (tail,) = ledger.tails()
        if turn == 1:
            yield admit(3, *range(9), policy=1)
            yield Dispatch(3, _rows(ledger, 0))
            yield Complete(3)
            yield Release(ledger.running()[0], "cancel")
            yield Evict((tail.handle,))
        elif turn == 2:
            yield Evict(tuple(leaf.handle for leaf in ledger.evictable_leaves()))
        elif turn == 3:
            yield Reset(SCOPE)
    yield AdvanceGeneration("b", 2)


LIVES: tuple[Callable[[Ledger], Iterator[Command]], ...] = (_life, _life_of_tails)


def test_every_write_site_is_reached() -> None:
    with WriteSites() as writes:
        for life in LIVES:
            ledger = Ledger()
            for command in life(ledger):
                ledger.apply(command)
                audit(ledger)
    assert len(write_sites()) > 10 and set(write_sites()) - set(writes.calls) == set()


def _steps(life: Callable[[Ledger], Iterator[Command]]) -> list[tuple[str, int, int, str]]:
    """(kind, index of the command, write of that command, its site) for every write of every command but Genesis."""
    with WriteSites() as writes:
        ledger = Ledger()
        found = []
        for index, command in enumerate(life(ledger)):
            writes.begin()
            ledger.apply(command)
            if index:
                found += [(type(command).__name__, index, at, site) for at, site in enumerate(writes.calls)]
    return found


def test_a_fault_at_each_write_breaks_the_ledger_and_replay_restores_it(tmp_path: Path) -> None:
    """Of every kind of command each write is interrupted once at each place and site where it occurs."""
    seen: set[tuple[str, int, str]] = set()
    for life in LIVES:
        for kind, index, at, site in _steps(life):
            if (kind, at, site) not in seen:
                seen.add((kind, at, site))
                _check_fault(tmp_path / f"{life.__name__}-{index}-{at}", life, index, at)
    kinds = {kind.__name__ for kind in get_args(Command)} - {Genesis.__name__}
    assert {kind for kind, _, _ in seen} == kinds and len(seen) > 100
    assert {site for _, _, site in seen} == set(write_sites())


def _check_fault(log: Path, life: Callable[[Ledger], Iterator[Command]], index: int, at: int) -> None:
    ledger, recorder = Ledger(), Recorder(log)
    commands = life(ledger)
    for _ in range(index):
        command = next(commands)
        recorder.record(command, ledger.apply(command))
    recorder.close()
    command = next(commands)
    committed, machine = ledger.committed_digest, ledger.machine_digest
    with WriteSites() as writes:
        assert interrupted(ledger, command, writes, at) == ""
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
