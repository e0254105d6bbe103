"""docs/bytes.md: every example runs, in order, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

from document_examples import run_examples

DOCUMENT = Path(__file__).parents[3] / "docs" / "bytes.md"


def test_examples_print_what_the_page_says() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert run_examples(DOCUMENT) == text.count("```python") == text.count("```text") >= 9
