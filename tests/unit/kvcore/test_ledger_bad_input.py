"""Input that cannot mean anything is refused with the offending value, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore import errors
from copyhold.kvcore.audit import audit
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
from copyhold.kvcore.log import LogHeader, Recorder, read_log

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


class Bad(msgspec.Struct):
    """One kind of bad input: what is offered, the refusal, and what the refusal must say of the value."""

    kind: str
    command: Any
    refusal: type[errors.LedgerRefusal]
    says: dict[str, Any]


def _malformed(kind: str, command: Any, field: str, value: str) -> Bad:
    return Bad(kind, command, errors.MalformedCommand, {"field": field, "value": value})


IDLE = RequestHandle(1, 1)
BIG = np.array([70, 71], dtype="<i8")


def _odd(kind: Any, *fields: Any) -> Any:
    """A command whose fields are not what its class declares."""
    return kind(*fields)


THE_LIST = [
    _malformed("dtype", _odd(Admit, 7, SCOPE, BIG), "tokens", "not bytes: array([70, 71])"),
    _malformed("dtype", Admit(7, SCOPE, BIG.astype("<i2").tobytes()[:3]), "tokens", "3 bytes"),
    _malformed("dtype", _odd(PackedDispatch, 7, memoryview(b"")), "rows", "not bytes: <memory"),
    _malformed("dtype", PackedDispatch(7, BIG.tobytes()), "rows", "16 bytes"),
    _malformed(
        "dtype", _odd(Complete, 1, ((0, 1.5),)), "sampled", "not rows of 2 64-bit integers: [(0, 1.5)]"
    ),
    _malformed(
        "dtype",
        _odd(Complete, 1, ((0, True),), ("0",)),
        "discarded",
        "not rows of 1 64-bit integers: [('0',)]",
    ),
    _malformed("dtype", _odd(Complete, 1, ((0,),)), "sampled", "not rows of 2 64-bit integers: [(0,)]"),
    _malformed("negative", Dispatch(7, (RowSpan(IDLE, 0, -3),)), "count", "-3"),
    _malformed("negative", Admit(-2, SCOPE, bytes(4)), "transaction", "-2"),
    Bad(
        "negative",
        Dispatch(-1, (RowSpan(IDLE, 0, 1),)),
        errors.StepOutOfOrder,
        {"step": -1, "last_step": 1},
    ),
    _malformed("negative", Fork(IDLE, -1), "children", "-1"),
    _malformed("negative", Truncate(IDLE, -1), "num_tokens", "-1"),
    _malformed("negative", Complete(1, ((0, -1),)), "sampled", "token -1"),
    _malformed("negative", AdvanceGeneration("a", -5), "generation", "-5"),
    Bad(
        "negative",
        Admit(7, SCOPE, np.array([5, -9], "<i4").tobytes()),
        errors.TokenOutOfRange,
        {"position": 1, "token": -9},
    ),
    Bad("empty", Admit(7, SCOPE, b""), errors.EmptyPrompt, {"transaction": 7}),
    _malformed("empty", Dispatch(7, ()), "rows", "empty"),
    _malformed("empty", PackedDispatch(7, b""), "rows", "empty"),
    _malformed("empty", Admit(7, Scope("", 1, b"w"), bytes(4)), "namespace", "empty"),
    Bad("range", Release(FAR, "finish"), errors.StaleRequestGeneration, {"slot": 1 << 40, "generation": 1}),
    Bad("range", Truncate(NOBODY, 1), errors.StaleRequestGeneration, {"slot": -1, "generation": 1}),
    Bad(
        "range", Evict((NodeHandle(1 << 40, 2),)), errors.StaleTreeVersion, {"node": 1 << 40, "generation": 2}
    ),
    Bad("range", Abort(1 << 50), errors.UnknownTransaction, {"transaction": 1 << 50}),
    Bad("range", Complete(9), errors.StepOutOfOrder, {"step": 9, "last_step": 1}),
    _malformed("range", Complete(1, ((4, 1),)), "sampled", "row 4 of 1"),
    _malformed("range", Complete(1, (), (5,)), "discarded", "row 5 of 1"),
    _malformed("overflow", Complete(1, ((0, 1 << 31),)), "sampled", f"token {1 << 31}"),
    _malformed(
        "overflow",
        Complete(1, ((0, 1 << 70),)),
        "sampled",
        f"not rows of 2 64-bit integers: [(0, {1 << 70})]",
    ),
    _malformed("overflow", Dispatch(7, (RowSpan(IDLE, 0, 1 << 61),)), "count", str(1 << 61)),
    _malformed("overflow", Dispatch(LARGE + 1, (RowSpan(IDLE, 0, 1),)), "step", str(LARGE + 1)),
    _malformed("overflow", Admit(LARGE + 1, SCOPE, bytes(4)), "transaction", str(LARGE + 1)),
    _malformed("overflow", AdvanceGeneration("a", LARGE + 1), "generation", str(LARGE + 1)),
    Bad(
        "overflow",
        Admit(7, SCOPE, bytes(4 * 4096)),
        errors.FullSequenceDoesNotFit,
        {"tokens": 4096, "limit_tokens": 64},
    ),
]


def test_the_whole_list_of_bad_input_is_refused_with_its_values(busy: Any, tmp_path: Path) -> None:
    """Dtypes, signs, empty input, ids out of range, overflow, foreign logs, wrong indices: one test over all of them."""
    before = busy.trace()
    for bad in THE_LIST:
        with pytest.raises(bad.refusal) as caught:
            busy.ledger.apply(bad.command)
        for name, value in bad.says.items():
            said = getattr(caught.value, name)
            assert said == value or (name == "value" and said.startswith(value)), (bad, said)
        assert busy.trace() == before, bad
    assert {bad.kind for bad in THE_LIST} == {"dtype", "negative", "empty", "range", "overflow"}
    for rows, blocks in ((1 << 16, (1 << 15) + 1), (2, (1 << 30) + 1), ((1 << 31) - 2, (1 << 31) - 2)):
        huge, empty = Genesis(b"w", (GroupSpec("full", rows, blocks),), 4, 64, "pool"), Ledger()
        with pytest.raises(errors.MalformedCommand, match=f"{blocks} of {rows} rows"):
            empty.apply(huge)
        assert (empty.log_index, empty.machine_digest) == (0, bytes(16))
    for offered, refusal in ((before[2] + 1, errors.LogGap), (before[2] - 1, errors.LogRepetition)):
        with pytest.raises(refusal) as index:
            busy.ledger.apply_at(offered, AdvanceGeneration("z", 1))
        assert (index.value.expected_index, index.value.index) == (before[2], offered)
    log = _log_of(tmp_path / "log")
    for header, refusal, says in (
        (LogHeader(b"v", "pool"), errors.LogWorldMismatch, {"world": b"w".hex(), "expected": b"v".hex()}),
        (
            LogHeader(b"w", "pool-2"),
            errors.LogIncarnationMismatch,
            {"incarnation": "pool", "expected": "pool-2"},
        ),
    ):
        with pytest.raises(refusal) as foreign:
            list(read_log(log, header))
        assert {name: getattr(foreign.value, name) for name in says} == says
    assert busy.trace() == before
    audit(busy.ledger)


def _log_of(path: Path) -> Path:
    ledger, recorder = Ledger(), Recorder(path)
    genesis = Genesis(b"w", (GroupSpec("full", 4, 16),), 4, 64, "pool")
    recorder.record(genesis, ledger.apply(genesis))
    recorder.close()
    return path
