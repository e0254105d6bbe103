"""The ledger: all KV-cache state of one rank as one deterministic state machine, commands in, receipts out.

Invariant: `apply` first plans (reads only, may raise a LedgerRefusal) and then commits (cannot fail), so a
refused command writes nothing and takes no log index. A commit that is interrupted all the same (out of memory, a
defect) breaks the ledger for good: its digests and log index stay those before the command, every later command is
refused, and the log up to there, replayed, gives the state back. One command at a time: one that comes meanwhile is
refused as `ledger_busy`, unless the owner has threads and brings a lock, on which they wait. The same log gives the same
receipts and digests in every process.
Source: LEDGER; contracts K048 to K077, K111 to K129, K187.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from . import receipts
from .admission import commit_abort, commit_admit, plan_abort, plan_admit
from .branching import commit_fork, commit_truncate, plan_fork, plan_truncate
from .commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Command,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    PackedComplete,
    PackedDispatch,
    Publish,
    PublishTail,
    Release,
    Reset,
    Truncate,
)
from .errors import GenesisRepeated, LedgerBroken, LedgerBusy, LogGap, LogRepetition, LogWithoutGenesis
from .eviction import commit_evict, commit_reset, plan_evict, plan_reset
from .floors import commit_advance, plan_advance
from .publication import commit_publish, plan_publish
from .reads import EvictableLeaf, LedgerReads, NodeView, Probe
from .receipts import AnyReceipt, GenesisReceipt
from .release import commit_release, plan_release
from .state import LedgerState, plan_genesis
from .stepping import commit_complete, commit_dispatch, plan_complete, plan_dispatch
from .tails import commit_publish_tail, plan_publish_tail

__all__ = ["EvictableLeaf", "Ledger", "NodeView", "Probe"]

_EMPTY_DIGEST = bytes(16)


class _Rule(msgspec.Struct, frozen=True):
    plan: Callable[[LedgerState, Any], Any]
    commit: Callable[[LedgerState, Any], dict[str, Any]]
    receipt: Callable[..., AnyReceipt]


_DISPATCH = _Rule(plan_dispatch, commit_dispatch, receipts.DispatchReceipt)
_COMPLETE = _Rule(plan_complete, commit_complete, receipts.CompleteReceipt)
_RULES: dict[type, _Rule] = {
    AdvanceGeneration: _Rule(plan_advance, commit_advance, receipts.AdvanceReceipt),
    Admit: _Rule(plan_admit, commit_admit, receipts.AdmitReceipt),
    Dispatch: _DISPATCH,
    PackedDispatch: _DISPATCH,
    Complete: _COMPLETE,
    PackedComplete: _COMPLETE,
    Publish: _Rule(plan_publish, commit_publish, receipts.PublicationReceipt),
    PublishTail: _Rule(plan_publish_tail, commit_publish_tail, receipts.TailReceipt),
    Release: _Rule(plan_release, commit_release, receipts.ReleaseReceipt),
    Fork: _Rule(plan_fork, commit_fork, receipts.ForkReceipt),
    Truncate: _Rule(plan_truncate, commit_truncate, receipts.TruncateReceipt),
    Evict: _Rule(plan_evict, commit_evict, receipts.EvictReceipt),
    Reset: _Rule(plan_reset, commit_reset, receipts.ResetReceipt),
    Abort: _Rule(plan_abort, commit_abort, receipts.AbortReceipt),
}


class _Turn:
    """Held by one at a time; whoever comes meanwhile is refused. Taking from a list is one step for every thread."""

    def __init__(self) -> None:
        self._free = [True]

    def __enter__(self) -> None:
        try:
            self._free.pop()
        except IndexError:
            raise LedgerBusy() from None

    def __exit__(self, *_: object) -> None:
        self._free.append(True)


class Ledger(LedgerReads):
    """One rank's ledger. Empty until Genesis, which is record 0 of its log."""

    def __init__(self, turns: AbstractContextManager[Any] | None = None) -> None:
        """``turns``: a lock of an owner that has threads; without one a command that comes meanwhile is refused."""
        self._state: LedgerState | None = None
        self._applying: AbstractContextManager[Any] = _Turn() if turns is None else turns
        self._log_index = 0
        self._committed = _EMPTY_DIGEST
        self._machine = _EMPTY_DIGEST
        self._broken = ""

    @classmethod
    def resumed(cls, state: LedgerState, log_index: int) -> Ledger:
        """A ledger over a state that stands before that record; the caller has checked the state."""
        ledger = cls()
        ledger._state, ledger._log_index = state, log_index
        ledger._committed, ledger._machine = state.sums.digests()
        return ledger

    def apply(self, command: Command) -> Any:
        """Applies one command; its receipt (AnyReceipt).

        Raises: LedgerRefusal; state, digests and log index are as before. LedgerBroken after an interrupted commit,
        LedgerBusy while another one is applied.
        """
        with self._applying:
            return self._apply(command)

    def apply_at(self, index: int, command: Command) -> Any:
        """Applies the record at a log index. Raises: LogGap, LogRepetition, or the command's own refusal."""
        with self._applying:
            if index > self._log_index:
                raise LogGap(self._log_index, index)
            if index < self._log_index:
                raise LogRepetition(self._log_index, index)
            return self._apply(command)

    def at_rest(self) -> AbstractContextManager[Any]:
        """A context in which no command is applied: for whoever reads much of the state from another thread."""
        return self._applying

    @property
    def log_index(self) -> int:
        """The index the next record will have."""
        return self._log_index

    @property
    def committed_digest(self) -> bytes:
        """16 bytes over what requests, index and owners can observe."""
        return self._committed

    @property
    def machine_digest(self) -> bytes:
        """16 bytes over every column, queue orders, generations and pins included."""
        return self._machine

    def _apply(self, command: Command) -> Any:
        if isinstance(command, Genesis):
            return self._begin(command)
        state = self._state
        if state is None:
            raise LogWithoutGenesis(type(command).__name__)
        if self._broken:
            raise LedgerBroken(self._log_index, self._broken)
        rule = _RULES[type(command)]
        plan = rule.plan(state, command)
        state.looked_up = None
        try:
            fields = rule.commit(state, plan)
        except BaseException as error:
            self._broken = f"{type(command).__name__}: {type(error).__name__}"
            raise
        return self._receipt(state, rule.receipt, fields)

    def _begin(self, command: Genesis) -> GenesisReceipt:
        if self._state is not None:
            raise GenesisRepeated(self._log_index)
        state = self._state = LedgerState(plan_genesis(command))
        total = sum(group.num_blocks for group in command.groups)
        fields = {
            "incarnation": command.incarnation,
            "total_blocks": total,
            "alignment": state.alignment,
        }
        return self._receipt(state, GenesisReceipt, fields)

    def _receipt(self, state: LedgerState, receipt: Callable[..., Any], fields: dict[str, Any]) -> Any:
        before, index = self._committed, self._log_index
        self._committed, self._machine = state.sums.digests()
        self._log_index = index + 1
        return receipt(
            log_index=index,
            committed_before=before,
            committed_after=self._committed,
            machine_after=self._machine,
            **fields,
        )
