"""Cases from the field, their ledger part: B01, B09, B11, B13, B15, B18, B22, B24, B26."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
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
    Release,
    RowSpan,
    Scope,
)
from copyhold.kvcore.errors import (
    DoubleRelease,
    FullSequenceDoesNotFit,
    LedgerBusy,
    LockedLeafEvicted,
    OutOfMemory,
    RequestInFlight,
    StaleBlockGeneration,
    StaleRequestGeneration,
    TokenOutOfRange,
)
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.model_faults import WriteSites, interrupted
from copyhold.kvcore.tree import PrefixTree


def test_b09_an_allocation_that_fails_leaves_no_trace(make_driver: Any) -> None:
    driver = make_driver(block_size=4, num_blocks=10)
    one = driver.admit(driver.tokens(1, 28)).request
    driver.prefill(one, sample=29)
    large = driver.admit_command(driver.tokens(100, 20))
    for _ in range(1000):
        before = driver.trace()
        with pytest.raises(OutOfMemory) as caught:
            driver.ledger.apply(large)
        assert driver.trace() == before and (caught.value.needed_blocks, caught.value.free_blocks) == (5, 3)
    assert driver.ledger.gauge().free == 3 and driver.ledger.paths("a") == []
    three = driver.admit(driver.tokens(200, 12)).request
    append = Dispatch(900, (RowSpan(one, 28, 1),), ())
    driver.refused(append, OutOfMemory, needed_blocks=1, free_blocks=0)
    assert driver.ledger.request(one).num_blocks == 7
    driver.check_reads(one)
    driver.release(three)
    driver.apply(append)
    driver.write(append.rows[0])
    driver.apply(Complete(900, (), ()))
    assert driver.ledger.request(one).num_blocks == 8
    driver.check_reads(one)
    driver.release(one)
    driver.check_quiet()


def test_b11_released_blocks_are_fenced_and_counted_once(make_driver: Any) -> None:
    driver = make_driver(block_size=4, num_blocks=6, max_requests=8)
    receipt = driver.admit(driver.tokens(1, 5))
    request, handles = receipt.request, list(receipt.new_blocks)
    driver.prefill(request, sample=1)
    for token in range(2, 16):
        driver.decode(request, token)
    handles += driver.ledger.block_handles(request)
    free = driver.ledger.gauge().free
    distinct = {handle.block for handle in driver.ledger.block_handles(request)}
    assert driver.release(request).freed_blocks == len(distinct)
    assert driver.ledger.gauge().free == free + len(distinct) == 6
    driver.refused(Release(request, "finish"), DoubleRelease)
    for handle in (handles[-1], handles[0], handles[-1]):
        with pytest.raises(StaleBlockGeneration):
            driver.ledger.block(handle)
    blocks = [driver.admit([n]).new_blocks[0].block for n in range(6)]
    assert len(set(blocks)) == 6
    driver.refused(driver.admit_command([7]), OutOfMemory, needed_blocks=1, free_blocks=0)


@pytest.mark.parametrize("turns", [Lock(), None], ids=["waiting", "refused"])
def test_b11_of_two_threads_exactly_one_releases(make_driver: Any, turns: Any) -> None:
    """With the owner's lock the other waits and is told that the request was released; without one it may be told to wait."""
    driver = make_driver(num_blocks=6, turns=turns)
    refusals = (
        (DoubleRelease, StaleRequestGeneration)
        if turns
        else (DoubleRelease, StaleRequestGeneration, LedgerBusy)
    )

    def release(request: Any) -> bool:
        try:
            driver.ledger.apply(Release(request, "cancel"))
        except refusals:
            return False
        return True

    with ThreadPoolExecutor(2) as threads:
        for _ in range(1000):
            request = driver.ledger.apply(driver.admit_command([1, 2, 3, 4, 5])).request
            assert sorted(threads.map(release, (request, request))) == [False, True]
    audit(driver.ledger)
    assert driver.ledger.gauge().free == 6


def test_b13_duplicates_stay_with_their_request_until_it_ends(make_driver: Any) -> None:
    driver = make_driver(block_size=4, num_blocks=24, max_requests=4)
    alone = make_driver(block_size=4, num_blocks=24, max_requests=4)
    one, two = (driver.admit(driver.tokens(1, 17)).request for _ in range(2))
    reference = alone.admit(alone.tokens(1, 17)).request
    alone.prefill(reference, sample=500)
    driver.dispatch((one, 17), (two, 17))
    driver.complete(sampled=((0, 500), (1, 500)))
    driver.publish(one)
    assert driver.publish(two).entries[0].duplicate_blocks == 4
    third = driver.admit(driver.tokens(900, 33)).request
    held = set(driver.ledger.tables[two.slot, : driver.ledger.num_blocks[two.slot]].tolist())
    assert not held & set(driver.ledger.tables[third.slot, :9].tolist())
    driver.prefill(third, chunk=8)
    for token in range(501, 513):
        driver.decode(two, token)
        alone.decode(reference, token)
        driver.check_reads(two)
        driver.check_reads(third)
    assert driver.ledger.request_tokens(two).tolist() == alone.ledger.request_tokens(reference).tolist()
    for request in (one, two, third):
        driver.release(request)
    driver.check_quiet()
    assert driver.ledger.gauge().evictable == 4


@pytest.mark.parametrize(
    "variant", ["main", "before_any_write", "preempt", "failed_write", "after_last_write"]
)
def test_b15_nothing_is_visible_before_it_is_written(make_driver: Any, variant: str) -> None:
    driver = make_driver(block_size=8, num_blocks=16)
    one = driver.admit(driver.tokens(1, 33)).request
    acknowledged = 0
    if variant in ("main", "preempt", "failed_write"):
        driver.dispatch((one, 16))
        driver.complete()
        acknowledged = 16
    driver.dispatch((one, 33 - acknowledged))
    # Reserved and dispatched rows are published as far as they are acknowledged, and no further.
    assert driver.publish(one).entries[0].tokens_after == acknowledged
    content = np.array(driver.tokens(1, 33), dtype="<i4").tobytes()
    assert driver.ledger.probe(driver.scope(), content).match.runtime == acknowledged
    driver.release(one, "preempt" if variant == "preempt" else "cancel")
    if variant == "after_last_write":
        driver.complete()
    else:
        driver.apply(Complete(driver.step, (), (0,)))
    two = driver.admit(driver.tokens(1, 33))
    assert two.match.runtime == acknowledged
    driver.check_reads(two.request)
    driver.prefill(two.request)
    driver.check_reads(two.request)
    driver.release(two.request)
    driver.check_quiet()


def test_b15_of_two_steps_in_flight_only_the_completed_one_is_visible(make_driver: Any) -> None:
    driver = make_driver(block_size=8, num_blocks=16)
    one, two = (driver.admit(driver.tokens(1, 33)).request for _ in range(2))
    first, second = driver.dispatch((one, 16)), driver.dispatch((two, 16))
    driver.refused(Dispatch(second + 1, (RowSpan(two, 16, 1),)), RequestInFlight, slot=two.slot)
    content = np.array(driver.tokens(1, 33), dtype="<i4").tobytes()
    for request in (one, two):
        assert driver.publish(request).entries[0].tokens_after == 0
    driver.release(one, "cancel")
    assert driver.ledger.probe(driver.scope(), content).match.runtime == 0
    driver.complete(second)
    assert driver.ledger.probe(driver.scope(), content).match.runtime == 0
    driver.publish(two)
    third = driver.admit(driver.tokens(1, 33))
    assert third.match.runtime == 16
    driver.check_reads(third.request)
    driver.apply(Complete(first, (), (0,)))
    for request in (two, third.request):
        driver.prefill(request)
        driver.check_reads(request)
        driver.release(request)
    driver.check_quiet()


def test_b18_the_last_token_is_always_computed(make_driver: Any) -> None:
    driver = make_driver(block_size=8, num_blocks=32)
    lengths = (1, 7, 8, 9, 15, 16, 17, 24)
    second, third = [], []
    for length in lengths:
        namespace = f"tenant-{length}"
        driver.serve(driver.tokens(1, length), namespace)
        second.append(driver.serve(driver.tokens(1, length), namespace).match.runtime)
        longer = [*driver.tokens(1, length), *driver.tokens(900, 9)]
        third.append(driver.serve(longer, namespace).match.runtime)
        driver.evict_up_to(32)
    assert second == [0, 0, 0, 8, 8, 8, 16, 16]
    assert third == [0, 0, 8, 8, 8, 16, 16, 24]


def test_b22_chunks_and_one_shot_give_one_index(make_driver: Any) -> None:
    prompt = list(range(1, 101))
    whole = make_driver(block_size=16, num_blocks=32)
    whole.serve(prompt)
    chunked = make_driver(block_size=16, num_blocks=32)
    one = chunked.admit(prompt).request
    ends, twin = [], None
    for start, end in ((0, 24), (24, 48), (48, 72), (72, 96), (96, 100)):
        chunked.dispatch((one, end - start))
        content = np.array(prompt, dtype="<i4").tobytes()
        visible = chunked.ledger.probe(chunked.scope(), content).match.runtime
        assert visible == start // 16 * 16
        chunked.complete()
        chunked.publish(one)
        ends.append(chunked.ledger.request(one).valid_rows)
        if end == 48:
            twin = chunked.admit(prompt)
            assert twin.match.runtime == 48
    assert ends == [24, 48, 72, 96, 100] and twin is not None
    chunked.prefill(twin.request, chunk=24)
    chunked.publish(twin.request)
    chunked.check_reads(twin.request)
    for request in (one, twin.request):
        chunked.release(request)
    dumps = [driver.ledger.paths("a") for driver in (whole, chunked)]
    assert [tokens.tolist() for _, tokens, _ in dumps[0]] == [tokens.tolist() for _, tokens, _ in dumps[1]]
    assert [len(blocks) for _, _, blocks in dumps[1]] == [6]
    last = chunked.admit([*prompt, *range(500, 504)])
    assert last.match.runtime == 96
    chunked.check_reads(last.request)


def test_b22_cancel_after_the_third_chunk_leaves_the_twin_whole(make_driver: Any) -> None:
    driver = make_driver(block_size=16, num_blocks=32)
    prompt = list(range(1, 101))
    one = driver.admit(prompt).request
    for _ in range(2):
        driver.dispatch((one, 24))
        driver.complete()
        driver.publish(one)
    twin = driver.admit(prompt)
    assert twin.match.runtime == 48
    driver.dispatch((one, 24))
    driver.complete()
    driver.publish(one)
    driver.release(one, "cancel")
    driver.prefill(twin.request, chunk=24)
    driver.check_reads(twin.request)
    driver.publish(twin.request)
    driver.release(twin.request)
    driver.check_quiet()
    assert driver.admit([*prompt, *range(500, 504)]).match.runtime == 96


def test_b24_a_lease_protects_the_matched_edge_itself(make_driver: Any) -> None:
    driver = make_driver(block_size=4, num_blocks=12)
    driver.serve(driver.tokens(1, 8))
    driver.serve(driver.tokens(1, 12))
    path = driver.ledger.probe(driver.scope(), np.arange(1, 14, dtype="<i4").tobytes()).path
    assert [len(driver.ledger.node(node).blocks) for node in path] == [2, 1]
    lease = driver.admit(driver.tokens(1, 13)).request
    assert driver.evict_up_to(3) == 0
    driver.release(lease)
    held = driver.admit(driver.tokens(1, 9)).request
    assert driver.evict_up_to(3) == 1
    second = driver.admit(driver.tokens(1, 9)).request
    driver.abort()
    assert driver.evict_up_to(3) == 0
    with pytest.raises(StaleRequestGeneration):
        driver.ledger.request(second)
    branch = driver.admit([*driver.tokens(1, 4), *driver.tokens(50, 4)])
    assert branch.match.runtime == 4
    driver.prefill(branch.request)
    driver.publish(branch.request)
    driver.release(branch.request)
    upper, lower = driver.ledger.probe(driver.scope(), np.arange(1, 10, dtype="<i4").tobytes()).path
    assert [driver.ledger.node(node).leases for node in (upper, lower)] == [1, 1]
    driver.refused(Evict((lower,)), LockedLeafEvicted, leases=1)
    assert driver.evict_up_to(5) == 1
    driver.release(held)
    driver.refused(Release(held, "finish"), DoubleRelease)
    driver.check_quiet()
    assert driver.evict_up_to(12) == 2 and driver.ledger.gauge().free == 12


def test_b26_an_allocation_that_eviction_cannot_help_is_refused_at_once(make_driver: Any) -> None:
    """Case (a): two live sequences hold the pool, nothing can be evicted, and one pass is enough to know it."""
    driver = make_driver(block_size=4, num_blocks=8)
    live = [driver.admit(driver.tokens(100 * n, 16)).request for n in range(2)]
    for number, request in enumerate(live):
        driver.prefill(request, sample=500 + number)
        driver.publish(request)
    append = Dispatch(900, (RowSpan(live[0], 16, 1),))
    for _ in range(20):
        assert driver.evict_up_to(1) == 0
        driver.refused(append, OutOfMemory, needed_blocks=1, free_blocks=0)
    started_s = min(_seconds(driver.ledger, append) for _ in range(5))
    assert started_s < 0.05
    driver.release(live[1])
    assert driver.evict_up_to(1) == 4
    driver.apply(append)
    driver.write(append.rows[0])
    driver.apply(Complete(900, (), ()))
    driver.check_reads(live[0])
    driver.release(live[0])
    driver.check_quiet()


def _seconds(ledger: Ledger, refused: Dispatch) -> float:
    started_s = time.perf_counter()
    with pytest.raises(OutOfMemory):
        ledger.apply(refused)
    return time.perf_counter() - started_s


def test_b01_equal_digests_never_make_a_hit(make_driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prefix fingerprints of 8 bits, every lookup still compares token ids."""
    honest = PrefixTree.prefix_entries

    def narrow(self: PrefixTree, *arguments: Any) -> Any:
        entries, end = honest(self, *arguments)
        return entries & np.uint64(0xFF), end

    monkeypatch.setattr(PrefixTree, "prefix_entries", narrow)
    driver = make_driver(block_size=4, num_blocks=512)
    monkeypatch.setattr(driver, "apply", driver.ledger.apply)  # 2,400 commands, audited once at the end
    prompts = [driver.tokens(1000 + 10 * k, 5) for k in range(300)]
    for prompt in prompts:
        driver.serve(prompt)
    indexed = driver.ledger.state.pool.node.array != 0
    entries = driver.ledger.state.pool.entry.array[indexed].tolist()
    assert len(entries) == 300 and 300 - len(set(entries)) >= 44, (
        "by counting, so many share one with another"
    )
    order = np.random.default_rng(1).permutation(300).tolist()
    for prompt in [prompts[at] for at in order]:
        receipt = driver.admit(prompt)
        assert receipt.match.runtime == 4
        driver.check_reads(receipt.request)
        driver.release(receipt.request)
    driver.check_quiet()
    audit(driver.ledger)


def test_b01_ids_out_of_range_are_refused_before_anything_is_summed(driver: Any) -> None:
    driver.serve([0, 7, 8, 9, 10])
    for first in (-1, -2):
        driver.refused(driver.admit_command([first, 7, 8, 9, 10]), TokenOutOfRange, position=0, token=first)
    wide = np.array([2305843009213693951, 7, 8, 9, 10], dtype="<i8").tobytes()
    command = driver.admit_command([0])
    as_pairs = type(command)(command.transaction, command.scope, wide, True, ())
    driver.refused(as_pairs, TokenOutOfRange, position=0)
    hit = np.array([0, 7, 8, 9, 10], dtype="<i4").tobytes()
    assert driver.ledger.probe(driver.scope(), hit).match.runtime == 4
    assert [tokens.tolist() for _, tokens, _ in driver.ledger.paths("a")] == [[0, 7, 8, 9]]


def test_b09_a_failure_in_the_second_of_two_groups_takes_nothing_in_the_first() -> None:
    ledger = Ledger()
    ledger.apply(Genesis(b"w", (GroupSpec("first", 4, 10), GroupSpec("second", 4, 2)), 4, 64, "pool"))
    before = ledger.machine_digest
    with pytest.raises(FullSequenceDoesNotFit):
        ledger.apply(Admit(1, Scope("a", 1, b"w"), bytes(4 * 12)))
    ledger.apply(Admit(1, Scope("a", 1, b"w"), bytes(4 * 8)))
    with pytest.raises(OutOfMemory):
        ledger.apply(Admit(2, Scope("a", 1, b"w"), bytes(4)))
    assert (ledger.gauge(0).free, ledger.gauge(1).free) == (8, 0)
    ledger.apply(Abort(1))
    audit(ledger)
    assert (ledger.gauge(0).free, ledger.gauge(1).free) == (10, 2) and ledger.machine_digest != before


def test_b09_a_fault_at_the_third_take_of_the_second_group_is_undone_by_replay() -> None:
    """The plan has counted every block, so only a defect can stop a commit there: then the ledger says it is broken."""
    groups, scope = (GroupSpec("first", 4, 10), GroupSpec("second", 2, 20)), Scope("a", 1, b"w")
    log = [Genesis(b"w", groups, 4, 64, "pool"), Admit(1, scope, bytes(4 * 8))]
    taking = Admit(2, scope, bytes(4 * 12))
    ledger = Ledger()
    for command in log:
        ledger.apply(command)
    before, free = (ledger.committed_digest, ledger.machine_digest), (8, 16)
    with WriteSites() as writes:
        second = _second_take(log, taking, writes)
        assert interrupted(ledger, taking, writes, second) == ""
    restored = Ledger()
    for command in log:
        restored.apply(command)
    audit(restored)
    assert (restored.committed_digest, restored.machine_digest) == before
    assert (restored.gauge(0).free, restored.gauge(1).free) == free
    restored.apply(taking)
    assert (restored.gauge(0).free, restored.gauge(1).free) == (5, 10)


def _second_take(log: list[Any], taking: Admit, writes: WriteSites) -> int:
    """Number of the write that gives the second group's blocks, in a ledger of its own."""
    trial = Ledger()
    for command in log:
        trial.apply(command)
    writes.begin()
    trial.apply(taking)
    return [at for at, site in enumerate(writes.calls) if site == "admit_blocks"][1]
