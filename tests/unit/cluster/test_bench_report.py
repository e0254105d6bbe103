"""Benchmark reports: medians, targets in both directions, peers, one document whose format holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from copyhold.cluster import bench_serve, cli
from copyhold.cluster.bench_plan import BenchPlan, Samples
from copyhold.cluster.bench_report import BenchReport, Machine, Target, bench_row, versions
from copyhold.cluster.bench_serve import SHAPES, run_serve_bench, serve_rows
from copyhold.cluster.config import Config
from copyhold.cluster.errors import BenchInvalid

NAMES = (
    "decode batch 1",
    "decode batch 8",
    "first token cold",
    "first token cached",
    "transport share",
    "memory",
    "start-up",
)
UNITS = ("tok/s", "tok/s", "ms", "ms", "fraction", "MiB", "s")


def samples(rate: float = 20.0) -> Samples:
    return Samples(
        [rate, rate - 1, rate + 1], [100.0], [900.0, 800.0], [50.0], [0.05], [2000.0, 2100.0, 2050.0], [12.0]
    )


def assert_is_report(document: dict[str, Any]) -> None:
    """The format that every benchmark prints."""
    assert {"bench", "versions", "machine", "rows", "ok"} <= set(document)
    assert {"copyhold", "python", "torch"} <= set(document["versions"])
    assert {"processor", "usable_cores", "memory_mib", "load_before", "load_after"} <= set(
        document["machine"]
    )
    for row in document["rows"]:
        fields = ["name", "value", "unit", "min", "max", "runs", "target", "meets", "peers"]
        assert list(row) == fields
        assert row["min"] <= row["value"] <= row["max"] and row["runs"] >= 1
        assert (row["target"] is None) == (row["meets"] is None)
        assert all(isinstance(value, float) for value in row["peers"].values())
    assert document["ok"] == all(row["meets"] is not False for row in document["rows"])


def test_a_row_is_the_median_with_its_range() -> None:
    row = bench_row("x", "ms", [3.0, 1.0, 10.0], None, {"transformers": [5.0, 7.0, 6.0], "absent": []})
    assert (row.value, row.min, row.max, row.runs) == (3.0, 1.0, 10.0, 3)
    assert row.target is None and row.meets is None and row.peers == {"transformers": 6.0}


@pytest.mark.parametrize(
    ("target", "value", "meets"),
    [
        (Target(15.0), 15.0, True),
        (Target(15.0), 14.9, False),
        (Target(0.1, at_least=False), 0.1, True),
        (Target(0.1, at_least=False), 0.11, False),
    ],
)
def test_a_target_is_a_least_or_a_most(target: Target, value: float, meets: bool) -> None:
    row = bench_row("x", "s", [value], target)
    assert row.target == target.bound and row.meets is meets


def test_the_first_shape_has_targets_and_the_others_report() -> None:
    first = serve_rows(samples(), "", True, samples(3.0))
    assert tuple(row.name for row in first) == NAMES and tuple(row.unit for row in first) == UNITS
    assert [row.meets for row in first] == [True, True, None, None, True, True, None]
    assert first[0].peers == {"transformers": 3.0} and first[4].peers == {}
    other = serve_rows(samples(), ", TP 2 bfloat16", False, None)
    assert all(row.target is None and row.meets is None and row.peers == {} for row in other)
    assert other[0].name == "decode batch 1, TP 2 bfloat16"


def test_a_missed_target_is_an_exit_code_and_still_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, code in ((20.0, 0), (3.0, 1)):
        rows = tuple(serve_rows(samples(rate), "", True, None))
        report = BenchReport("serve", versions(), Machine().facts(), {}, ("a note",), rows)
        monkeypatch.setattr(bench_serve, "run_serve_bench", lambda *given, report=report: report)
        assert cli.run(["bench", "serve", "--json"]) == code
        assert_is_report(json.loads(capsys.readouterr().out))
    assert cli.run(["bench", "serve"]) == 1
    text = capsys.readouterr().out
    assert "misses" in text and "note: a note" in text and "3 tok/s" in text


def test_an_invalid_measurement_reports_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def invalid(*given: object) -> BenchReport:
        raise BenchInvalid("0 tokens were reused, 496 expected")

    monkeypatch.setattr(bench_serve, "run_serve_bench", invalid)
    assert cli.run(["bench", "serve", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "bench_invalid"
    assert cli.run(["bench", "serve", "--tp", "7"]) == 2
    assert cli.run(["bench", "serve", "--only", "7b"]) == 2


def test_without_transformers_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[object] = []
    monkeypatch.setattr(bench_serve, "_subprocess", lambda task, kind: tasks.append(task) or {})
    monkeypatch.setattr(bench_serve, "versions", lambda: {"torch": "2"})
    monkeypatch.setattr(bench_serve, "measure_shape", lambda *given: samples())
    report = run_serve_bench(Config(), SHAPES, BenchPlan(), True, lambda stage, detail: None, ("smollm",))
    assert report.notes == ("transformers is not installed: no peer figures",)
    assert len(tasks) == 1 and len(report.rows) == 7 * len(SHAPES)
    assert [row.name for row in report.rows[:7]] == list(NAMES)


def test_prompts_are_equal_for_equal_plans_and_cold_ones_differ_at_once() -> None:
    plan = BenchPlan()
    assert plan.decode_prompts(49152) == BenchPlan().decode_prompts(49152)
    assert len({prompt[0] for prompt in (plan.cold_prompt(run, 49152) for run in range(20))}) == 20
    assert plan.cached_tokens(16) == 496 and BenchPlan(prompt_tokens=513).cached_tokens(16) == 512
    assert min(plan.cold_prompt(0, 300)) >= 75 and max(plan.cold_prompt(0, 300)) < 300
