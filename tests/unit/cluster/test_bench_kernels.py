"""The kernel benchmark: turns, ratios, every row's name, and a peer that is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from copyhold.cluster import bench_attention, bench_kernels, bench_shared, bench_turns, cli
from copyhold.cluster.bench_attention import Shape
from copyhold.cluster.bench_report import Target
from copyhold.cluster.bench_shared import SharedShape
from copyhold.cluster.bench_turns import against, in_turns


def test_each_work_takes_its_turn_and_keeps_its_least() -> None:
    order: list[str] = []

    def work(name: str, seconds: list[float]):
        def least(calls: int) -> float:
            order.append(name)
            return seconds.pop(0)

        return least

    found = in_turns([work("a", [9, 3, 2, 5, 4]), work("b", [9, 7, 8, 6, 1])], rounds=2, repeats=2)
    assert order == ["a", "b"] * 5
    assert found == [[2, 4], [7, 1]]


def test_a_ratio_is_taken_round_by_round_and_told_in_ms_too() -> None:
    ratio, ms = against("copy", "memcpy", [0.002, 0.004], [0.001, 0.003], Target(0.6), faster=True)
    assert (ratio.name, ratio.value, ratio.meets) == ("copy", 0.625, True)
    assert (ms.name, ms.value, ms.unit, ms.peers) == ("copy ms", 3.0, "ms", {"memcpy": 2.0})
    slower, _ = against("decode", "torch", [0.002], [0.001], Target(0.95, at_least=False))
    assert (slower.value, slower.meets) == (2.0, False)


def test_the_command_prints_every_row_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Shape(batch=2, context=40, kv_heads=1, group=2, dim=16)
    for name in ("DECODE", "PREFILL", "SMOLLM2"):
        monkeypatch.setattr(bench_attention, name, small)
    monkeypatch.setattr(bench_turns, "REPEATS", 1)
    monkeypatch.setattr(bench_shared, "SHARED", SharedShape(4, 512, 20, 1, 2, 16, 1))
    monkeypatch.setattr(bench_kernels, "linear_rows", lambda rounds: [])
    monkeypatch.setattr(sys, "argv", ["copyhold", "bench", "kernels", "--runs", "1", "--no-peers", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    document = json.loads(capsys.readouterr().out)
    assert document["bench"] == "kernels" and ended.value.code == (0 if document["ok"] else 1)
    names = [row["name"] for row in document["rows"]]
    assert len(names) == len(set(names))
    timed = ("write", "copy", "zero", "decode fp32", "decode bf16", "prefill 512 on 1536", "shared 4x512")
    assert {*timed, *(f"{name} ms" for name in timed), "read bandwidth share", "memory read"} <= set(names)
    assert all(row["value"] > 0 for row in document["rows"])


def test_a_peer_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COPYHOLD_PEERS", str(tmp_path))
    rows, notes = bench_attention._beside_vllm(1)
    assert rows == [] and "make bench-peers" in notes[0]


def test_a_peer_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 'no such kernel' >&2\n")
    python.chmod(0o755)
    monkeypatch.setenv("COPYHOLD_PEERS", str(tmp_path))
    monkeypatch.setattr(bench_attention, "DECODE", Shape(batch=1, context=16, kv_heads=1, dim=16))
    assert bench_attention._beside_vllm(1) == ([], ("vLLM's kernel was not measured: no such kernel",))


def test_a_peer_that_ends_between_two_turns_is_a_note_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho 1.0\nread calls\necho 0.5\nread calls\necho 'out of memory' >&2\n")
    python.chmod(0o755)
    monkeypatch.setenv("COPYHOLD_PEERS", str(tmp_path))
    monkeypatch.setattr(bench_attention, "DECODE", Shape(batch=1, context=16, kv_heads=1, dim=16))
    rows, (note,) = bench_attention._beside_vllm(1)
    assert rows == [] and note.endswith("ended: out of memory")
