"""docs/ledger.md: every example runs and prints what the page says; its table is the code's."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import typing
from pathlib import Path
from typing import Any

from copyhold.kvcore.commands import Command

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "ledger.md"
_PAIR = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_examples_print_what_the_page_says() -> None:
    text = DOCUMENT.read_text("utf-8")
    pairs = _PAIR.findall(text)
    assert len(pairs) == text.count("```python") == text.count("```text") >= 7
    session: dict[str, Any] = {}
    for code, expected in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(DOCUMENT), "exec"), session)
        assert printed.getvalue() == expected, code


def test_the_table_of_reasons_is_the_code_s() -> None:
    path = ROOT / "scripts" / "update_ledger_table.py"
    spec = importlib.util.spec_from_file_location("update_ledger_table", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = DOCUMENT.read_text("utf-8")
    assert page == script.updated(page), "run scripts/update_ledger_table.py"


def test_every_command_is_described() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert [kind.__name__ for kind in typing.get_args(Command) if f"`{kind.__name__}`" not in text] == []
