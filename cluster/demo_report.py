"""What the demonstration prints for people: three small tables and a verdict.

Owns layout only; every figure is in the JSON document as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .demo_checks import Check, Turn

_REPLY_CHARS = 28
_PLAIN_WIDTH = 120


def print_report(
    console: Console, document: dict[str, Any], turns: Sequence[Turn], checks: Sequence[Check]
) -> None:
    """Turns, explanations, checks, verdict."""
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    console.print(_turn_table(turns))
    for found in document["explain"]:
        console.print(f"[bold]explain[/bold] turn {found['turn']}: {found['explanation']}", highlight=False)
    console.print(_check_table(checks))
    memory = document["memory"]
    verdict = "[bold green]all checks hold" if document["ok"] else "[bold red]some checks do not hold"
    console.print(
        f"{verdict}[/] in {document['elapsed_s']} s; {memory['pss_mib']} MiB summed PSS over {memory['processes']} "
        f"processes; model cache {document['disk']['model_cache_mib']} MiB",
        highlight=False,
    )


def _turn_table(turns: Sequence[Turn]) -> Table:
    table = Table(title="Turns", title_justify="left")
    for heading in ("tenant", "turn", "prompt", "cached", "first token", "reply begins", "receipt"):
        right = heading in ("turn", "prompt", "cached", "first token")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for turn in turns:
        table.add_row(
            turn.tenant,
            str(turn.turn),
            str(turn.prompt_tokens),
            str(turn.cached_tokens),
            f"{turn.time_to_first_token_ms:.0f} ms",
            " ".join(turn.reply.split())[:_REPLY_CHARS],
            turn.receipt_id,
        )
    return table


def _check_table(checks: Sequence[Check]) -> Table:
    table = Table(title="Checks", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold", max_width=26)
    table.add_column("against")
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[red]NOT OK[/red]"
        table.add_row(check.name, mark, str(check.value), check.detail)
    return table
