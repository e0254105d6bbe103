"""What ``copyhold verify`` prints for people: one row a run, then a verdict. Every figure is in the JSON document too."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from .demo_checks import Check
from .verify import VerifyReport

_PLAIN_WIDTH = 150


def print_verify(console: Console, report: VerifyReport) -> None:
    """The table and the verdict."""
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    table = Table(title=f"Reuse beside cold runs: {report.model}", title_justify="left")
    table.add_column("run", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("equal", justify="right", no_wrap=True)
    table.add_column("logits", justify="right", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("what happened, or what does not hold", overflow="fold")
    for check in report.checks:
        table.add_row(*_row(check))
    for check in report.not_applicable:
        table.add_row(check.name, "n/a", "", "", "", check.detail)
    console.print(table)
    verdict = "[bold green]reuse changed nothing" if report.ok else "[bold red]reuse changed something"
    failed = sum(not check.ok for check in report.checks)
    console.print(
        f"{verdict}[/]: {len(report.checks) - failed} of {len(report.checks)} checks hold in {report.elapsed_s:.0f} s",
        highlight=False,
    )


def _row(check: Check) -> tuple[str, ...]:
    mark = "[green]ok[/green]" if check.ok else "[red]NOT OK[/red]"
    found = check.value
    if not isinstance(found, dict):
        return check.name, mark, "", "", "", check.detail
    happened = ", ".join(f"{name} {count}" for name, count in found["counts"].items())
    return (
        check.name,
        mark,
        f"{found['equal_streams']}/{found['streams']}",
        _number(found["max_logit_deviation"]),
        f"{found['rows_compared']} {_number(found['max_row_deviation'])}",
        happened if check.ok else check.detail,
    )


def _number(value: Any) -> str:
    if value is None:
        return "inf"
    return "same" if value == 0 else f"{value:.0e}"
