"""What the command line prints: results on standard output, everything else on standard error.

Owns the rule that with ``--json`` standard output holds exactly one JSON document, also when the command
fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

Progress = Callable[[str, str], None]


class Output:
    """One command's results. ``emit`` is called once; ``emitted`` says whether it was."""

    def __init__(self, json: bool) -> None:
        self.json = json
        self.emitted = False

    def emit(self, document: Mapping[str, Any], text: str) -> None:
        """Print ``document`` with ``--json``, else ``text``."""
        assert not self.emitted, "a command reports once"
        self.emitted = True
        shown = msgspec.json.format(msgspec.json.encode(document), indent=2).decode() if self.json else text
        sys.stdout.write(shown + "\n")
        sys.stdout.flush()


@contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """A callback that shows start-up: a live status on a terminal, one plain line per stage elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:

        def plain(stage: str, detail: str) -> None:
            sys.stderr.write(_line(stage, detail) + "\n")
            sys.stderr.flush()

        yield plain
        return
    with console.status("starting") as status:
        shown = ""

        def live(stage: str, detail: str) -> None:
            nonlocal shown
            if shown and stage != shown:
                console.print(f"[green]done[/green] {shown}", highlight=False)
            shown = stage
            status.update(_line(stage, detail))

        yield live


def error_line(type_name: str, message: str) -> None:
    """The one line of a failed command."""
    sys.stderr.write(f"copyhold: {type_name}: {' '.join(message.split())}\n")
    sys.stderr.flush()


def error_document(type_name: str, message: str) -> dict[str, Any]:
    """What ``--json`` prints for a failed command."""
    return {"ok": False, "error": {"type": type_name, "message": " ".join(message.split())}}


def table(rows: list[tuple[str, ...]], header: tuple[str, ...]) -> str:
    """Aligned columns of plain text, so that results can be piped."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in [header, *rows]
    )


def _line(stage: str, detail: str) -> str:
    return f"{stage}: {detail}" if detail else stage
