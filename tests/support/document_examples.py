"""Examples of a documentation page: a block of Python, and below it the block of text that it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

_PAIR = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def run_examples(document: Path) -> int:
    """Runs a page's examples in order in one session; each must print what stands below it. How many there are."""
    pairs = _PAIR.findall(document.read_text("utf-8"))
    session: dict[str, Any] = {}
    for code, expected in pairs:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(document), "exec"), session)
        assert printed.getvalue() == expected, f"{code}printed\n{printed.getvalue()}instead of\n{expected}"
    return len(pairs)
