"""Publish, Evict, AdvanceGeneration: the index, its locks, its floors and what is scrubbed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.commands import (
    Admit,
    AdvanceGeneration,
    Complete,
    Dispatch,
    Evict,
    NodeHandle,
    Publish,
    Release,
    RowSpan,
)
from copyhold.kvcore.errors import (
    InternalNodeEvicted,
    LockedLeafEvicted,
    MalformedCommand,
    NamespaceGenerationMismatch,
    RootEvicted,
    StaleNamespaceGeneration,
    StaleRequestGeneration,
    StaleTreeVersion,
)


def test_only_full_blocks_are_published(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 11)).request
    assert driver.publish(request).entries[0].tokens_after == 0
    driver.prefill(request)
    entry = driver.publish(request).entries[0]
    assert (entry.tokens_before, entry.tokens_after, entry.duplicate_blocks) == (0, 8, 0)
    [(scope, tokens, blocks)] = driver.ledger.paths("a")
    assert scope == driver.scope() and tokens.tolist() == driver.tokens(1, 8)
    assert blocks.tolist() == driver.ledger.tables[request.slot, :2].tolist()


def test_publishing_again_adds_nothing(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 8)).request
    driver.prefill(request)
    first = driver.publish(request).entries[0]
    before = driver.trace()[:2]
    again = driver.publish(request, request).entries
    assert driver.trace()[:2] == before
    assert [(entry.tokens_before, entry.tokens_after) for entry in again] == [(8, 8), (8, 8)]
    assert again[0].path == first.path


def test_a_long_answer_grows_one_edge(make_driver: Any) -> None:
    driver = make_driver(num_blocks=32)
    request = driver.admit(driver.tokens(1, 8)).request
    driver.prefill(request, sample=200)
    old = driver.publish(request).entries[0].path
    for token in range(201, 230):
        driver.decode(request, token)
        entry = driver.publish(request).entries[0]
    assert len(entry.path) == 1 and entry.tokens_after == 36
    driver.refused(Evict(old), StaleTreeVersion)
    driver.release(request)
    assert driver.admit([*driver.tokens(1, 8), *range(200, 229)]).match.runtime == 36


def test_an_edge_found_at_admission_gets_a_child_instead(driver: Any) -> None:
    driver.serve(driver.tokens(1, 8))
    request = driver.admit(driver.tokens(1, 13)).request
    driver.prefill(request)
    path = driver.publish(request).entries[0].path
    assert [driver.ledger.node(node).start_page for node in path] == [0, 2]


def test_duplicate_blocks_are_counted_never_repointed_and_freed_at_release(driver: Any) -> None:
    one, two = (driver.admit(driver.tokens(1, 12)).request for _ in range(2))
    for request in (one, two):
        driver.prefill(request)
    driver.publish(one)
    table = driver.ledger.tables[two.slot].tolist()
    entry = driver.publish(two).entries[0]
    assert (entry.tokens_before, entry.tokens_after, entry.duplicate_blocks) == (12, 12, 3)
    assert driver.ledger.tables[two.slot].tolist() == table
    driver.check_reads(two)
    assert driver.release(two).freed_blocks == 3
    assert driver.release(one).evictable_blocks == 3


def test_entry_under_a_foreign_path_leases_that_path(driver: Any) -> None:
    one, two = driver.admit(driver.tokens(1, 8)).request, driver.admit(driver.tokens(1, 16)).request
    for request in (one, two):
        driver.prefill(request)
    driver.publish(one)
    entry = driver.publish(two).entries[0]
    assert (entry.tokens_before, entry.tokens_after, entry.duplicate_blocks) == (8, 16, 2)
    driver.release(one)
    assert driver.ledger.evictable_leaves() == () and driver.ledger.gauge().evictable == 0
    receipt = driver.release(two)
    assert (receipt.freed_blocks, receipt.evictable_blocks) == (2, 4)
    assert driver.admit(driver.tokens(1, 17)).match.runtime == 16


def test_entry_below_part_of_a_foreign_edge_splits_it(driver: Any) -> None:
    one = driver.admit(driver.tokens(1, 16)).request
    two = driver.admit([*driver.tokens(1, 8), *driver.tokens(70, 8)]).request
    for request in (one, two):
        driver.prefill(request)
    driver.publish(one)
    assert driver.publish(two).entries[0].duplicate_blocks == 2
    leases = [driver.ledger.node(node).leases for node in driver.publish(one).entries[0].path]
    assert leases == [2, 1]
    assert len(driver.ledger.paths("a")) == 2
    for request in (one, two):
        driver.release(request)
    assert driver.evict_up_to(100) == 6
    assert driver.ledger.gauge().free == 16


def test_eviction_is_judged_in_order(driver: Any) -> None:
    driver.serve(driver.tokens(1, 16))
    driver.serve([*driver.tokens(1, 8), *driver.tokens(70, 8)])
    leaves = driver.ledger.evictable_leaves()
    parent = leaves[0].parent
    assert len(leaves) == 2 and leaves[1].parent == parent
    one, two = (leaf.handle for leaf in leaves)
    driver.refused(Evict((parent, one, two)), InternalNodeEvicted, node=parent.node, children=2)
    driver.refused(Evict((one, parent, two)), InternalNodeEvicted, children=1)
    driver.refused(Evict((one, one)), StaleTreeVersion, node=one.node)
    driver.refused(Evict((one, NodeHandle(0, 0))), RootEvicted)
    driver.refused(Evict((NodeHandle(one.node, one.generation + 1),)), StaleTreeVersion)
    driver.refused(Evict((NodeHandle(99, 0),)), StaleTreeVersion)
    receipt = driver.apply(Evict((one, two, parent)))
    assert (receipt.nodes, receipt.freed_blocks, receipt.scrub) == (3, 6, ())
    assert driver.ledger.gauge().free == 16 and driver.ledger.paths("a") == []
    driver.refused(Evict((one,)), StaleTreeVersion)
    with pytest.raises(StaleTreeVersion):
        driver.ledger.node(parent)
    with pytest.raises(StaleTreeVersion):
        driver.ledger.node(NodeHandle(5, 0))


def test_k127_a_probe_that_was_deferred_is_stale_once_anything_was_applied(driver: Any) -> None:
    """Deferred, evicted, then used: what leased nothing is confirmed or refused; what leased stays."""
    driver.serve(driver.tokens(1, 9))
    content = np.array(driver.tokens(1, 9), dtype="<i4").tobytes()
    deferred = driver.ledger.probe(driver.scope(), content)
    driver.ledger.confirm(deferred)
    assert (deferred.match.runtime, deferred.version) == (8, driver.ledger.log_index)
    driver.evict_up_to(2)
    with pytest.raises(StaleTreeVersion) as caught:
        driver.ledger.confirm(deferred)
    assert caught.value.generation == deferred.version
    assert driver.ledger.probe(driver.scope(), content).match.runtime == 0
    driver.serve(driver.tokens(1, 9))
    admitted = driver.admit(driver.tokens(1, 9))
    driver.refused(Evict((admitted.path[-1],)), LockedLeafEvicted)
    driver.abort()


def test_leased_leaf_is_not_evicted(driver: Any) -> None:
    driver.serve(driver.tokens(1, 8))
    leaf = driver.ledger.evictable_leaves()[0].handle
    request = driver.admit(driver.tokens(1, 9)).request
    assert driver.ledger.evictable_leaves() == ()
    driver.refused(Evict((leaf,)), LockedLeafEvicted, leases=1)
    driver.release(request)
    assert driver.apply(Evict((leaf,))).freed_blocks == 2


def test_a_split_keeps_the_handle_of_the_lower_half(driver: Any) -> None:
    driver.serve(driver.tokens(1, 16))
    leaf = driver.ledger.evictable_leaves()[0].handle
    request = driver.admit([*driver.tokens(1, 8), 99]).request
    assert driver.ledger.node(leaf).start_page == 2
    assert driver.apply(Evict((leaf,))).freed_blocks == 2
    driver.prefill(request)
    driver.check_reads(request)


def test_a_block_that_changes_scope_is_scrubbed_one_that_stays_is_not(driver: Any) -> None:
    first = driver.admit(driver.tokens(1, 8)).request
    driver.prefill(first)
    driver.release(first)
    assert driver.admit(driver.tokens(1, 8)).scrub == ()
    driver.release(driver.ledger.running()[0])
    foreign = driver.admit(driver.tokens(1, 8), "b")
    assert sorted(foreign.scrub) == sorted(handle.block for handle in foreign.new_blocks)
    assert driver.ledger.residue("a", 99) == () and len(driver.ledger.residue("b", 99)) == 2


def test_growth_into_foreign_blocks_is_scrubbed(make_driver: Any) -> None:
    driver = make_driver(num_blocks=3)
    driver.prefill(driver.admit(driver.tokens(1, 12)).request)
    driver.release(driver.ledger.running()[0])
    request = driver.admit(driver.tokens(1, 4), "b").request
    driver.prefill(request, sample=3)
    receipt = driver.apply(_next_row(driver, request))
    assert receipt.scrub == (receipt.new_blocks[0].block,)


def _next_row(driver: Any, request: Any) -> Any:
    return Dispatch(driver.step + 1, (RowSpan(request, driver.ledger.request(request).valid_rows, 1),), ())


def test_a_raised_floor_drops_roots_scrubs_free_blocks_and_lets_running_work_drain(driver: Any) -> None:
    driver.serve(driver.tokens(1, 12))
    ended = driver.admit(driver.tokens(60, 8)).request
    driver.prefill(ended)
    driver.release(ended)
    running = driver.admit(driver.tokens(1, 10)).request
    driver.prefill(running, sample=7)
    other = driver.serve(driver.tokens(1, 8), "b")
    free = driver.ledger.gauge().free
    assert len(driver.ledger.residue("a", 2)) >= 4
    receipt = driver.advance("a", 2)
    assert receipt.roots_dropped == 1 and receipt.draining_blocks == 3
    assert driver.ledger.gauge().free == free + receipt.freed_blocks
    table = driver.ledger.tables[running.slot, :3].tolist()
    assert sorted(driver.ledger.residue("a", 2)) == sorted(table) and not set(table) & set(receipt.scrub)
    assert driver.ledger.paths("a") == [] and len(driver.ledger.paths("b")) == 1
    driver.decode(running, 8)
    driver.check_reads(running)
    driver.refused(Publish((running,)), StaleNamespaceGeneration, floor=2)
    done = driver.release(running, "revoke")
    assert done.evictable_blocks == 0 and sorted(done.scrub) == sorted(table)
    assert driver.ledger.residue("a", 2) == ()
    assert driver.admit(driver.tokens(1, 12), generation=2).match.reason == "root_empty"
    assert driver.admit(driver.tokens(1, 9), "b").match.runtime == 8
    assert len(other.new_blocks) == 2


def test_deferred_release_after_a_raised_floor_scrubs_at_completion(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 8)).request
    driver.dispatch((request, 8))
    driver.advance("a", 2)
    assert driver.release(request, "revoke").scrub == ()
    done = driver.complete()
    assert len(done.scrub) == 2 and done.released[0].scrub == done.scrub
    driver.check_quiet()


def test_aborted_admission_of_a_revoked_scope_is_scrubbed(driver: Any) -> None:
    driver.admit(driver.tokens(1, 8))
    driver.advance("a", 2)
    assert len(driver.abort().scrub) == 2


def test_a_foreign_path_leased_besides_the_table_drains_with_its_root(driver: Any) -> None:
    one, two = driver.admit(driver.tokens(1, 8)).request, driver.admit(driver.tokens(1, 16)).request
    for request in (one, two):
        driver.prefill(request)
        driver.publish(request)
    driver.release(one)
    receipt = driver.advance("a", 2)
    assert (receipt.freed_blocks, receipt.draining_blocks) == (2, 4)
    assert len(driver.release(two, "revoke").scrub) == 4
    assert driver.ledger.gauge().free == 16


def test_floors_only_rise(driver: Any) -> None:
    driver.advance("a", 3)
    for generation in (3, 2):
        driver.refused(AdvanceGeneration("a", generation), NamespaceGenerationMismatch, floor=3)
    driver.refused(AdvanceGeneration("", 3), MalformedCommand)
    driver.refused(AdvanceGeneration("a", 2**63), MalformedCommand)
    driver.refused(driver.admit_command([1], generation=2), StaleNamespaceGeneration, floor=3)
    with pytest.raises(StaleNamespaceGeneration):
        driver.ledger.probe(driver.scope(generation=2), b"\1\0\0\0")
    assert driver.ledger.floor("a") == 3 and driver.ledger.floor("unseen") == 0
    assert driver.admit([1], generation=4).match.runtime == 0


def test_publication_of_an_ended_request_is_refused(driver: Any) -> None:
    request = driver.admit([1, 2]).request
    driver.release(request)
    driver.refused(Publish((request,)), StaleRequestGeneration)


def test_many_scopes_outgrow_the_first_tables(make_driver: Any) -> None:
    driver = make_driver(num_blocks=4)
    for number in range(150):
        driver.serve(driver.tokens(number, 5), f"tenant-{number}")
        driver.advance(f"tenant-{number}", 2)
    assert driver.ledger.gauge().free == 4


def test_deep_paths_need_no_recursion(make_driver: Any) -> None:
    driver = make_driver(block_size=1, num_blocks=1500, max_model_len=1500)
    ledger = driver.ledger
    for length in range(2, 1400, 7):
        content = np.arange(length, dtype="<i4").tobytes()
        driver.transaction += 1
        request = ledger.apply(Admit(driver.transaction, driver.scope(), content, True, ())).request
        view = ledger.request(request)
        driver.step += 1
        ledger.apply(
            Dispatch(driver.step, (RowSpan(request, view.valid_rows, length - view.valid_rows),), ())
        )
        ledger.apply(Complete(driver.step, (), ()))
        ledger.apply(Publish((request,)))
        ledger.apply(Release(request, "finish"))
    path = ledger.probe(driver.scope(), np.arange(1400, dtype="<i4").tobytes()).path
    assert len(path) > 150
    assert driver.advance("a", 2).freed_blocks == ledger.gauge().total - (1500 - 1395)
