"""docs/ledger.md: every example runs and prints what the page says; its table is the code's."""

from __future__ import annotations

import importlib.util
import typing
from pathlib import Path

from document_examples import run_examples

from copyhold.kvcore.commands import Command

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "ledger.md"


def test_examples_print_what_the_page_says() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert run_examples(DOCUMENT) == text.count("```python") == text.count("```text") >= 7


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
