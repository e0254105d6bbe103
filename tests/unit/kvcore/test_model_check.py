"""The bounded check reaches every kind of move and refusal without a violation, and finds planted bugs at once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore import ledger as ledger_module
from copyhold.kvcore import loops
from copyhold.kvcore.commands import Abort, Admit, Complete, Dispatch, Genesis, Publish, Release
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.model_check import (
    DEEP,
    EXPECTED_MOVES,
    EXPECTED_REFUSALS,
    TAILS,
    WINDOW,
    Bounds,
    CheckReport,
    explore,
    explore_all,
)
from copyhold.kvcore.model_faults import PlantedFault, write_sites
from copyhold.kvcore.model_state import Arena, canonical_key
from copyhold.kvcore.requests import RequestTable
from copyhold.kvcore.state import LedgerState

SMALL = Bounds(longest=2, floors=0, prompts=((0, 0),))
MOST_STATES = 500


def test_a_small_space_is_seen_completely_twice_alike() -> None:
    first = explore(SMALL, fault_states=1)
    assert first.complete and not first.violations and first.states > 1500
    assert first == explore(SMALL, fault_states=1)


def test_every_move_and_every_refusal_occurs() -> None:
    deep, wide = explore(DEEP, fault_states=1), explore(Bounds(), 2500, 1)
    window = explore(WINDOW, 1500, 1)
    assert deep.complete and not deep.violations and not wide.violations, wide.text()
    assert not window.violations, window.text()
    tails = explore(TAILS, 300, 1)
    assert not tails.violations, tails.text()
    assert set(deep.moves) | set(wide.moves) | set(tails.moves) == EXPECTED_MOVES
    assert set(deep.refusals) | set(wide.refusals) | set(window.refusals) == EXPECTED_REFUSALS
    assert not wide.document()["ok"], "a search that was cut short proves nothing"


def test_every_write_of_every_sequence_is_interrupted() -> None:
    deep, wide = explore(DEEP, fault_states=4), explore(Bounds(), 1500, 4)
    assert deep.write_paths > 30 and wide.write_paths > 30
    window = explore(WINDOW, 300, 4)
    assert set(deep.faults) | set(wide.faults) | set(window.faults) == set(write_sites())
    figures = deep.document()["faults"]
    assert figures["injected"] == sum(deep.faults.values()) > 500
    both = explore_all((DEEP,))
    assert both.faults.keys() == deep.faults.keys() and both.fault_states > deep.fault_states


def _goes_on(self: Ledger, command: Any) -> Any:
    """Half a command is done, and nobody is told."""
    digests = self._committed, self._machine
    self._broken = ""
    try:
        return _APPLY(self, command)
    except PlantedFault:
        self._broken, (self._committed, self._machine) = "", digests
        raise


def _swallows(self: Ledger, command: Any) -> Any:
    try:
        return _APPLY(self, command)
    except PlantedFault:
        return None


_APPLY = Ledger._apply


@pytest.mark.parametrize(
    ("plant", "finding"), [(_goes_on, "the ledger went on"), (_swallows, "the command was accepted")]
)
def test_a_ledger_that_lives_on_after_half_a_commit_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Any, finding: str
) -> None:
    monkeypatch.setattr(Ledger, "_apply", plant)
    (violation,) = explore(SMALL, MOST_STATES).violations
    assert finding in violation.what, violation
    assert len(violation.trace) == 2


def test_a_snapshot_is_the_whole_state() -> None:
    search = Arena(Genesis(b"w", _groups(), 2, 3, "model"))
    empty, key = search.take(), canonical_key(search.state)
    digests = search.ledger.machine_digest
    tokens = np.array([0, 0, 1], dtype="<i4").tobytes()
    search.ledger.apply(Admit(0, ledger_scope(), tokens))
    assert canonical_key(search.state) != key
    search.restore(empty)
    assert (canonical_key(search.state), search.ledger.machine_digest) == (key, digests)
    assert search.state.sums.digests() == (search.ledger.committed_digest, digests)


def _groups() -> Any:
    from copyhold.kvcore.commands import GroupSpec

    return GroupSpec("pairs", 2, 3), GroupSpec("singles", 1, 5)


def ledger_scope() -> Any:
    from copyhold.kvcore.commands import Scope

    return Scope("a", 0, b"w")


# Planted bugs. Each patches one point and must be found by a shortest trace.


def _double_free(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LedgerState.drop_references

    def twice(self: LedgerState, slot: int) -> Any:
        table = self.requests.table(slot)
        told = honest(self, slot)
        self.pool.drop(table, self.scopes.revoked)
        return told

    monkeypatch.setattr(LedgerState, "drop_references", twice)


def _publish_before_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = ledger_module._RULES[Publish]

    def early(state: LedgerState, slots: list[int]) -> Any:
        cells = state.requests.records.cells
        saved = cells[slots, loops.VALID].copy()
        cells[slots, loops.VALID] += cells[slots, loops.FLIGHT_COUNT]
        told = rule.commit(state, slots)
        cells[slots, loops.VALID] = saved
        return told

    planted = msgspec.structs.replace(rule, commit=early)
    monkeypatch.setitem(ledger_module._RULES, Publish, planted)


def _half_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = LedgerState.drop_references

    def first_group_only(self: LedgerState, slot: int) -> Any:
        pools = self.pools
        self.pools = pools[:1]
        freed, evictable, scrub = honest(self, slot)
        self.pools = pools
        return freed, evictable, (*scrub, scrub[0][:0])

    monkeypatch.setattr(LedgerState, "drop_references", first_group_only)


def _lost_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = ledger_module._RULES[Abort]

    def forgetful(state: LedgerState, plan: tuple[int, int]) -> Any:
        handle = state.requests.handle(plan[1])
        state.requests.clear(plan[1])
        fields = {"transaction": plan[0], "request": handle, "freed_blocks": 0}
        return {**fields, "evictable_blocks": 0, "scrub": ()}

    monkeypatch.setitem(ledger_module._RULES, Abort, msgspec.structs.replace(rule, commit=forgetful))


def _stale_handle_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: RequestTable, handle: Any) -> int:
        return handle.slot

    monkeypatch.setattr(RequestTable, "slot_of", careless)


PLANTED = {
    "double free": (_double_free, "refcount_mismatch", (Admit, Release)),
    "publish before completion": (
        _publish_before_completion,
        "identity_on_incomplete_block",
        (Admit, Dispatch, Publish),
    ),
    "half bundle": (_half_bundle, "refcount_mismatch", (Admit, Release)),
    "lost abort": (_lost_abort, "refcount_mismatch", (Admit, Abort)),
    "stale handle accepted": (_stale_handle_accepted, "accepted", (Publish,)),
}


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_bug_is_found_with_a_minimal_trace(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, finding, expected = PLANTED[name]
    plant(monkeypatch)
    report: CheckReport = explore(SMALL, MOST_STATES)
    (violation,) = report.violations
    assert finding in violation.what, violation
    assert tuple(type(command) for command in violation.trace[1:]) == expected
    assert not report.document()["ok"] and Complete not in {type(command) for command in violation.trace}
