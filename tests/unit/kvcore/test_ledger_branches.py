"""Fork, copy-on-write, Truncate and Reset: who shares what, who is given a copy, what stays."""

from __future__ import annotations

from typing import Any

from copyhold.kvcore.commands import Complete, Dispatch, Fork, Publish, Release, Reset, RowSpan, Truncate
from copyhold.kvcore.errors import (
    DoubleRelease,
    MalformedCommand,
    ResetWithLiveReferences,
    SlotsExhausted,
    StaleNamespaceGeneration,
    StaleRequestGeneration,
)


def _parent(driver: Any, tokens: int = 10) -> Any:
    """A request with all rows valid and one sampled token."""
    request = driver.admit(driver.tokens(1, tokens)).request
    driver.prefill(request, sample=50)
    return request


def _step(driver: Any, *handles: Any) -> Any:
    """One token of each; the DispatchReceipt, its copies carried out on the toy device."""
    driver.step += 1
    rows = tuple(RowSpan(handle, driver.ledger.request(handle).valid_rows, 1) for handle in handles)
    receipt = driver.apply(Dispatch(driver.step, rows))
    for copy in receipt.copies:
        driver.rows[copy.target][: copy.rows] = driver.rows[copy.source][: copy.rows]
    for row in rows:
        driver.write(row)
    driver.apply(Complete(driver.step, tuple((index, 60 + index) for index in range(len(rows)))))
    return receipt


def test_a_fork_moves_nothing_and_counts_every_child(driver: Any) -> None:
    parent = _parent(driver)
    free = driver.ledger.gauge().free
    receipt = driver.apply(Fork(parent, 3))
    assert receipt.shared_blocks == 3 and driver.ledger.gauge().free == free
    for child in receipt.children:
        assert driver.ledger.table(child).tolist() == driver.ledger.table(parent).tolist()
        assert driver.ledger.request_tokens(child).tolist() == driver.ledger.request_tokens(parent).tolist()
        driver.check_reads(child)
    for handle in (parent, *receipt.children):
        driver.release(handle)
    driver.check_quiet()


def test_four_branches_make_three_copies_and_the_last_keeps_the_tail(driver: Any) -> None:
    parent = _parent(driver)
    tail = int(driver.ledger.table(parent)[2])
    children = driver.apply(Fork(parent, 3)).children
    receipt = _step(driver, parent, *children)
    assert [(copy.source, copy.rows) for copy in receipt.copies] == [(tail, 2)] * 3
    assert int(driver.ledger.table(children[2])[2]) == tail
    for handle in (parent, *children):
        driver.check_reads(handle)
    assert len({int(driver.ledger.table(handle)[2]) for handle in (parent, *children)}) == 4


def test_a_full_tail_is_never_copied(driver: Any) -> None:
    parent = _parent(driver, 8)
    (child,) = driver.apply(Fork(parent, 1)).children
    assert _step(driver, parent, child).copies == ()


def test_a_copied_tail_stays_until_its_step_is_complete(driver: Any) -> None:
    parent = _parent(driver)
    tail = int(driver.ledger.table(parent)[2])
    (child,) = driver.apply(Fork(parent, 1)).children
    driver.dispatch((child, 1))
    driver.release(parent, "cancel")
    assert tail not in driver.ledger.state.pool.free.ids()
    driver.rows[int(driver.ledger.table(child)[2])][:2] = driver.rows[tail][:2]
    driver.complete()
    assert tail in driver.ledger.state.pool.free.ids()
    driver.check_reads(child)


def test_a_discarded_first_row_leaves_the_branch_with_its_copy(driver: Any) -> None:
    parent = _parent(driver)
    (child,) = driver.apply(Fork(parent, 1)).children
    driver.dispatch((child, 1))
    driver.rows[int(driver.ledger.table(child)[2])][:2] = driver.rows[int(driver.ledger.table(parent)[2])][:2]
    driver.complete(discarded=(0,))
    assert driver.ledger.request(child).valid_rows == 10
    driver.check_reads(child)
    assert _step(driver, parent, child).copies == ()


def test_branches_publish_their_common_past_once(driver: Any) -> None:
    parent = _parent(driver)
    (child,) = driver.apply(Fork(parent, 1)).children
    first, second = driver.apply(Publish((parent, child))).entries
    assert (first.tokens_after, second.tokens_before) == (8, 8)
    assert second.duplicate_blocks == 0
    driver.release(parent)
    assert driver.ledger.evictable_leaves() == (), "the child still reads the indexed blocks"
    driver.release(child)
    driver.check_quiet()


def test_forks_that_cannot_be(driver: Any) -> None:
    parent = _parent(driver)
    driver.refused(Fork(parent, 0), MalformedCommand, field="children")
    driver.refused(Fork(parent, 8), SlotsExhausted)
    driver.advance("a", 2)
    driver.refused(Fork(parent, 1), StaleNamespaceGeneration)
    driver.release(parent)
    driver.refused(Fork(parent, 1), StaleRequestGeneration)


def test_a_truncation_drops_a_suffix_and_keeps_a_sharer_s_rows(driver: Any) -> None:
    parent = _parent(driver)
    (child,) = driver.apply(Fork(parent, 1)).children
    receipt = driver.apply(Truncate(child, 6))
    assert (receipt.deferred, receipt.freed_blocks) == (False, 0)
    assert driver.ledger.request(child).valid_rows == 5 and driver.ledger.request(child).num_blocks == 2
    driver.check_reads(parent)
    driver.check_reads(child)
    assert driver.apply(Truncate(parent, 4)).freed_blocks == 1
    driver.release(parent)
    driver.release(child)
    driver.check_quiet()


def test_a_truncated_request_writes_beside_what_is_indexed(driver: Any) -> None:
    parent = _parent(driver, 8)
    driver.publish(parent)
    blocks = driver.ledger.table(parent).tolist()
    driver.apply(Truncate(parent, 6))
    receipt = _step(driver, parent)
    assert [(copy.source, copy.rows) for copy in receipt.copies] == [(blocks[1], 1)]
    driver.check_reads(parent)
    [(_, tokens, indexed)] = driver.ledger.paths("a")
    assert (tokens.tolist(), indexed.tolist()) == (driver.tokens(1, 8), blocks)
    again = driver.admit([*driver.tokens(1, 8), 70])
    assert again.match.runtime == 8
    driver.check_reads(again.request)


def test_a_truncation_waits_for_its_step_and_the_shorter_of_two_counts(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 12)).request
    driver.dispatch((request, 12))
    assert driver.apply(Truncate(request, 9)).deferred
    driver.apply(Truncate(request, 5))
    assert driver.apply(Truncate(request, 7)).deferred
    receipt = driver.complete()
    (facts,) = receipt.truncated
    assert (facts.num_tokens, facts.valid_rows, facts.freed_blocks) == (5, 4, 2)
    driver.check_reads(request)
    driver.refused(Truncate(request, 0), MalformedCommand, field="num_tokens")


def test_a_truncation_and_a_release_of_one_step_both_happen(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 12)).request
    driver.dispatch((request, 12))
    driver.apply(Truncate(request, 5))
    driver.apply(Release(request, "cancel"))
    driver.refused(Truncate(request, 4), DoubleRelease)
    receipt = driver.complete()
    assert len(receipt.truncated) == len(receipt.released) == 1
    driver.check_quiet()


def test_a_reset_drops_an_index_nobody_reads_and_the_same_prompt_misses(driver: Any) -> None:
    driver.serve(driver.tokens(1, 8))
    running = driver.admit([*driver.tokens(1, 8), 9]).request
    driver.refused(Reset(driver.scope()), ResetWithLiveReferences)
    driver.release(running)
    assert driver.apply(Reset(driver.scope())).freed_blocks == 2
    assert driver.admit([*driver.tokens(1, 8), 9]).match.reason == "root_empty"
    assert driver.apply(Reset(driver.scope("other"))).freed_blocks == 0
