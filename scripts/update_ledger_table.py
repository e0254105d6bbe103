"""Write the table of refusals in docs/ledger.md anew from kvcore's errors.

A test compares them, so that neither can change alone: ``python scripts/update_ledger_table.py``.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from copyhold.kvcore import errors
from copyhold.kvcore.errors import LedgerRefusal

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ledger.md"


def refusals_table() -> str:
    """Every refusal of the ledger with its fields and what it means, by name."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    rows = {
        kind.reason: f"| `{kind.reason}` | {', '.join(_fields(kind))} | {_meaning(kind)} |"
        for kind in kinds
        if issubclass(kind, LedgerRefusal) and kind is not LedgerRefusal
    }
    return "\n".join(
        ["| reason | fields | meaning |", "| --- | --- | --- |", *[rows[name] for name in sorted(rows)]]
    )


def updated(page: str) -> str:
    """The page with the table as the code has it."""
    marked = re.compile(r"(<!-- table of refusals: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
    page, times = marked.subn(lambda match: f"{match[1]}\n{refusals_table()}\n\n{match[2]}", page)
    assert times == 1, f"{times} places"
    return page


def _fields(kind: type[LedgerRefusal]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]


def _meaning(kind: type[LedgerRefusal]) -> str:
    return " ".join((kind.__doc__ or "").split())


def main() -> int:
    """Rewrite the page; says whether anything changed."""
    before = PAGE.read_text("utf-8")
    after = updated(before)
    PAGE.write_text(after, "utf-8")
    sys.stdout.write("docs/ledger.md is as the code is\n" if before == after else "updated\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
