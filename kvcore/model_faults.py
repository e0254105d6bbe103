"""Faults inside commits: every compiled loop that writes a digested cell can be made to fail instead of writing.

Owns the list of write sites, which is found and not kept: every loop that takes the digest's `sums`. Invariant: outside a
`WriteSites` block the loops are the real ones; inside, what is not told to fail does what it always does.
Source: LEDGER "apply = plan, then commit"; contracts K048, K066, K067.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import loops
from .audit import AuditViolation, audit
from .commands import Command, decode_command, encode_command
from .errors import LedgerBroken
from .ledger import Ledger

Digests = tuple[bytes, bytes]


class PlantedFault(RuntimeError):
    """A write that was made to fail."""


def write_sites() -> list[str]:
    """Names of all loops that write digested cells."""
    found = []
    for name, loop in sorted(vars(loops).items()):
        plain = getattr(loop, "py_func", loop)
        if name.startswith("_") or not inspect.isfunction(plain) or plain.__module__ != loops.__name__:
            continue
        if "sums" in inspect.signature(plain).parameters:
            found.append(name)
    return found


class WriteSites:
    """Notes calls of write sites while it is entered; call number `fail_at` raises PlantedFault instead of writing."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self._real = {name: getattr(loops, name) for name in write_sites()}

    def __enter__(self) -> WriteSites:
        for name, loop in self._real.items():
            setattr(loops, name, self._noted(name, loop))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, loop in self._real.items():
            setattr(loops, name, loop)

    def begin(self, fail_at: int | None = None) -> None:
        """Counts from here."""
        self.calls.clear()
        self.fail_at = fail_at

    def _noted(self, name: str, loop: Callable[..., Any]) -> Callable[..., Any]:
        calls = self.calls

        def called(*arguments: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == self.fail_at:
                raise PlantedFault(name)
            return loop(*arguments)

        return called


def interrupted(ledger: Ledger, command: Command, writes: WriteSites, at: int) -> str:
    """Applies a command whose write number `at` fails; what is wrong with the ledger afterwards.

    It must be broken: digests and log index are those before, and the command is refused from now on.
    """
    before = ledger.committed_digest, ledger.machine_digest, ledger.log_index
    writes.begin(at)
    try:
        ledger.apply(command)
    except PlantedFault:
        pass
    else:
        return f"write {at} of {type(command).__name__} failed and the command was accepted"
    finally:
        writes.begin()
    if before != (ledger.committed_digest, ledger.machine_digest, ledger.log_index):
        return f"write {at} of {type(command).__name__} failed and the digests moved"
    try:
        ledger.apply(command)
    except LedgerBroken:
        return ""
    return f"write {at} of {type(command).__name__} failed and the ledger went on"


def replayed(log: tuple[Command, ...], command: Command, before: Digests, after: Digests) -> str:
    """Replays a log into another ledger and goes on with the command; what differs from the one that made it."""
    restored = Ledger()
    for record in log:
        restored.apply(decode_command(encode_command(record)))
    if (restored.committed_digest, restored.machine_digest) != before:
        return "the log does not give the digests back"
    try:
        audit(restored)
    except AuditViolation as violation:
        return f"after replay: {violation}"
    restored.apply(command)
    if (restored.committed_digest, restored.machine_digest) != after:
        return f"{type(command).__name__} ends otherwise after a replay"
    return ""
