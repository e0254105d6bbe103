"""The registry of reasons: every name has one kind and one stage.

Owns the classification: `runtime` is raised by a public function, `auditor` is found by the audit, `docs` is a
rule that nothing can break by a call, with a sentence of why. A stage is where in one reuse attempt the reason
stops it (K186's funnel), or `accounting` and `claims`, where no attempt is stopped. Invariant: a total function
from reason to stage; an unknown reason and a doubled one are refused.
Source: contracts K237, K245; LEDGER (reasons).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from .contract_errors import ContractRefusal

STAGES = (
    "request",
    "authorization",
    "candidate",
    "compatibility",
    "generation",
    "lease",
    "mapping",
    "snapshot",
    "execution",
    "accounting",
    "claims",
)
"""In the order in which an attempt passes them."""


class Reason(msgspec.Struct, frozen=True):
    """One name; `why` is set for `docs`."""

    name: str
    kind: Literal["runtime", "auditor", "docs"]
    stage: str
    contracts: tuple[str, ...] = ()
    why: str = ""


@dataclass(eq=False)
class DropWithoutReason(ContractRefusal):
    """A reason that is not registered was reported (K245)."""

    name: str
    reason: ClassVar[str] = "drop_without_reason"


@dataclass(eq=False)
class ReasonInTwoStages(ContractRefusal):
    """A reason is registered twice (K245). No registry was built."""

    name: str
    stages: tuple[str, str]
    reason: ClassVar[str] = "reason_in_two_stages"


class ReasonRegistry:
    """Reasons by name. Raises: ReasonInTwoStages."""

    def __init__(self, rows: Iterable[Reason]) -> None:
        self._rows: dict[str, Reason] = {}
        for row in rows:
            if row.name in self._rows:
                raise ReasonInTwoStages(row.name, (self._rows[row.name].stage, row.stage))
            self._rows[row.name] = row

    def __getitem__(self, name: str) -> Reason:
        """Raises: DropWithoutReason."""
        if name not in self._rows:
            raise DropWithoutReason(name)
        return self._rows[name]

    def of_kind(self, kind: str) -> tuple[Reason, ...]:
        return tuple(row for row in self._rows.values() if row.kind == kind)

    def all(self) -> tuple[Reason, ...]:
        return tuple(self._rows.values())


def kvcore_reasons() -> ReasonRegistry:
    """The registry of this folder."""
    from .eviction_reasons import EVICTION_ROWS
    from .prefix_reasons import PREFIX_ROWS
    from .reason_table import ROWS

    return ReasonRegistry((*ROWS, *PREFIX_ROWS, *EVICTION_ROWS))


def markdown_table(rows: Iterable[Reason]) -> str:
    """Rows for a document: reason, kind, stage, contracts, why."""
    lines = ["| reason | kind | stage | contracts | why not raised |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        contracts = ", ".join(row.contracts)
        lines.append(f"| `{row.name}` | {row.kind} | {row.stage} | {contracts} | {row.why} |")
    return "\n".join(lines)
