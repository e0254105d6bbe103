"""Partial tails: what is entered, who hits it, who is given a copy, and what goes with what (K103, K104, F064)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore.audit import AuditViolation, audit
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
    NodeHandle,
    Publish,
    PublishTail,
    Release,
    Reset,
    RowSpan,
    Scope,
    Truncate,
)
from copyhold.kvcore.errors import (
    EvictLiveBlock,
    LedgerRefusal,
    LockedLeafEvicted,
    MalformedCommand,
    RequestInFlight,
    ResetWithLiveReferences,
    StaleNamespaceGeneration,
    StaleTreeVersion,
    TailsNeedOneFullGroup,
)
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.log import Recorder
from copyhold.kvcore.model_check import TAILS, explore
from copyhold.kvcore.replay import replay
from copyhold.kvcore.tail_table import TAILS_PER_NODE

SEVEN = [1, 2, 3, 4, 5, 6, 7]


def leave(driver: Any, tokens: list[int], policy: int = 1, namespace: str = "a", **changes: Any) -> Any:
    """A whole request that publishes its tail at its end; that receipt."""
    request = driver.admit(tokens, namespace, **changes).request
    driver.prefill(request)
    driver.check_reads(request)
    receipt = driver.apply(PublishTail(request, policy))
    driver.release(request)
    return receipt


def test_rows_behind_the_last_page_are_hit_and_copied_before_the_first_own_row(driver: Any) -> None:
    left = leave(driver, SEVEN)
    assert (left.outcome, left.rows, left.entry.tokens_after) == ("entered", 3, 4)
    admitted = driver.admit([*SEVEN, 8, 9], tail_policy=1)
    match = admitted.match
    assert (match.runtime, match.tail, match.recompute) == (7, 3, 2)
    assert (match.semantic, match.indexed, match.junction) == (7, 7, 7)
    assert (match.limit, match.reason) == ("tail", "tail_ends")
    assert len(admitted.shared_blocks) == 2 and len(admitted.new_blocks) == 1
    source = driver.ledger.tails()[0].block
    driver.check_reads(admitted.request)
    driver.step += 1
    dispatched = driver.apply(Dispatch(driver.step, (RowSpan(admitted.request, 7, 2),)))
    (copy,) = dispatched.copies
    assert (copy.source, copy.rows) == (source, 3)
    driver.rows[copy.target][:3] = driver.rows[copy.source][:3]
    driver.write(RowSpan(admitted.request, 7, 2))
    driver.refused(Evict(left.tail), LockedLeafEvicted)
    driver.apply(Complete(driver.step))
    driver.check_reads(admitted.request)
    assert driver.ledger.tails()[0].references == 0, "the source is let go with the step"
    driver.release(admitted.request)
    driver.check_quiet()


def test_full_blocks_only_is_the_default_and_says_page_alignment(driver: Any) -> None:
    leave(driver, SEVEN)
    for changes in ({}, {"tail_policy": 2}):
        match = driver.ledger.probe(driver.scope(), np.array([*SEVEN, 8], "<i4").tobytes(), **changes).match
        assert (match.runtime, match.tail) == (4, 0)
    match = driver.ledger.probe(driver.scope(), np.array(SEVEN, "<i4").tobytes()).match
    assert (match.runtime, match.limit, match.reason) == (4, "alignment", "page_alignment")


def test_two_and_three_rows_are_two_tails_and_the_longest_that_agrees_wholly_is_hit(driver: Any) -> None:
    leave(driver, SEVEN[:6])
    leave(driver, SEVEN)
    assert sorted(tail.rows for tail in driver.ledger.tails()) == [2, 3]
    hits = {}
    for prompt in ([*SEVEN, 8], [*SEVEN[:6], 9, 9], [1, 2, 3, 4, 5, 9, 9], SEVEN, SEVEN[:6]):
        before = driver.trace()
        probe = driver.ledger.probe(driver.scope(), np.array(prompt, "<i4").tobytes(), tail_policy=1)
        assert driver.trace() == before, "a lookup changes nothing"
        hits[tuple(prompt)] = (probe.match.runtime, probe.match.reason)
    assert list(hits.values()) == [
        (7, "tail_ends"),
        (6, "tail_ends"),
        (4, "page_alignment"),
        (6, "logits_cap"),
        (5, "logits_cap"),
    ]


def test_a_frozen_tail_does_not_grow_with_its_own_request(driver: Any) -> None:
    request = driver.admit(SEVEN).request
    driver.prefill(request, sample=8)
    entered = driver.apply(PublishTail(request, 1))
    assert entered.outcome == "entered"
    assert driver.apply(PublishTail(request, 1)).outcome == "present"
    driver.step += 1
    (copy,) = driver.apply(Dispatch(driver.step, (RowSpan(request, 7, 1),))).copies
    driver.refused(PublishTail(request, 1), RequestInFlight)
    driver.rows[copy.target][:3] = driver.rows[copy.source][:3]
    driver.write(RowSpan(request, 7, 1))
    driver.apply(Complete(driver.step))
    driver.check_reads(request)
    assert driver.ledger.tails()[0].rows == 3
    no_rows = driver.apply(PublishTail(request, 1))
    assert (no_rows.outcome, no_rows.rows, no_rows.entry.tokens_after) == ("no_rows", 0, 8)


def test_what_cannot_be_entered_says_why(driver: Any) -> None:
    short = driver.admit([1, 2, 3]).request
    driver.prefill(short)
    assert driver.apply(PublishTail(short, 1)).outcome == "no_whole_page"
    driver.release(short)
    outcomes = [leave(driver, [1, 2, 3, 4, last]).outcome for last in range(10, 11 + TAILS_PER_NODE)]
    assert outcomes == ["entered"] * TAILS_PER_NODE + ["node_full"]
    driver.apply(Evict((driver.ledger.tails()[0].handle,)))
    assert leave(driver, [1, 2, 3, 4, 99]).outcome == "entered"


def test_one_block_carries_one_length(driver: Any) -> None:
    request = driver.admit(SEVEN).request
    driver.prefill(request)
    (child,) = driver.apply(Fork(request, 1)).children
    driver.apply(Truncate(child, 7))
    assert driver.apply(PublishTail(request, 1)).outcome == "entered"
    assert driver.apply(PublishTail(child, 1)).outcome == "block_has_a_tail"
    for handle in (request, child):
        driver.release(handle)
    driver.check_quiet()


def test_a_policy_is_part_of_the_identity(driver: Any) -> None:
    entries = set()
    for policy in (1, 2):
        assert leave(driver, SEVEN, policy).outcome == "entered"
        entries = {int(driver.ledger.state.pool.entry.array[t.block]) for t in driver.ledger.tails()}
    assert len(entries) == 2
    driver.refused(driver.admit_command(SEVEN, tail_policy=-1), MalformedCommand, field="tail_policy")


def test_a_tail_is_evicted_by_its_handle_or_with_its_node(driver: Any) -> None:
    left = leave(driver, SEVEN)
    (handle,) = left.tail
    free = driver.ledger.gauge().free
    own = driver.admit_command([*SEVEN, 8], tail_policy=1, evict=(handle,))
    driver.refused(own, EvictLiveBlock, node=handle.node)
    driver.refused(Evict((handle, handle)), StaleTreeVersion)
    assert driver.apply(Evict((handle,))).freed_blocks == 1
    assert driver.ledger.gauge().free == free + 1
    driver.refused(Evict((handle,)), StaleTreeVersion)
    assert leave(driver, SEVEN).tail[0] == NodeHandle(handle.node, handle.generation + 1)
    (leaf,) = driver.ledger.evictable_leaves()
    assert driver.apply(Evict((leaf.handle,))).freed_blocks == 2
    assert not driver.ledger.tails() and driver.ledger.gauge().free == driver.ledger.gauge().total


def test_a_held_tail_locks_its_node(driver: Any) -> None:
    """A branch that was made before the publication holds the block and leases no path."""
    first = driver.serve([1, 2, 3, 4])
    request = driver.admit(SEVEN, lookup=False).request
    driver.prefill(request)
    (child,) = driver.apply(Fork(request, 1)).children
    left = driver.apply(PublishTail(request, 1))
    driver.release(request)
    assert left.entry.duplicate_blocks == 1 and not driver.ledger.evictable_leaves()
    node = driver.ledger.tails()[0].node
    assert node.node and first.request != child
    driver.refused(Evict((node,)), LockedLeafEvicted)
    driver.refused(Reset(driver.scope()), ResetWithLiveReferences)
    driver.release(child)
    assert driver.apply(Reset(driver.scope())).freed_blocks == 2
    assert driver.ledger.gauge().free == driver.ledger.gauge().total


def test_a_floor_ends_tails_and_what_is_held_of_them_drains(driver: Any) -> None:
    left = leave(driver, SEVEN)
    holder = driver.admit([*SEVEN, 8], tail_policy=1).request
    receipt = driver.advance("a", 2)
    assert receipt.draining_blocks == 2 and not driver.ledger.tails()
    driver.refused(Evict(left.tail), StaleTreeVersion)
    driver.refused(PublishTail(holder, 1), StaleNamespaceGeneration)
    assert len(driver.ledger.residue("a", 2)) == 2
    assert sorted(driver.release(holder).scrub) and driver.ledger.residue("a", 2) == ()


def test_an_aborted_hit_leaves_the_committed_digest(driver: Any) -> None:
    leave(driver, SEVEN)
    before = driver.ledger.committed_digest
    driver.admit([*SEVEN, 8], tail_policy=1)
    driver.abort()
    assert driver.ledger.committed_digest == before and driver.ledger.tails()[0].references == 0


def test_other_groups_and_windows_are_refused_by_name() -> None:
    for groups in (
        (GroupSpec("fine", 2, 8), GroupSpec("coarse", 4, 8)),
        (GroupSpec("sliding", 2, 8, 4),),
    ):
        ledger = Ledger()
        ledger.apply(Genesis(b"w", groups, 2, 16, "pool"))
        scope, content = Scope("a", 1, b"w"), np.arange(5, dtype="<i4").tobytes()
        request = ledger.apply(Admit(1, scope, content)).request
        with pytest.raises(TailsNeedOneFullGroup):
            ledger.apply(PublishTail(request, 1))
        with pytest.raises(TailsNeedOneFullGroup):
            ledger.apply(Admit(2, scope, content, tail_policy=1))


@pytest.mark.parametrize(
    ("field", "finding"),
    [
        ("rows", "tail_identity_without_length"),
        ("policy", "identity_conflict"),
        ("block", "row_not_materialised"),
        ("node", "path_slot_mismatch"),
    ],
)
def test_the_audit_finds_a_tail_that_is_not_what_it_says(driver: Any, field: str, finding: str) -> None:
    leave(driver, SEVEN)
    tails = driver.ledger.state.tree.tails
    getattr(tails, field).array[1] += 1
    with pytest.raises(AuditViolation) as caught:
        audit(driver.ledger)
    assert any(found.startswith(finding) for found in caught.value.findings), caught.value.findings


def _live(seed: int, ledgers: list[Ledger], turns: int, log: Path) -> None:
    """Random commands with tails; a ledger restored from a checkpoint goes along with the first one."""
    rng, recorder, step, generation = random.Random(seed), Recorder(log), 0, 1

    def apply(command: Any) -> Any:
        receipts = []
        for ledger in ledgers:
            try:
                receipts.append(ledger.apply(command))
            except LedgerRefusal as refusal:
                receipts.append(refusal.reason)
        assert all(receipt == receipts[0] for receipt in receipts)
        if isinstance(receipts[0], str):
            return None
        recorder.record(command, receipts[0])
        return receipts[0]

    apply(Genesis(b"w", (GroupSpec("full", 4, 24),), 5, 32, "pool"))
    for turn in range(turns):
        running = ledgers[0].running()
        kind = rng.randrange(10)
        scope = Scope("a", generation, b"w")
        if kind < 3:
            tokens = np.array([rng.randrange(2) for _ in range(rng.randrange(1, 20))], "<i4").tobytes()
            idle = [tail.handle for tail in ledgers[0].tails() if not tail.references]
            named = [leaf.handle for leaf in ledgers[0].evictable_leaves()] + idle
            evict = tuple(rng.sample(named, min(len(named), rng.randrange(3))))
            apply(Admit(turn, scope, tokens, True, evict, (), rng.randrange(3)))
        elif kind < 6 and running:
            step += 1
            views = [ledgers[0].request(handle) for handle in running]
            rows = [RowSpan(v.handle, v.valid_rows, v.num_tokens - v.valid_rows) for v in views]
            rows = [row for row in rows if row.count and row.start + row.count <= 32]
            if rows and apply(Dispatch(step, tuple(rows))):
                apply(Complete(step, tuple((i, rng.randrange(2)) for i in range(len(rows)))))
        elif kind < 8 and running:
            handle = rng.choice(running)
            apply(PublishTail(handle, rng.randrange(1, 3)) if rng.random() < 0.7 else Publish((handle,)))
        elif kind == 8 and running:
            apply(Release(rng.choice(running), "finish"))
        elif rng.random() < 0.1:
            generation += 1
            apply(AdvanceGeneration("a", generation))
        elif running and rng.random() < 0.6:
            handle = rng.choice(running)
            apply(Fork(handle, 1) if rng.random() < 0.5 else Truncate(handle, rng.randrange(1, 12)))
        if turn % 40 == 20:
            checkpoint = take_checkpoint(ledgers[0])
            wire = msgspec.msgpack.decode(msgspec.msgpack.encode(checkpoint), type=Checkpoint)
            ledgers[1:] = [restore(wire)]
            assert take_checkpoint(ledgers[1]) == checkpoint
    for ledger in ledgers:
        audit(ledger)


def test_checkpoints_and_logs_with_tails_give_the_same_ledger_back(tmp_path: Path) -> None:
    tails = 0
    for seed in range(4):
        ledgers = [Ledger()]
        _live(seed, ledgers, 400, tmp_path / f"{seed}.log")
        tails += len(ledgers[0].tails())
        assert len(ledgers) == 2 and ledgers[0].machine_digest == ledgers[1].machine_digest
        report = replay(tmp_path / f"{seed}.log")
        assert report.difference is None and report.commands["PublishTail"] > 20
        assert report.machine_digest == ledgers[0].machine_digest.hex()
    assert tails


def test_the_bounded_check_holds_with_tails() -> None:
    report = explore(TAILS, fault_states=1)
    assert report.complete and not report.violations, report.text()
    assert report.moves["PublishTail"] > 500 and report.states > 1500
