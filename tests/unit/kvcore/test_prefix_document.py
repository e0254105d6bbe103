"""docs/prefix-reuse.md: every example runs and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

from document_examples import run_examples

DOCUMENT = Path(__file__).parents[3] / "docs" / "prefix-reuse.md"


def test_examples_of_prefix_reuse_print_what_the_page_says() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert run_examples(DOCUMENT) == text.count("```python") >= 9


def test_every_reason_of_a_match_is_explained() -> None:
    text = DOCUMENT.read_text("utf-8")
    lengths = (Path(__file__).parents[3] / "kvcore" / "lengths.py").read_text("utf-8")
    reasons = {name for name in re.findall(r'"([a-z_]+)"', lengths) if "_" in name} - {"whole_prompt"}
    assert len(reasons) >= 7
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in text] == []
