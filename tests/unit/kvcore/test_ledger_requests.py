"""Admit, Dispatch, Complete, Release, Abort: what one request sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    GroupSpec,
    NodeHandle,
    Publish,
    Release,
    RequestHandle,
    RowSpan,
    Scope,
    decode_command,
    encode_command,
)
from copyhold.kvcore.errors import (
    AppendOutOfOrder,
    DoubleRelease,
    EmptyPrompt,
    EvictLiveBlock,
    LogGap,
    LogRepetition,
    MalformedCommand,
    OutOfMemory,
    OutsideRequestContext,
    RequestInFlight,
    RollbackAfterPublication,
    StaleBlockGeneration,
    StaleRequestGeneration,
    StepOutOfOrder,
    TokenOutOfRange,
    UnknownTransaction,
)
from copyhold.kvcore.ledger import Ledger

FIXTURES = json.loads((Path(__file__).parents[2] / "data" / "fixtures.json").read_text())["fixtures"]
BY_ID = {fixture["id"]: fixture for fixture in FIXTURES}


def test_cold_admission_reserves_the_whole_prompt(driver: Any) -> None:
    receipt = driver.admit(driver.tokens(1, 10))
    assert (receipt.match.runtime, receipt.match.reason) == (0, "root_empty")
    assert len(receipt.new_blocks) == 3 and receipt.shared_blocks == () and receipt.path == ()
    view = driver.ledger.request(receipt.request)
    assert (view.num_tokens, view.valid_rows, view.reserved_rows, view.num_blocks) == (10, 0, 12, 3)
    gauge = driver.ledger.gauge()
    assert (gauge.free, gauge.evictable, gauge.live, gauge.reserved) == (13, 0, 0, 3)
    assert driver.ledger.request_tokens(receipt.request).tolist() == driver.tokens(1, 10)


def test_warm_admission_leases_the_path_and_reserves_the_rest(driver: Any) -> None:
    driver.serve(driver.tokens(1, 12))
    receipt = driver.admit([*driver.tokens(1, 8), 99, 98, 97, 96, 95])
    assert (receipt.match.semantic, receipt.match.indexed, receipt.match.runtime) == (8, 8, 8)
    assert (receipt.match.limit, receipt.match.reason) == ("semantic", "tokens_differ")
    assert len(receipt.shared_blocks) == 2 and len(receipt.new_blocks) == 2 and len(receipt.path) == 1
    assert driver.ledger.node(receipt.path[0]).leases == 1
    assert driver.ledger.request(receipt.request).valid_rows == 8
    driver.prefill(receipt.request)
    driver.check_reads(receipt.request)


def test_semantic_length_counts_tokens_inside_a_page(driver: Any) -> None:
    driver.serve(driver.tokens(1, 12))
    for common in range(13):
        prompt = driver.tokens(1, common) + [500] * (18 - common)
        content = np.array(prompt, dtype="<i4").tobytes()
        match = driver.ledger.probe(driver.scope(), content).match
        assert (match.semantic, match.indexed) == (common, common // 4 * 4)
        assert match.reason == ("tokens_differ" if common < 12 else "not_indexed")


def test_junction_finds_the_longest_of_many_siblings(driver: Any) -> None:
    for sibling in ([1, 2, 3, 4], [1, 2, 9, 9], [1, 2, 3, 70000], [7, 7, 7, 7], [1, 300, 3, 4]):
        driver.serve([*sibling, 5])
    for prompt, common in (([1, 2, 3, 5, 0], 3), ([1, 2, 8], 2), ([2], 0), ([1, 300], 2), ([1, 2, 3], 3)):
        match = driver.ledger.probe(driver.scope(), np.array(prompt, dtype="<i4").tobytes()).match
        assert match.semantic == common


def test_probe_reads_only_and_agrees_with_the_admission(driver: Any) -> None:
    driver.serve(driver.tokens(1, 12))
    command = driver.admit_command(driver.tokens(1, 11))
    before = driver.trace()
    probe = driver.ledger.probe(command.scope, command.tokens)
    assert driver.trace() == before
    receipt = driver.apply(command)
    assert probe.match == receipt.match
    assert probe.blocks.tolist() == [handle.block for handle in receipt.shared_blocks]


def test_lookup_not_permitted_computes_cold(driver: Any) -> None:
    driver.serve(driver.tokens(1, 12))
    receipt = driver.admit(driver.tokens(1, 12), lookup=False)
    assert (receipt.match.semantic, receipt.match.runtime) == (0, 0)
    assert receipt.match.reason == "lookup_not_permitted" and len(receipt.new_blocks) == 3


@pytest.mark.parametrize("other", ["namespace", "generation", "world"])
def test_another_scope_sees_nothing(driver: Any, other: str) -> None:
    driver.serve(driver.tokens(1, 12))
    command = driver.admit_command(
        driver.tokens(1, 12),
        "b" if other == "namespace" else "a",
        generation=2 if other == "generation" else 1,
    )
    if other == "world":
        scope = type(command.scope)("a", 1, b"x" * 32)
        command = Admit(command.transaction, scope, command.tokens, True, ())
    assert driver.apply(command).match.reason == "root_empty"


def test_gap_in_the_chain_ends_the_match(make_driver: Any) -> None:
    fixture = BY_ID["F067"]
    driver = make_driver(block_size=fixture["inputs"]["P"], num_blocks=16)
    prompt = driver.tokens(1, fixture["inputs"]["S_prompt"])
    driver.serve(prompt)
    holed = [*prompt[:16], *driver.tokens(900, 16), *prompt[32:]]
    assert driver.admit(holed).match.runtime == fixture["expected"]["S_runtime"]


def test_pool_gauge_reconciles_in_the_worked_example(driver: Any) -> None:
    inputs, expected = BY_ID["F0A1"]["inputs"], BY_ID["F0A1"]["expected"]
    small = type(driver)(num_blocks=expected["pool"])
    small.serve(small.tokens(1, 8))
    small.prefill(small.admit(small.tokens(100, 20)).request)
    small.admit(small.tokens(200, 8))
    gauge = small.ledger.gauge()
    assert (gauge.free, gauge.evictable, gauge.live) == (inputs["free"], inputs["evictable"], inputs["live"])
    assert gauge.reserved == inputs["reserved_or_copying"] and gauge.total == expected["pool"]


def test_empty_prompt_is_refused_before_any_length(driver: Any) -> None:
    assert BY_ID["F065"]["inputs"]["S_prompt"] == 0
    driver.refused(driver.admit_command([]), EmptyPrompt)


def test_negative_token_is_refused_with_its_position(driver: Any) -> None:
    driver.refused(driver.admit_command([5, -1]), TokenOutOfRange, position=1, token=-1)


def test_decode_grows_the_table_block_by_block(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 7)).request
    driver.prefill(request, sample=500)
    blocks = []
    for token in range(501, 507):
        driver.decode(request, token)
        blocks.append(driver.ledger.request(request).num_blocks)
        driver.check_reads(request)
    assert blocks == [2, 3, 3, 3, 3, 4]
    view = driver.ledger.request(request)
    assert (view.num_tokens, view.valid_rows) == (14, 13)


def test_last_sampled_token_has_no_rows_until_it_is_dispatched(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 7)).request
    driver.prefill(request, sample=500)
    view = driver.ledger.request(request)
    assert (view.num_tokens, view.valid_rows) == (8, 7)
    assert driver.publish(request).entries[0].tokens_after == 4
    driver.decode(request, 501)
    assert driver.publish(request).entries[0].tokens_after == 8


def test_sealed_counts_blocks_whose_last_row_was_written(driver: Any) -> None:
    one, two = driver.admit(driver.tokens(1, 10)).request, driver.admit(driver.tokens(50, 3)).request
    driver.dispatch((one, 9), (two, 3))
    assert driver.complete().sealed == (2, 0)


def test_batch_of_ragged_rows_matches_single_rows(make_driver: Any) -> None:
    together, apart = make_driver(num_blocks=32), make_driver(num_blocks=32)
    prompts = [together.tokens(100 * n, 3 + 2 * n) for n in range(1, 6)]
    handles = [together.admit(prompt).request for prompt in prompts]
    together.dispatch(*[(handle, len(prompt)) for handle, prompt in zip(handles, prompts, strict=True)])
    together.complete(sampled=tuple((row, 9) for row in range(5)))
    for prompt in prompts:
        apart.admit(prompt)
    for handle in handles:
        apart.prefill(handle, sample=9)
    assert together.ledger.committed_digest == apart.ledger.committed_digest
    for handle in handles:
        together.check_reads(handle)


def test_step_rules(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 10)).request
    driver.refused(Dispatch(1, (RowSpan(request, 1, 2),), ()), AppendOutOfOrder, expected_position=0)
    driver.refused(Dispatch(1, (RowSpan(request, 0, 0),), ()), MalformedCommand, field="count")
    driver.refused(Dispatch(1, (), ()), MalformedCommand, field="rows")
    driver.refused(Dispatch(1, (RowSpan(request, 0, 11),), ()), OutsideRequestContext, end=11)
    twice = (RowSpan(request, 0, 2), RowSpan(request, 0, 2))
    driver.refused(Dispatch(1, twice, ()), RequestInFlight, slot=request.slot)
    driver.refused(Dispatch(-1, twice[:1], ()), StepOutOfOrder)
    driver.dispatch((request, 4))
    driver.refused(Dispatch(1, (RowSpan(request, 0, 2),), ()), StepOutOfOrder, last_step=1)
    driver.refused(Dispatch(2, (RowSpan(request, 0, 2),), ()), RequestInFlight)
    driver.refused(Complete(2), StepOutOfOrder)
    driver.refused(Complete(1, ((0, 7),)), AppendOutOfOrder)
    driver.refused(Complete(1, ((1, 7),)), MalformedCommand)
    driver.refused(Complete(1, (), (0, 0)), MalformedCommand)
    driver.complete()
    driver.refused(Complete(1), StepOutOfOrder)
    driver.dispatch((request, 6))
    driver.refused(Complete(2, ((0, -7),)), MalformedCommand)
    driver.refused(Complete(2, ((0, 7),), (0,)), MalformedCommand)
    driver.complete(sampled=((0, 7),))


def test_numbers_beyond_a_column_are_refused_by_name(driver: Any) -> None:
    request = driver.admit([1, 2]).request
    for span in (RowSpan(RequestHandle(2**70, 1), 0, 1), RowSpan(request, 2**63, 1)):
        driver.refused(Dispatch(1, (span,), ()), MalformedCommand, field="rows")
    driver.refused(Dispatch(1, (RowSpan(request, 0, 2**62),), ()), MalformedCommand, field="count")
    driver.refused(Dispatch(2**63, (RowSpan(request, 0, 1),), ()), MalformedCommand, field="step")
    driver.refused(driver.admit_command([1], generation=2**63), MalformedCommand, field="generation")
    driver.refused(driver.admit_command([1], generation=-1), MalformedCommand, field="generation")
    driver.refused(driver.admit_command([1], ""), MalformedCommand, field="namespace")


def test_steps_of_different_requests_complete_in_any_order(driver: Any) -> None:
    one, two = driver.admit(driver.tokens(1, 5)).request, driver.admit(driver.tokens(50, 5)).request
    first, second = driver.dispatch((one, 5)), driver.dispatch((two, 5))
    driver.complete(second, sampled=((0, 8),))
    assert driver.ledger.in_flight.tolist()[:2] == [True, False]
    driver.complete(first, sampled=((0, 9),))
    assert [driver.ledger.request(handle).num_tokens for handle in (one, two)] == [6, 6]


def test_discarded_rows_never_become_valid(driver: Any) -> None:
    one, two = driver.admit(driver.tokens(1, 9)).request, driver.admit(driver.tokens(50, 9)).request
    driver.dispatch((one, 9), (two, 9))
    assert driver.complete(discarded=(0,)).sealed == (0, 2)
    assert driver.ledger.request(one).valid_rows == 0 and not driver.ledger.request(one).in_flight
    assert driver.publish(one).entries[0].tokens_after == 0
    driver.prefill(one)
    driver.check_reads(one)


def test_release_keeps_indexed_blocks_and_frees_the_rest(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 10)).request
    driver.prefill(request)
    driver.publish(request)
    receipt = driver.release(request)
    assert (receipt.deferred, receipt.freed_blocks, receipt.evictable_blocks) == (False, 1, 2)
    driver.check_quiet()


def test_second_release_changes_nothing_and_says_so(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 10)).request
    driver.release(request)
    driver.refused(Release(request, "cancel"), DoubleRelease)
    other = driver.admit(driver.tokens(50, 3)).request
    assert other.slot == request.slot and other.generation > request.generation
    driver.refused(Release(request, "cancel"), StaleRequestGeneration)
    for handle in (RequestHandle(-1, 1), RequestHandle(99, 1), RequestHandle(3, 0)):
        driver.refused(Release(handle, "cancel"), StaleRequestGeneration)


def test_release_in_flight_takes_effect_at_completion(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 10)).request
    driver.dispatch((request, 10))
    receipt = driver.release(request, "cancel")
    assert receipt.deferred and receipt.freed_blocks == 0
    assert driver.ledger.gauge().reserved == 3
    driver.refused(Release(request, "finish"), DoubleRelease)
    done = driver.complete()
    assert [(facts.request, facts.reason, facts.freed_blocks) for facts in done.released] == [
        (request, "cancel", 3)
    ]
    driver.check_quiet()
    with pytest.raises(StaleRequestGeneration):
        driver.ledger.request(request)


def test_block_handles_are_fenced_once_the_block_was_given_back(driver: Any) -> None:
    receipt = driver.admit(driver.tokens(1, 8))
    assert [driver.ledger.block(handle) for handle in receipt.new_blocks] == [0, 1]
    driver.release(receipt.request)
    for handle in receipt.new_blocks:
        with pytest.raises(StaleBlockGeneration):
            driver.ledger.block(handle)
    again = driver.admit(driver.tokens(1, 8))
    assert {handle.block for handle in again.new_blocks} == {0, 1}
    assert all(handle.generation == 1 for handle in again.new_blocks)
    assert driver.ledger.block_handles(again.request) == again.new_blocks


def test_abort_restores_the_committed_digest_and_fences_its_handles(driver: Any) -> None:
    driver.serve(driver.tokens(1, 12))
    committed, machine, _ = driver.trace()
    receipt = driver.admit(driver.tokens(1, 8) + driver.tokens(70, 9))
    undone = driver.abort()
    assert (undone.freed_blocks, undone.evictable_blocks) == (3, 2)
    assert driver.ledger.committed_digest == committed and driver.ledger.machine_digest != machine
    with pytest.raises(StaleBlockGeneration):
        driver.ledger.block(receipt.new_blocks[0])
    driver.refused(Dispatch(9, (RowSpan(receipt.request, 8, 1),), ()), StaleRequestGeneration)
    driver.refused(Abort(undone.transaction), UnknownTransaction)
    again = driver.admit(driver.tokens(1, 8) + driver.tokens(70, 9))
    assert not set(again.new_blocks) & set(receipt.new_blocks) and again.request != receipt.request


def test_dispatched_admission_cannot_be_rolled_back(driver: Any) -> None:
    request = driver.admit(driver.tokens(1, 5)).request
    driver.dispatch((request, 5))
    driver.refused(Abort(driver.transaction), RollbackAfterPublication, slot=request.slot)
    driver.complete(discarded=(0,))
    driver.refused(Abort(driver.transaction), RollbackAfterPublication)


def test_admission_evicts_what_it_names_and_never_its_own_path(driver: Any) -> None:
    driver.serve(driver.tokens(1, 32))
    driver.serve(driver.tokens(500, 32))
    assert driver.ledger.gauge().free == 0
    one, two = sorted(driver.ledger.evictable_leaves(), key=lambda leaf: leaf.handle.node)
    prompt = driver.tokens(1, 16) + driver.tokens(900, 8)
    refusal = driver.refused(driver.admit_command(prompt), OutOfMemory)
    assert (refusal.needed_blocks, refusal.free_blocks, refusal.named_blocks) == (2, 0, 0)
    driver.refused(driver.admit_command(prompt, evict=(one.handle,)), EvictLiveBlock, node=one.handle.node)
    receipt = driver.admit(prompt, evict=(two.handle,))
    assert (receipt.evicted.nodes, receipt.evicted.freed_blocks, receipt.match.runtime) == (1, 8, 16)
    driver.prefill(receipt.request)
    driver.check_reads(receipt.request)


def test_dispatch_names_evictions_for_growth(driver: Any) -> None:
    driver.serve(driver.tokens(1, 32))
    request = driver.admit(driver.tokens(500, 32)).request
    driver.prefill(request, sample=9)
    leaf = driver.ledger.evictable_leaves()[0].handle
    span = (RowSpan(request, 32, 1),)
    driver.refused(Dispatch(50, span, ()), OutOfMemory, needed_blocks=1, free_blocks=0, named_blocks=0)
    receipt = driver.apply(Dispatch(50, span, (leaf,)))
    assert receipt.evicted.freed_blocks == 8 and len(receipt.new_blocks) == 1


def test_log_positions_are_exact(driver: Any) -> None:
    index = driver.ledger.log_index
    command = driver.admit_command([1, 2, 3])
    for wrong, refusal in ((index + 1, LogGap), (index - 1, LogRepetition)):
        before = driver.trace()
        with pytest.raises(refusal):
            driver.ledger.apply_at(wrong, command)
        assert driver.trace() == before
    receipt = driver.ledger.apply_at(index, command)
    assert receipt.log_index == index and driver.ledger.log_index == index + 1


def test_receipts_chain_their_digests(driver: Any) -> None:
    before = driver.ledger.committed_digest
    receipt = driver.admit([1, 2, 3])
    assert receipt.committed_before == before
    assert receipt.committed_after == driver.ledger.committed_digest
    assert receipt.machine_after == driver.ledger.machine_digest and len(before) == 16


def test_views_cannot_be_written(driver: Any) -> None:
    driver.serve(driver.tokens(1, 8))
    views = (driver.ledger.tables, driver.ledger.valid_rows, driver.ledger.evictable_leaves()[0].blocks)
    for view in views:
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 1


@pytest.mark.parametrize(
    "command",
    [
        Genesis(b"w", (GroupSpec("full", 16, 8),), 4, 64, "pool"),
        Admit(1, Scope("a", 1, b"w"), b"\1\0\0\0"),
        Dispatch(3, (RowSpan(RequestHandle(1, 2), 0, 5),), (NodeHandle(1, 0),)),
        Complete(3, ((0, 5),), (1,)),
        Publish((RequestHandle(1, 2),)),
        Release(RequestHandle(1, 2), "finish"),
        Evict((NodeHandle(1, 1),)),
        Abort(4),
    ],
    ids=lambda command: type(command).__name__,
)
def test_commands_survive_the_wire(command: Any) -> None:
    assert decode_command(encode_command(command)) == command


def test_a_log_replayed_from_bytes_gives_equal_receipts(make_driver: Any) -> None:
    driver = make_driver()
    log: list[bytes] = []
    receipts: list[Any] = []
    apply = driver.ledger.apply

    def recording(command: Any) -> Any:
        receipt = apply(command)
        log.append(encode_command(command))
        receipts.append(receipt)
        return receipt

    driver.ledger.apply = recording
    driver.serve(driver.tokens(1, 12))
    request = driver.admit(driver.tokens(1, 20)).request
    driver.prefill(request, chunk=3, sample=7)
    driver.advance("a", 2)
    driver.release(request, "revoke")
    twin = Ledger()
    twin.apply(Genesis(b"w" * 32, (GroupSpec("full", 4, 16),), 8, 128, "pool-1"))
    assert [twin.apply(decode_command(record)) for record in log] == receipts
    audit(twin)
