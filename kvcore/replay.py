"""Replay: a recorded log applied again from nothing, record by record, and compared with what was recorded.

Invariant: a replay changes no file; it stops at the first record whose refusal or digests differ, and says which.
Source: LEDGER "apply = plan, then commit", "Recording".
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import dropwhile, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from .audit import AuditViolation, audit
from .checkpoint import restore
from .errors import LedgerRefusal
from .handles import BlockHandles
from .ledger import Ledger
from .log import LogRecord, read_header, read_log, read_start


class Difference(msgspec.Struct, frozen=True):
    """The first record that is not as expected."""

    index: int
    what: str
    expected: str
    found: str


class ReplayReport(msgspec.Struct, frozen=True):
    """`records` from `first_index` on were applied and found equal; `commands` counts them by kind."""

    records: int
    commands: dict[str, int]
    committed_digest: str
    machine_digest: str
    difference: Difference | None = None
    first_index: int = 0


def replay(path: Path, trace: Callable[[int, Any], None] | None = None) -> ReplayReport:
    """Applies a log to a new ledger, or to the one in its checkpoint; `trace` gets each index and receipt.

    Raises: the refusals of `read_log`; LogCorrupt for a checkpoint that makes no ledger.
    """
    checkpoint = read_start(path).checkpoint
    ledger = Ledger() if checkpoint is None else restore(checkpoint)
    first_index = ledger.log_index
    commands: dict[str, int] = {}
    difference: Difference | None = None
    for record in read_log(path):
        command = record.decoded()
        try:
            receipt = ledger.apply_at(record.index, command)
        except LedgerRefusal as refusal:
            difference = Difference(record.index, "refused", "a receipt", str(refusal))
            break
        if trace is not None:
            trace(record.index, receipt)
        difference = _compare_digests(record, receipt.committed_after, receipt.machine_after)
        if difference is not None:
            break
        name = type(command).__name__
        commands[name] = commands.get(name, 0) + 1
    if difference is None and ledger.log_index:
        difference = _audited(ledger)
    records = sum(commands.values())
    return ReplayReport(
        records, commands, ledger.committed_digest.hex(), ledger.machine_digest.hex(), difference, first_index
    )


def compare_logs(path: Path, other: Path) -> Difference | None:
    """The first record in which two logs differ, from the later of their beginnings on.

    Raises: the refusals of `read_log`.
    """
    first = max(read_header(log).first_index for log in (path, other))
    own, theirs = [dropwhile(lambda record: record.index < first, read_log(log)) for log in (path, other)]
    for index, (left, right) in enumerate(zip_longest(own, theirs), first):
        if left is None or right is None:
            ended, goes_on = "the log ends", "a record"
            if left is None:
                return Difference(index, "length", goes_on, ended)
            return Difference(index, "length", ended, goes_on)
        if left.command != right.command:
            return Difference(index, "command", repr(right.decoded()), repr(left.decoded()))
        found = _compare_digests(right, left.committed_after, left.machine_after)
        if found is not None:
            return found
    return None


def receipt_values(receipt: Any) -> dict[str, Any]:
    """A receipt as plain values, for JSON."""
    values = msgspec.to_builtins(receipt, enc_hook=_plain, builtin_types=(bytes,))
    return {"receipt": type(receipt).__name__, **_hexed(values)}


def _compare_digests(expected: LogRecord, committed: bytes, machine: bytes) -> Difference | None:
    if committed != expected.committed_after:
        what, left, right = "committed_digest", expected.committed_after, committed
    elif machine != expected.machine_after:
        what, left, right = "machine_digest", expected.machine_after, machine
    else:
        return None
    return Difference(expected.index, what, left.hex(), right.hex())


def _audited(ledger: Ledger) -> Difference | None:
    try:
        audit(ledger)
    except AuditViolation as violation:
        return Difference(ledger.log_index - 1, "audit", "nothing wrong", str(violation))
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, BlockHandles):
        return [msgspec.structs.asdict(handle) for handle in value]
    raise TypeError(f"no plain form for {type(value).__name__}")


def _hexed(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hexed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hexed(item) for item in value]
    return value
