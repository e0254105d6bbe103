"""The ledger's benchmark: its peer is noted where it is missing, its growth is plotted, its loads measure what they say."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from copyhold.cluster.bench_ledger import BIG_POOLS, DECODING, growth_plot
from copyhold.cluster.bench_load import LONG_TOKENS, Bench
from copyhold.cluster.bench_process import PEERS_VARIABLE
from copyhold.cluster.bench_report import BenchReport, bench_row
from copyhold.cluster.bench_vllm import measure_vllm
from copyhold.kvcore.audit import audit


@pytest.fixture(autouse=True)
def _no_other_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PEERS_VARIABLE, raising=False)


def _environment(root: Path, script: str) -> Path:
    """A folder that looks like one where `make bench-peers` ran, with this interpreter and another script."""
    (root / ".venv-peers" / "bin").mkdir(parents=True)
    (root / ".venv-peers" / "bin" / "python").symlink_to(sys.executable)
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "vllm_ledger.py").write_text(script)
    return root


def test_a_missing_environment_is_a_note_and_no_figure(tmp_path: Path) -> None:
    figures, (note,) = measure_vllm(3, DECODING, BIG_POOLS, tmp_path)
    assert figures == {} and "make bench-peers" in note


def test_a_peer_is_asked_for_the_rows_that_are_measured(tmp_path: Path) -> None:
    echo = "import json, sys\nasked = json.loads(sys.argv[1])\nprint('noise')\nprint(json.dumps({'asked': asked['pools']}))"
    figures, notes = measure_vllm(3, DECODING, BIG_POOLS, _environment(tmp_path, echo))
    assert (figures, notes) == ({"vllm": {"asked": list(BIG_POOLS)}}, ())


def test_a_peer_that_fails_is_a_note_with_its_last_line(tmp_path: Path) -> None:
    broken = _environment(tmp_path, "raise SystemExit('no such wheel')")
    assert measure_vllm(3, (), (), broken) == ({}, ("vLLM was not measured: no such wheel",))


def test_growth_is_plotted_with_every_peer() -> None:
    names = [*(f"decode step {n}" for n in DECODING), *(f"pool {n}" for n in BIG_POOLS)]
    rows = tuple([bench_row(name, "us", [12.0], None, {"vllm": [900.0]}) for name in names])
    drawn = growth_plot(BenchReport("ledger", {}, {}, {}, (), rows))
    found = ElementTree.fromstring(drawn)
    lines = [element for element in found.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 4 and drawn.count("vllm") == 2
    assert [len(line.attrib["points"].split()) for line in lines] == [5, 5, 3, 3]


def test_loads_leave_a_ledger_that_the_audit_accepts() -> None:
    bench = Bench(4096, 256, LONG_TOKENS + 16)
    small = bench.running(16, 33)
    bench.fill(2048 + 64, 1024)
    life = bench.long_life_us()
    assert set(life) == {"allocate 32k", "fork 32k", "free 32k", "reject"} and min(life.values()) > 0
    assert len(bench.decode_us(small, 3)) == 3
    bench.fill(1024, 1024)
    assert bench.used() > 0.6 and bench.refused_us(bench.admit(LONG_TOKENS)) > 0
    audit(bench.ledger)
