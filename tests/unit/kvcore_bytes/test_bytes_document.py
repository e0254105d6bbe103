"""docs/bytes.md: every example runs, in order, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[3] / "docs" / "bytes.md"
_PAIR = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_examples_print_what_the_page_says() -> None:
    text = DOCUMENT.read_text("utf-8")
    pairs = _PAIR.findall(text)
    assert len(pairs) == text.count("```python") == text.count("```text") >= 9
    session: dict[str, Any] = {}
    for code, expected in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(DOCUMENT), "exec"), session)
        assert printed.getvalue() == expected, code
