"""Write the tables of docs/operations.md anew from the code that they describe.

A test compares them, so that neither can change alone: ``python scripts/update_tables.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from copyhold.cluster.config_report import markdown_table
from copyhold.cluster.metrics import METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "operations.md"


def metrics_table() -> str:
    """Every metric with its labels and meaning."""
    lines = ["| Metric | Kind | Labels | Meaning |", "| --- | --- | --- | --- |"]
    lines += [f"| `{spec.name}` | {spec.kind} | {', '.join(spec.labels)} | {spec.doc} |" for spec in METRICS]
    return "\n".join(lines)


def updated(page: str) -> str:
    """The page with both tables as the code has them."""
    for subject, table in (("settings", markdown_table()), ("metrics", metrics_table())):
        marked = re.compile(rf"(<!-- table of {subject}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        page, times = marked.subn(lambda match, table=table: f"{match[1]}\n{table}\n\n{match[2]}", page)
        assert times == 1, f"{subject}: {times} places"
    return page


def main() -> int:
    """Rewrite the page; says whether anything changed."""
    before = PAGE.read_text("utf-8")
    after = updated(before)
    PAGE.write_text(after, "utf-8")
    sys.stdout.write("docs/operations.md is as the code is\n" if before == after else "updated\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
