"""Rows of ``copyhold bench eviction``: one per trace, policy and capacity, LRU and the optimum beside each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from copyhold.actors.cache_settings import LAB_POLICIES
from copyhold.cluster.bench_eviction import run_eviction_bench
from copyhold.cluster.cli import run
from copyhold.cluster.errors import UsageError


def write_trace(file: Path) -> None:
    paths = [[0, 10 + n % 7, 20 + n % 3] for n in range(80)]
    file.write_text("\n".join(json.dumps({"timestamp": n, "hash_ids": one}) for n, one in enumerate(paths)))


def test_rows_name_trace_policy_and_capacity_and_have_lru_and_the_optimum_as_peers(tmp_path, capsys):
    (tmp_path / "deeper").mkdir()
    write_trace(tmp_path / "deeper" / "chat.jsonl")
    call = ["bench", "eviction", "--traces", str(tmp_path), "--capacity", "6", "--capacity", "9", "--json"]
    code = run(call)
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["rows"]}
    assert code == (0 if document["ok"] else 1)
    played = {*LAB_POLICIES, "default"} - {"priority"}
    assert set(rows) == {f"chat {policy} {capacity}" for policy in played for capacity in (6, 9)}
    for name, row in rows.items():
        assert set(row["peers"]) == {"lru", "optimum"}
        assert (row["target"] is None) == ("default" not in name)
        assert 0.0 < row["value"] < 1.0


def test_no_folder_of_traces_means_no_rows_and_a_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = run_eviction_bench(None, (6,), None, lambda stage, detail: None)
    assert (report.ok, report.rows) == (True, ())
    assert "no trace" in report.notes[0]
    with pytest.raises(UsageError, match="no trace"):
        run_eviction_bench(tmp_path, (6,), None, lambda stage, detail: None)
