"""docs/prefix-reuse.md: every example runs and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "prefix-reuse.md"
_PAIR = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_examples_of_prefix_reuse_print_what_the_page_says() -> None:
    text = DOCUMENT.read_text("utf-8")
    pairs = _PAIR.findall(text)
    assert len(pairs) == text.count("```python") >= 9
    session: dict[str, Any] = {}
    for code, expected in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(DOCUMENT), "exec"), session)
        assert printed.getvalue() == expected, code


def test_every_reason_of_a_match_is_explained() -> None:
    text = DOCUMENT.read_text("utf-8")
    lengths = (Path(__file__).parents[3] / "kvcore" / "lengths.py").read_text("utf-8")
    reasons = {name for name in re.findall(r'"([a-z_]+)"', lengths) if "_" in name} - {"whole_prompt"}
    assert len(reasons) >= 7
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in text] == []
