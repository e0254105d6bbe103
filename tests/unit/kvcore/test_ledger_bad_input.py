"""Input that cannot mean anything is refused with the offending value, and leaves no trace."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore import errors
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    GroupSpec,
    NodeHandle,
    PackedComplete,
    PackedDispatch,
    Publish,
    Release,
    RequestHandle,
    Reset,
    RowSpan,
    Scope,
    Truncate,
    decode_command,
)
from copyhold.kvcore.ledger import Ledger

LARGE = 1 << 62
SCOPE = Scope("a", 1, b"w" * 32)
NOBODY = RequestHandle(-1, 1)
FAR = RequestHandle(1 << 40, 1)


def _rows(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


COMMANDS: list[tuple[Any, type[errors.LedgerRefusal]]] = [
    (Admit(LARGE + 1, SCOPE, bytes(4)), errors.MalformedCommand),
    (Admit(-1, SCOPE, bytes(4)), errors.MalformedCommand),
    (Admit(7, SCOPE, b""), errors.EmptyPrompt),
    (Admit(7, SCOPE, bytes(6)), errors.MalformedCommand),
    (Admit(7, SCOPE, bytes(4 * 4096)), errors.FullSequenceDoesNotFit),
    (Admit(7, Scope("", 1, b"w"), bytes(4)), errors.MalformedCommand),
    (Admit(7, Scope("a", -1, b"w"), bytes(4)), errors.MalformedCommand),
    (AdvanceGeneration("", 1), errors.MalformedCommand),
    (AdvanceGeneration("a", -5), errors.MalformedCommand),
    (AdvanceGeneration("a", LARGE + 1), errors.MalformedCommand),
    (Dispatch(7, ()), errors.MalformedCommand),
    (Dispatch(LARGE + 1, (RowSpan(NOBODY, 0, 1),)), errors.MalformedCommand),
    (Dispatch(7, (RowSpan(NOBODY, 0, 1),)), errors.StaleRequestGeneration),
    (Dispatch(7, (RowSpan(FAR, 0, 1),)), errors.StaleRequestGeneration),
    (Dispatch(7, (RowSpan(RequestHandle(0, 1), 0, -3),)), errors.MalformedCommand),
    (Dispatch(7, (RowSpan(RequestHandle(0, 1), 0, 1 << 61),)), errors.MalformedCommand),
    (Dispatch(7, (RowSpan(RequestHandle(0, 1), -1, 1),)), errors.AppendOutOfOrder),
    (Dispatch(7, (RowSpan(RequestHandle(0, 1), 1 << 70, 1),)), errors.MalformedCommand),
    (PackedDispatch(7, bytes(31)), errors.MalformedCommand),
    (PackedDispatch(7, b""), errors.MalformedCommand),
    (PackedDispatch(7, _rows(-1, 1, 0, 1)), errors.StaleRequestGeneration),
    (PackedDispatch(7, _rows(1 << 62, 1, 0, 1)), errors.StaleRequestGeneration),
    (Complete(3), errors.StepOutOfOrder),
    (Complete(1, ((0, -1),)), errors.MalformedCommand),
    (Complete(1, ((0, 1 << 31),)), errors.MalformedCommand),
    (Complete(1, ((0, 1 << 80),)), errors.MalformedCommand),
    (Complete(1, ((-1, 1),)), errors.MalformedCommand),
    (Complete(1, ((0, 1), (0, 1))), errors.MalformedCommand),
    (Complete(1, (), (5,)), errors.MalformedCommand),
    (Complete(1, (), (0, 0)), errors.MalformedCommand),
    (Complete(1, ((0, 1),), (0,)), errors.MalformedCommand),
    (PackedComplete(1, bytes(8)), errors.MalformedCommand),
    (PackedComplete(1, b"", bytes(4)), errors.MalformedCommand),
    (Publish((NOBODY,)), errors.StaleRequestGeneration),
    (Release(FAR, "finish"), errors.StaleRequestGeneration),
    (Release(RequestHandle(0, 1), "because"), errors.ReleaseReasonMissing),
    (Fork(RequestHandle(1, 1), -1), errors.MalformedCommand),
    (Fork(NOBODY, 1), errors.StaleRequestGeneration),
    (Truncate(RequestHandle(0, 1), -1), errors.MalformedCommand),
    (Truncate(FAR, 1), errors.StaleRequestGeneration),
    (Evict((NodeHandle(-1, 0),)), errors.StaleTreeVersion),
    (Evict((NodeHandle(1 << 40, 0),)), errors.StaleTreeVersion),
    (Abort(-1), errors.UnknownTransaction),
    (Abort(LARGE + 1), errors.UnknownTransaction),
    (Genesis(b"w", (GroupSpec("full", 4, 16),), 4, 64, "other"), errors.GenesisRepeated),
]


@pytest.fixture
def busy(driver: Any) -> Any:
    """Request 0 is in flight in step 1 with all its rows, request 1 is idle."""
    first, second = driver.admit([1, 2, 3]).request, driver.admit([4, 5]).request
    driver.dispatch((first, 3))
    assert second.slot == 1
    return driver


def test_every_senseless_command_is_refused_and_leaves_no_trace(busy: Any) -> None:
    busy.dispatch((RequestHandle(1, 1), 2))
    busy.complete()
    for command, refusal in COMMANDS:
        if isinstance(command, Dispatch) and any(row.request == RequestHandle(0, 1) for row in command.rows):
            continue
        busy.refused(command, refusal)
    busy.complete(1)
    for command, refusal in COMMANDS:
        if isinstance(command, Dispatch):
            busy.refused(command, refusal)


def test_an_empty_scope_is_reset_to_nothing(busy: Any) -> None:
    assert busy.apply(Reset(Scope("nobody", 1, b"w"))).freed_blocks == 0


@pytest.mark.parametrize(
    "genesis",
    [
        Genesis(b"w", (GroupSpec("full", 1 << 31, 4),), 4, 64, "pool"),
        Genesis(b"w", (GroupSpec("full", 4, 1 << 31),), 4, 64, "pool"),
        Genesis(b"w", (GroupSpec("full", 4, 16),), 1 << 31, 64, "pool"),
        Genesis(b"w", (GroupSpec("full", -4, 16),), 4, 64, "pool"),
        Genesis(b"w", (GroupSpec("a", (1 << 30) + 1, 4), GroupSpec("b", 1 << 30, 4)), 4, 64, "pool"),
    ],
)
def test_sizes_beyond_what_a_cell_holds_are_refused(genesis: Genesis) -> None:
    ledger = Ledger()
    with pytest.raises(errors.MalformedCommand):
        ledger.apply(genesis)
    assert ledger.log_index == 0 and ledger.machine_digest == bytes(16)


@pytest.mark.parametrize(
    "record",
    [b"", b"\xc1", b"\x90", b"\x91\xa7nothing", b"\x93\xa8dispatch\x01", b"\x94\xa5admit\xa1x\x01\x02"],
)
def test_bytes_that_are_no_command_are_a_decoding_error(record: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_command(record)


def test_gaps_and_repetitions_name_both_indices(busy: Any) -> None:
    index = busy.ledger.log_index
    for offered, refusal in ((index + 1, errors.LogGap), (index - 1, errors.LogRepetition)):
        with pytest.raises(refusal) as caught:
            busy.ledger.apply_at(offered, AdvanceGeneration("z", 1))
        assert (caught.value.expected_index, caught.value.index) == (index, offered)
