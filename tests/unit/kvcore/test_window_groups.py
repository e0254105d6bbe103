"""Groups with a sliding window: what they hold, what hits they allow, what leaves first."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from window_ledger import WORLD, WindowLedger

from copyhold.kvcore.audit import AuditViolation, audit
from copyhold.kvcore.commands import (
    Abort,
    AdvanceGeneration,
    Dispatch,
    Evict,
    Fork,
    GroupSpec,
    Publish,
    Release,
    Reset,
    RowSpan,
    Scope,
    Truncate,
)
from copyhold.kvcore.errors import (
    DoubleRelease,
    EdgePartiallyEvicted,
    EvictLiveBlock,
    MalformedCommand,
    OutOfMemory,
    StaleBlockGeneration,
    WindowStateMissing,
)
from copyhold.kvcore.state import LedgerState


def T(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def full_and_sliding(**changes: Any) -> WindowLedger:
    return WindowLedger(GroupSpec("full", 4, 64), GroupSpec("sliding", 8, 64, 16), **changes)


def test_b20_hits_are_the_longest_boundary_that_every_group_can_serve() -> None:
    first = full_and_sliding()
    assert [first.serve(T(1, 32)), first.serve(T(1, 32))] == [0, 24]
    second = full_and_sliding()
    assert [second.serve(T(1, 33)), second.serve(T(1, 33))] == [0, 32]
    third = full_and_sliding()
    assert [third.serve(T(1, 32)), third.serve(T(1, 20) + T(700, 20))] == [0, 16]
    assert first.trim(1, 16, 24).trimmed_blocks == 1
    assert first.serve(T(1, 32)) == 16
    assert first.serve(T(1, 32)) == 24, "the recomputed rows are in the index again"


def test_b20_alignment_is_the_least_common_multiple_and_receipts_state_it() -> None:
    groups = WindowLedger(GroupSpec("a", 4, 64), GroupSpec("b", 64, 8), GroupSpec("c", 2, 128))
    assert groups.alignment == 64
    assert [groups.serve(T(1, 33)), groups.serve(T(1, 33))] == [0, 0]
    assert [groups.serve(T(1, 129)), groups.serve(T(1, 129))] == [0, 128]
    match = groups.admit(T(1, 33)).match
    assert (match.alignment, match.reason) == (64, "prompt_shorter_than_block")


def test_f10e_f111_the_junction_is_reported_and_not_the_best_group() -> None:
    """A window group that kept its oldest 4,000 rows of 32,000; the same with its newest rows kept."""
    specs = GroupSpec("full", 1000, 70), GroupSpec("window", 1000, 70, 4000)
    groups = WindowLedger(*specs, longest=32_200, device=False)
    prompt = T(1, 32_001)
    assert groups.serve(prompt, chunk=40_000) == 0
    groups.trim(1, 4000, 32_000)
    match = groups.ledger.probe(Scope("a", 1, WORLD), groups.admit_command(prompt).tokens).match
    assert (match.semantic, match.indexed, match.junction, match.runtime) == (32_000, 32_000, 4000, 4000)
    assert (match.limit, match.reason, match.recompute) == ("junction", "window_state_missing", 28_001)
    assert groups.serve(prompt, chunk=40_000) == 4000
    assert groups.serve(prompt, chunk=40_000) == 32_000, "the rows recomputed are in the index again"
    groups.trim(1, 0, 28_000)
    assert groups.serve(prompt, chunk=40_000) == 32_000, "the last window before the boundary is all it needs"


def test_k108_a_junction_above_the_cap_is_no_hit() -> None:
    groups = full_and_sliding()
    groups.serve(T(1, 32))
    groups.trim(1, 8, 16)
    match = groups.admit(T(1, 32)).match
    assert (match.junction, match.cap, match.runtime, match.limit) == (32, 31, 8, "junction")


def test_k106_k107_the_hit_equals_brute_force_over_random_residency() -> None:
    rng = random.Random(5)
    for _turn in range(60):
        sizes = [rng.choice([1, 2, 3, 4, 6]) for _ in range(3)]
        windows = [0, rng.randrange(1, 30), rng.choice([0, rng.randrange(1, 30)])]
        order = rng.sample(range(3), 3)
        specs = [GroupSpec(f"g{at}", sizes[at], 400 // sizes[at], windows[at]) for at in order]
        groups = WindowLedger(*specs)
        for _ in range(6):
            groups.serve([rng.randrange(2) for _ in range(rng.randrange(1, 60))], rng.choice([3, 7, 10_000]))
            for line in groups.ledger.evictable_window_blocks():
                at = [i for i in range(len(line.blocks)) if rng.random() < 0.2]
                groups.apply(Evict((), tuple([line.handles(i, i + 1)[0] for i in at])))


def test_blocks_leave_with_the_step_after_the_window_has_passed_them() -> None:
    groups = WindowLedger(GroupSpec("full", 4, 64), GroupSpec("sliding", 4, 64, 8))
    request = groups.admit(T(1, 40)).request
    held = []
    for _ in range(10):
        groups.dispatch(request, 4)
        receipt = groups.complete()
        held.append(len(groups.ledger.table(request, 1)))
    assert held == [2, 2] + [3] * 8
    assert [(left.freed_blocks, left.evictable_blocks) for left in receipt.left_window] == [(1, 0)]
    table = groups.ledger.group_tables[1][request.slot, :10].tolist()
    assert table[:7] == [-1] * 7 and min(table[7:]) >= 0
    assert len(groups.ledger.table(request, 0)) == 10
    receipt = groups.apply(Publish((request,)))
    assert [(left.freed_blocks, left.evictable_blocks) for left in receipt.left_window] == [(0, 1)]
    assert groups.ledger.gauge(1).evictable == 1


def test_published_blocks_that_leave_are_evictable_and_serve_hits() -> None:
    groups = WindowLedger(GroupSpec("full", 4, 64), GroupSpec("sliding", 4, 64, 8))
    request = groups.admit(T(1, 40)).request
    groups.compute(request, chunk=4, publish=True)
    assert groups.ledger.gauge(1).evictable == 8
    assert groups.serve(T(1, 12) + T(90, 9)) == 12
    assert groups.serve(T(1, 41)) == 40


def test_a_long_prompt_needs_a_window_and_its_step_and_no_more() -> None:
    groups = WindowLedger(GroupSpec("full", 4, 64), GroupSpec("sliding", 4, 5, 8), longest=200)
    request = groups.admit(T(1, 200)).request
    assert len(groups.ledger.table(request, 1)) == 2
    groups.compute(request, chunk=3)
    assert groups.ledger.request(request).valid_rows == 200
    groups.apply(Release(request, "finish"))
    assert groups.free() == [64, 5]
    request = groups.admit(T(1, 30)).request
    groups.number += 1
    groups.refused(Dispatch(groups.number, (RowSpan(request, 0, 30),)), OutOfMemory, group=1, needed_blocks=6)


def test_b11_one_sliding_group_frees_each_distinct_block_once() -> None:
    groups = WindowLedger(GroupSpec("sliding", 4, 6, 8), longest=64)
    receipt = groups.admit(T(1, 1))
    request, issued = receipt.request, list(receipt.new_blocks)
    groups.dispatch(request, 1)
    groups.complete(2)
    for token in range(3, 41):
        issued += groups.dispatch(request, 1).new_blocks
        groups.complete(token)
    live = len(groups.ledger.table(request))
    assert len(issued) == len(set(issued)) == 10 and live <= 4
    groups.apply(Release(request, "finish"))
    assert groups.free() == [6]
    groups.refused(Release(request, "finish"), DoubleRelease)
    for handle in issued:
        groups.refused(Evict((), (handle,)), StaleBlockGeneration)
    blocks = [groups.admit(T(50, 1)).new_blocks[0].block for _ in range(6)]
    assert len(set(blocks)) == 6
    groups.refused(groups.admit_command(T(50, 1)), OutOfMemory)


def test_a_ledger_of_windows_alone_indexes_and_locks_paths() -> None:
    groups = WindowLedger(GroupSpec("sliding", 4, 32, 8), longest=64)
    assert [groups.serve(T(1, 30)), groups.serve(T(1, 30))] == [0, 28]
    receipt = groups.admit(T(1, 30))
    assert groups.ledger.evictable_leaves() == ()
    groups.trim(0, 0, 12)
    groups.compute(receipt.request)
    groups.apply(Fork(receipt.request, 1))
    for handle in groups.ledger.running():
        groups.apply(Release(handle, "finish"))
    (leaf,) = groups.ledger.evictable_leaves()
    assert groups.apply(Evict((leaf.handle,))).freed_blocks == 4
    assert groups.free() == [32]


def test_eviction_order_spares_the_windows_at_boundaries_and_one_page_below() -> None:
    groups = full_and_sliding(longest=512)
    groups.serve(T(1, 96))
    groups.serve(T(500, 24))
    (line,) = groups.ledger.evictable_window_blocks()
    ends = [96 if groups.ledger.state.tree.pages.array[node] == 12 else 24 for node in line.nodes.tolist()]
    kept = [(place + 1) * 8 > end - 24 for place, end in zip(line.places.tolist(), ends, strict=True)]
    assert kept == [False] * line.outside + [True] * (len(line.blocks) - line.outside) and line.outside == 9
    groups.apply(Evict((), line.handles(0, line.outside)))
    assert [groups.brute_force(T(1, 96)), groups.brute_force(T(1, 97))] == [88, 96]
    assert groups.serve(T(1, 96)) == 88


def test_trim_refuses_what_is_not_an_idle_window_block_of_the_index() -> None:
    groups = full_and_sliding()
    groups.serve(T(1, 32))
    (line,) = groups.ledger.evictable_window_blocks()
    handles = line.handles(0, 4)
    full = groups.ledger.block_handles(groups.admit(T(1, 8)).request)[0]
    groups.refused(Evict((), (full,)), EdgePartiallyEvicted, group=0)
    groups.refused(Evict((), (handles[0], handles[0])), MalformedCommand, field="trim")
    needed = [handle for handle, place in zip(handles, line.places.tolist(), strict=True) if place == 2]
    groups.refused(groups.admit_command(T(1, 32), trim=tuple(needed)), EvictLiveBlock)
    running = groups.admit(T(1, 32)).request
    groups.refused(Evict((), tuple(needed)), EvictLiveBlock)
    groups.apply(Release(running, "cancel"))
    groups.apply(Evict((), tuple(needed)))
    groups.refused(Evict((), tuple(needed)), StaleBlockGeneration)


def test_trims_make_room_for_the_command_that_names_them() -> None:
    groups = WindowLedger(GroupSpec("full", 4, 64), GroupSpec("sliding", 8, 7, 16))
    groups.serve(T(1, 48))
    (line,) = groups.ledger.evictable_window_blocks()
    command = groups.admit_command(T(200, 24))
    groups.refused(command, OutOfMemory, group=1)
    receipt = groups.admit(T(200, 24), trim=line.handles(0, line.outside))
    assert (receipt.evicted.nodes, receipt.evicted.trimmed_blocks, receipt.evicted.freed_blocks) == (0, 3, 3)
    groups.dispatch(receipt.request, 24)
    groups.complete()
    assert groups.brute_force(T(1, 48)) == 40


def test_evicting_an_edge_and_trimming_its_blocks_counts_each_once() -> None:
    groups = full_and_sliding()
    groups.serve(T(1, 40))
    (leaf,), (line,) = groups.ledger.evictable_leaves(), groups.ledger.evictable_window_blocks()
    receipt = groups.apply(Evict((leaf.handle,), line.handles(0, 2)))
    assert (receipt.nodes, receipt.trimmed_blocks, receipt.freed_blocks) == (1, 2, 15)
    assert groups.free() == [64, 64]


def test_branches_share_a_window_and_a_copy_of_its_tail() -> None:
    groups = full_and_sliding()
    parent = groups.admit(T(1, 37)).request
    for count in (12, 12, 12, 1):
        groups.dispatch(parent, count)
        groups.complete(50 if count == 1 else None)
    receipt = groups.apply(Fork(parent, 2))
    assert receipt.shared_blocks == 10 + len(groups.ledger.table(parent, 1))
    copies = []
    for token, handle in enumerate((parent, *receipt.children)):
        copies.append([copy.group for copy in groups.dispatch(handle, 1).copies])
        groups.complete(60 + token)
        assert groups.ledger.group_tables[1][handle.slot, 0] == -1
    assert copies == [[0, 1], [0, 1], []], "the last holder keeps the tail"
    groups.apply(Release(parent, "finish"))
    for child in receipt.children:
        groups.apply(Release(child, "cancel"))
    assert groups.free() == [64, 64]


def test_a_truncation_into_what_a_window_left_is_refused_now_or_queued() -> None:
    groups = WindowLedger(GroupSpec("full", 4, 64), GroupSpec("sliding", 4, 64, 8))
    request = groups.admit(T(1, 32)).request
    groups.compute(request, chunk=4)
    assert int(groups.ledger.state.requests.firsts[1].array[request.slot]) == 5
    groups.refused(Truncate(request, 28), WindowStateMissing, needed_row=19, first_held_row=20)
    assert groups.apply(Truncate(request, 29)).freed_blocks == 2
    groups.dispatch(request, 1)
    groups.refused(Truncate(request, 28), WindowStateMissing)
    assert groups.apply(Truncate(request, 29)).deferred
    groups.apply(Publish((request,)))
    groups.complete(7)
    assert groups.ledger.request(request).valid_rows == 28
    groups.compute(request)
    groups.apply(Release(request, "finish"))


def test_abort_reset_and_revocation_reach_window_groups() -> None:
    groups = full_and_sliding()
    groups.serve(T(1, 48))
    committed, free = groups.ledger.committed_digest, groups.free()
    groups.admit(T(1, 60))
    groups.apply(Abort(groups.number))
    assert groups.free() == free and groups.ledger.committed_digest == committed
    groups.apply(Reset(Scope("a", 1, WORLD)))
    assert groups.free() == [64, 64]
    groups.serve(T(1, 48))
    running = groups.admit(T(1, 60)).request
    groups.dispatch(running, 8)
    receipt = groups.apply(AdvanceGeneration("a", 2))
    assert receipt.roots_dropped == 1
    groups.complete()
    groups.dispatch(running)
    receipt = groups.complete()
    assert receipt.left_window[0].freed_blocks and receipt.scrub_others[0]
    groups.apply(Release(running, "revoke"))
    assert groups.free() == [64, 64]
    assert groups.ledger.residue("a", 2, 0) == groups.ledger.residue("a", 2, 1) == ()


def test_a_discarded_step_moves_no_window() -> None:
    groups = full_and_sliding()
    request = groups.admit(T(1, 48)).request
    groups.dispatch(request, 40)
    groups.complete()
    groups.dispatch(request, 8)
    receipt = groups.complete(discarded=(0,))
    assert receipt.left_window[0].freed_blocks == 3, "rows before 40 - 16 left with the first step already"
    assert groups.ledger.request(request).valid_rows == 40
    groups.dispatch(request, 8)
    groups.complete()


@pytest.mark.parametrize("window", [-1, 1 << 31])
def test_a_window_is_a_count(window: int) -> None:
    with pytest.raises(MalformedCommand):
        WindowLedger(GroupSpec("full", 4, 64), GroupSpec("sliding", 8, 64, window))


def test_a_complete_that_samples_keeps_the_window_of_the_next_row() -> None:
    groups = WindowLedger(GroupSpec("full", 2, 64), GroupSpec("sliding", 2, 64, 3))
    request = groups.admit(T(1, 5)).request
    groups.dispatch(request)
    groups.complete(9)
    for token in range(10, 40):
        groups.decode(request, token)
        assert len(groups.ledger.table(request, 1)) <= 3
    groups.apply(Publish((request,)))
    known = groups.ledger.request_tokens(request).tolist()
    groups.apply(Release(request, "finish"))
    assert groups.brute_force(known) == (len(known) - 1) // 2 * 2
    assert groups.serve([*known, 1]) == len(known) // 2 * 2 - (len(known) % 2 == 0) * 2


def _mark_too_early(state: LedgerState) -> None:
    state.requests.all_tables[1][0, int(state.requests.firsts[1].array[0])] = -1


def _leave_too_much(state: LedgerState) -> None:
    for _ in range(2):  # The first of them waited for the next step.
        _mark_too_early(state)
        state.requests.firsts[1].array[0] += 1


def _leave_in_full_attention(state: LedgerState) -> None:
    state.requests.firsts[0].array[0] = 1


def _misplace(state: LedgerState) -> None:
    state.pools[1].place.array[np.flatnonzero(state.pools[1].node.array)[0]] += 1


def _forget_resident(state: LedgerState) -> None:
    node = int(np.flatnonzero(state.tree.pages.array)[0])
    state.tree.mark(1, node, np.array([0]) + int(state.tree.start.array[node]), -1)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (_mark_too_early, "table_length_drift"),
        (_leave_too_much, "window_state_missing"),
        (_leave_in_full_attention, "window_state_missing"),
        (_misplace, "path_slot_mismatch"),
        (_forget_resident, "slot_owned_twice"),
    ],
)
def test_the_audit_finds_damage_of_a_window(damage: Callable[[LedgerState], None], finding: str) -> None:
    groups = full_and_sliding()
    groups.serve(T(1, 32))
    running = groups.admit(T(200, 48)).request
    groups.compute(running, chunk=8)
    damage(groups.ledger.state)
    with pytest.raises(AuditViolation) as caught:
        audit(groups.ledger)
    assert any(found.startswith(finding) for found in caught.value.findings), caught.value.findings
