"""The tables of docs/operations.md are those of the code, and every key and metric is in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from copyhold.cluster.config import FIELDS
from copyhold.cluster.metrics import METRICS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "update_tables.py"


def test_the_tables_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("update_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text("utf-8")
    assert page == script.updated(page), "run scripts/update_tables.py"


def test_every_key_and_every_metric_has_its_row() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    for name in [*FIELDS, *(metric.name for metric in METRICS)]:
        assert page.count(f"\n| `{name}` | ") == 1, name
