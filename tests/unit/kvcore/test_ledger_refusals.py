"""Every reason a ledger can refuse for is raised through its API here, and leaves no trace.

A new subclass of LedgerRefusal without a case makes `test_every_reason_has_a_case` fail.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from copyhold.kvcore import errors
from copyhold.kvcore.commands import (
    Abort,
    AdvanceGeneration,
    BlockHandle,
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
    RequestHandle,
    Reset,
    RowSpan,
    Truncate,
)
from copyhold.kvcore.errors import LedgerRefusal
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.log import LogHeader, Recorder, read_log

Case = Callable[[Any], Callable[[], object]]
CASES: dict[str, Case] = {}

FULL = GroupSpec("full", 4, 16)


def case(reason: str) -> Callable[[Case], Case]:
    def register(build: Case) -> Case:
        assert reason not in CASES, reason
        CASES[reason] = build
        return build

    return register


def _applying(driver: Any, command: Any) -> Callable[[], object]:
    return lambda: driver.ledger.apply(command)


def _running(driver: Any, tokens: int = 5) -> RequestHandle:
    return driver.admit(driver.tokens(1, tokens)).request


@case("log_gap")
def _log_gap(driver: Any) -> Callable[[], object]:
    return lambda: driver.ledger.apply_at(driver.ledger.log_index + 1, AdvanceGeneration("a", 1))


@case("log_repetition")
def _log_repetition(driver: Any) -> Callable[[], object]:
    return lambda: driver.ledger.apply_at(0, AdvanceGeneration("a", 1))


@case("log_without_genesis")
def _log_without_genesis(driver: Any) -> Callable[[], object]:
    driver.ledger = Ledger()
    return _applying(driver, AdvanceGeneration("a", 1))


def _recorded(damage: Callable[[bytes], bytes] = bytes) -> Path:
    """A log of two records whose bytes were damaged."""
    ledger, log = Ledger(), _folder() / "ledger.log"
    recorder = Recorder(log)
    for command in (Genesis(b"w", (FULL,), 4, 64, "pool"), AdvanceGeneration("a", 1)):
        recorder.record(command, ledger.apply(command))
    recorder.close()
    log.write_bytes(damage(log.read_bytes()))
    return log


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="ledger-log-"))


@case("log_corrupt")
def _log_corrupt(driver: Any) -> Callable[[], object]:
    log = _recorded(lambda content: content[:-20] + b"X" + content[-19:])
    return lambda: list(read_log(log))


@case("log_truncated")
def _log_truncated(driver: Any) -> Callable[[], object]:
    log = _recorded(lambda content: content[:-1])
    return lambda: list(read_log(log))


@case("log_world_mismatch")
def _log_world_mismatch(driver: Any) -> Callable[[], object]:
    log = _recorded()
    return lambda: list(read_log(log, LogHeader(b"v", "pool")))


@case("log_incarnation_mismatch")
def _log_incarnation_mismatch(driver: Any) -> Callable[[], object]:
    log = _recorded()
    return lambda: list(read_log(log, LogHeader(b"w", "pool-2")))


@case("log_full")
def _log_full(driver: Any) -> Callable[[], object]:
    ledger, genesis = Ledger(), Genesis(b"w", (FULL,), 4, 64, "pool")
    receipt = ledger.apply(genesis)
    recorder = Recorder(_folder() / "ledger.log", limit_bytes=64)
    return lambda: recorder.record(genesis, receipt)


@case("ledger_broken")
def _ledger_broken(driver: Any) -> Callable[[], object]:
    driver.ledger.state.scopes.raise_floor = None
    with pytest.raises(TypeError):
        driver.ledger.apply(AdvanceGeneration("a", 1))
    return _applying(driver, driver.admit_command([1]))


@case("ledger_busy")
def _ledger_busy(driver: Any) -> Callable[[], object]:
    command = driver.admit_command([1])

    def meanwhile() -> object:
        with driver.ledger.at_rest():
            return driver.ledger.apply(command)

    return meanwhile


@case("genesis_repeated")
def _genesis_repeated(driver: Any) -> Callable[[], object]:
    return _applying(driver, Genesis(b"w", (FULL,), 4, 64, "again"))


@case("unsupported_cache_groups")
def _unsupported_cache_groups(driver: Any) -> Callable[[], object]:
    driver.ledger = Ledger()
    return _applying(driver, Genesis(b"w", (), 4, 64, "pool"))


@case("tails_need_one_full_group")
def _tails_need_one_full_group(driver: Any) -> Callable[[], object]:
    _sliding(driver, (FULL, GroupSpec("coarse", 8, 8)))
    return _applying(driver, PublishTail(driver.admit([1]).request, 1))


def _sliding(driver: Any, groups: tuple[GroupSpec, ...], requests: int = 4) -> None:
    driver.ledger = Ledger()
    driver.ledger.apply(Genesis(b"w" * 32, groups, requests, 64, "pool-1"))


@case("window_state_missing")
def _window_state_missing(driver: Any) -> Callable[[], object]:
    _sliding(driver, (FULL, GroupSpec("sliding", 4, 16, 4)))
    request = driver.ledger.apply(driver.admit_command(driver.tokens(1, 16))).request
    for step in range(4):
        driver.ledger.apply(Dispatch(step, (RowSpan(request, 4 * step, 4),)))
        driver.ledger.apply(Complete(step))
    return _applying(driver, Truncate(request, 9))


@case("edge_partially_evicted")
def _edge_partially_evicted(driver: Any) -> Callable[[], object]:
    driver.serve(driver.tokens(1, 9))
    block = int(driver.ledger.evictable_leaves()[0].blocks[0])
    generation = int(driver.ledger.state.pool.generation.array[block])
    return _applying(driver, Evict((), (BlockHandle("pool-1", 0, block, generation),)))


@case("index_full")
def _index_full(driver: Any) -> Callable[[], object]:
    """One request, one block: six edges are all that the index keeps, of which five lost their block."""
    _sliding(driver, (GroupSpec("sliding", 4, 1, 4),), 1)
    for first in range(10, 100, 10):
        request = driver.ledger.apply(driver.admit_command(driver.tokens(first, 4))).request
        driver.ledger.apply(Dispatch(first, (RowSpan(request, 0, 4),)))
        driver.ledger.apply(Complete(first))
        if driver.ledger.state.tree.free.count < 2:
            break
        driver.ledger.apply(Publish((request,)))
        driver.ledger.apply(Release(request, "finish"))
        (line,) = driver.ledger.evictable_window_blocks()
        driver.ledger.apply(Evict((), line.handles(0, 1)))
    return _applying(driver, Publish((request,)))


@case("malformed_command")
def _malformed_command(driver: Any) -> Callable[[], object]:
    driver.ledger = Ledger()
    return _applying(driver, Genesis(b"w", (GroupSpec("full", 0, 16),), 4, 64, "pool"))


@case("empty_prompt")
def _empty_prompt(driver: Any) -> Callable[[], object]:
    return _applying(driver, driver.admit_command([]))


@case("token_out_of_range")
def _token_out_of_range(driver: Any) -> Callable[[], object]:
    return _applying(driver, driver.admit_command([5, -1]))


@case("full_sequence_does_not_fit")
def _full_sequence_does_not_fit(driver: Any) -> Callable[[], object]:
    return _applying(driver, driver.admit_command([1] * 65))


@case("stale_namespace_generation")
def _stale_namespace_generation(driver: Any) -> Callable[[], object]:
    driver.advance("a", 2)
    return _applying(driver, driver.admit_command([1]))


@case("namespace_generation_mismatch")
def _namespace_generation_mismatch(driver: Any) -> Callable[[], object]:
    driver.advance("a", 2)
    return _applying(driver, AdvanceGeneration("a", 2))


@case("duplicate_transaction_id")
def _duplicate_transaction_id(driver: Any) -> Callable[[], object]:
    command = driver.admit_command([1])
    driver.apply(command)
    return _applying(driver, command)


@case("unknown_transaction")
def _unknown_transaction(driver: Any) -> Callable[[], object]:
    return _applying(driver, Abort(0))


@case("rollback_after_publication")
def _rollback_after_publication(driver: Any) -> Callable[[], object]:
    driver.prefill(_running(driver))
    return _applying(driver, Abort(driver.transaction))


@case("slots_exhausted")
def _slots_exhausted(driver: Any) -> Callable[[], object]:
    for token in range(8):
        driver.admit([token])
    return _applying(driver, driver.admit_command([9]))


@case("out_of_memory")
def _out_of_memory(driver: Any) -> Callable[[], object]:
    driver.admit(driver.tokens(1, 60))
    return _applying(driver, driver.admit_command([1] * 5))


@case("stale_tree_version")
def _stale_tree_version(driver: Any) -> Callable[[], object]:
    return _applying(driver, Evict((NodeHandle(3, 0),)))


@case("root_evicted")
def _root_evicted(driver: Any) -> Callable[[], object]:
    return _applying(driver, Evict((NodeHandle(0, 0),)))


@case("internal_node_evicted")
def _internal_node_evicted(driver: Any) -> Callable[[], object]:
    driver.serve(driver.tokens(1, 4))
    driver.serve(driver.tokens(1, 8))
    return _applying(driver, Evict((driver.ledger.evictable_leaves()[0].parent,)))


@case("locked_leaf_evicted")
def _locked_leaf_evicted(driver: Any) -> Callable[[], object]:
    driver.serve(driver.tokens(1, 4))
    leaf = driver.ledger.evictable_leaves()[0].handle
    _running(driver)
    return _applying(driver, Evict((leaf,)))


@case("evict_live_block")
def _evict_live_block(driver: Any) -> Callable[[], object]:
    driver.serve(driver.tokens(1, 4))
    leaf = driver.ledger.evictable_leaves()[0].handle
    return _applying(driver, driver.admit_command(driver.tokens(1, 5), evict=(leaf,)))


@case("stale_request_generation")
def _stale_request_generation(driver: Any) -> Callable[[], object]:
    return _applying(driver, Publish((RequestHandle(0, 1),)))


@case("double_release")
def _double_release(driver: Any) -> Callable[[], object]:
    request = _running(driver)
    driver.release(request)
    return _applying(driver, Release(request, "finish"))


@case("release_reason_missing")
def _release_reason_missing(driver: Any) -> Callable[[], object]:
    return _applying(driver, Release(_running(driver), ""))


@case("fork_of_unpublished_state")
def _fork_of_unpublished_state(driver: Any) -> Callable[[], object]:
    request = _running(driver)
    driver.dispatch((request, 1))
    return _applying(driver, Fork(request, 1))


@case("truncate_beyond_length")
def _truncate_beyond_length(driver: Any) -> Callable[[], object]:
    return _applying(driver, Truncate(_running(driver), 6))


@case("reset_with_live_references")
def _reset_with_live_references(driver: Any) -> Callable[[], object]:
    driver.serve(driver.tokens(1, 4))
    _running(driver)
    return _applying(driver, Reset(driver.scope()))


@case("step_out_of_order")
def _step_out_of_order(driver: Any) -> Callable[[], object]:
    return _applying(driver, Complete(4))


@case("request_in_flight")
def _request_in_flight(driver: Any) -> Callable[[], object]:
    request = _running(driver)
    driver.dispatch((request, 1))
    return _applying(driver, Dispatch(5, (RowSpan(request, 0, 1),)))


@case("append_out_of_order")
def _append_out_of_order(driver: Any) -> Callable[[], object]:
    return _applying(driver, Dispatch(5, (RowSpan(_running(driver), 1, 1),)))


@case("outside_request_context")
def _outside_request_context(driver: Any) -> Callable[[], object]:
    return _applying(driver, Dispatch(5, (RowSpan(_running(driver), 0, 6),)))


@case("append_past_capacity")
def _append_past_capacity(driver: Any) -> Callable[[], object]:
    request = driver.admit(driver.tokens(1, 64)).request
    driver.prefill(request, sample=9)
    return _applying(driver, Dispatch(5, (RowSpan(request, 64, 1),)))


def _handle(driver: Any, **changes: Any) -> Callable[[], object]:
    good = driver.admit([1]).new_blocks[0]
    fields = {"pool": good.pool, "group": good.group, "block": good.block, "generation": good.generation}
    assert driver.ledger.block(good) == good.block
    return lambda: driver.ledger.block(BlockHandle(**{**fields, **changes}))


@case("stale_pool_generation")
def _stale_pool_generation(driver: Any) -> Callable[[], object]:
    return _handle(driver, pool="pool-0")


@case("cache_group_mismatch")
def _cache_group_mismatch(driver: Any) -> Callable[[], object]:
    return _handle(driver, group=1)


@case("unknown_physical_block")
def _unknown_physical_block(driver: Any) -> Callable[[], object]:
    return _handle(driver, block=16)


@case("stale_block_generation")
def _stale_block_generation(driver: Any) -> Callable[[], object]:
    return _handle(driver, generation=7)


def _reasons() -> dict[str, type[LedgerRefusal]]:
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    kinds = [kind for kind in found if issubclass(kind, LedgerRefusal) and kind is not LedgerRefusal]
    return {kind.reason: kind for kind in kinds}


REASONS = _reasons()


def test_every_reason_has_a_case_and_a_class_of_its_own() -> None:
    assert set(CASES) == set(REASONS)
    assert len(REASONS) == len(LedgerRefusal.__subclasses__())


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_refusal_is_raised_by_the_api_and_leaves_no_trace(make_driver: Any, reason: str) -> None:
    driver = make_driver(block_size=4, num_blocks=16, max_requests=8, max_model_len=64)
    attempt = CASES[reason](driver)
    before = driver.trace()
    with pytest.raises(REASONS[reason]) as caught:
        attempt()
    assert driver.trace() == before
    assert type(caught.value) is REASONS[reason] and str(caught.value).startswith(f"{reason}: ")
    twin = pickle.loads(pickle.dumps(caught.value))
    assert type(twin) is type(caught.value) and str(twin) == str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_requests": 0}, "max_requests"),
        ({"max_model_len": -1}, "max_model_len"),
        ({"groups": (GroupSpec("full", 4, 0),)}, "num_blocks"),
        ({"incarnation": ""}, "incarnation"),
    ],
)
def test_senseless_genesis_is_refused_and_a_good_one_still_begins(
    changes: dict[str, Any], field: str
) -> None:
    good = {"world": b"w", "groups": (FULL,), "max_requests": 4, "max_model_len": 64, "incarnation": "pool"}
    ledger = Ledger()
    with pytest.raises(errors.MalformedCommand) as caught:
        ledger.apply(Genesis(**{**good, **changes}))
    assert caught.value.field == field and ledger.log_index == 0
    assert ledger.apply(Genesis(**good)).total_blocks == 16


def test_odd_number_of_token_bytes_is_refused(driver: Any) -> None:
    command = driver.admit_command([1, 2])
    broken = type(command)(command.transaction, command.scope, command.tokens[:-1], True, ())
    driver.refused(broken, errors.MalformedCommand, field="tokens")
