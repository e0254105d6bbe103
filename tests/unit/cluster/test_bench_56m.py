"""Rows of the 56M model: what is sent, who takes turns, what does not count, and a checkpoint that both readers accept."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from copyhold.cluster import bench_serve
from copyhold.cluster.bench_56m import Plan56m, Samples56m, ServedSubject, alternate, rows_56m, shared_share
from copyhold.cluster.bench_checkpoint import CONFIG_56M, random_llama
from copyhold.cluster.bench_plan import BenchPlan
from copyhold.cluster.bench_process import PEERS_VARIABLE, Peer
from copyhold.cluster.bench_serve import SHAPES, run_serve_bench
from copyhold.cluster.bench_vllm_serve import Measure, VllmEngine
from copyhold.cluster.config import Config
from copyhold.cluster.errors import BenchInvalid
from copyhold.models.convert import convert
from copyhold.models.tokenizer import ChatTokenizer

NAMES = ["56m decode 1", "56m decode 8", "56m first token cached", "56m shared 8x1792", "56m shared steps"]


class Recorder:
    """A subject that answers as told and keeps what it was asked."""

    def __init__(self, name: str, log: list[tuple[str, int, int, int | None]], decode_s: float = 0.5) -> None:
        self.name, self.log, self.decode_s = name, log, decode_s
        self.shared = 0

    def measure(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, cached_tokens: int | None
    ) -> Measure:
        self.log.append((self.name, len(prompts), len(prompts[0]), cached_tokens))
        return Measure(0.1, self.decode_s)

    def attention_steps(self) -> tuple[int, int]:
        self.shared += 63
        return self.shared, self.shared + 5


def test_subjects_take_turns_and_prompts_are_new_where_they_must_be() -> None:
    log: list[tuple[str, int, int, int | None]] = []
    ours, theirs = Recorder("ours", log), Recorder("vllm", log, 1.0)
    found = alternate(Plan56m(runs=1), cast(ServedSubject, ours), theirs, lambda stage, detail: None)
    assert [name for name, *_ in log] == ["ours", "ours", "vllm", "vllm", *["ours", "vllm"] * 4]
    assert log[4::2] == [
        ("ours", 1, 128, None),
        ("ours", 8, 128, None),
        ("ours", 1, 2048, 1792),
        ("ours", 8, 1808, 1792),
    ]
    assert found[0].decode_8 == [8 * 63 / 0.5] and found[1].decode_8 == [8 * 63 / 1.0]
    assert found[0].first_cached_ms == [100.0] and found[0].shared_steps == [1.0]
    plan = Plan56m()
    firsts = [
        prompt[1792] for run in range(5) for prompt in (*plan.shared_prompts(run), plan.long_prompt(run))
    ]
    assert len(set(firsts)) == len(firsts) and plan.prefix() == plan.long_prompt(3)[:1792]


def test_targets_are_the_peers_medians_of_the_same_call() -> None:
    ours = Samples56m([100.0], [800.0], [90.0], [500.0], [1.0])
    rows = rows_56m(ours, Samples56m([90.0, 110.0, 95.0], [900.0], [90.0], [450.0]))
    assert [row.name for row in rows] == NAMES
    assert [row.target for row in rows] == [95.0, 900.0, 90.0, pytest.approx(495.0), None]
    assert [row.meets for row in rows] == [True, False, True, True, None]
    assert [row.peers for row in rows[:2]] == [{"vllm": 95.0}, {"vllm": 900.0}]
    assert all(row.target is None and row.peers == {} for row in rows_56m(ours, Samples56m()))


def test_a_shared_batch_counts_only_if_its_steps_shared() -> None:
    assert shared_share(60, 64) == 60 / 64
    for shared, steps in ((0, 64), (51, 64), (0, 0)):
        with pytest.raises(BenchInvalid, match=f"{shared} of {steps} steps"):
            shared_share(shared, steps)


def test_parts_are_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_serve, "_subprocess", lambda task, kind: {"folder": "/random"})
    monkeypatch.setattr(bench_serve, "measure_shape", lambda *given: pytest.fail("no server of the model"))
    monkeypatch.setattr(bench_serve, "measure_56m", lambda config, folder, *given: ([], [str(folder)]))
    report = run_serve_bench(Config(), SHAPES, BenchPlan(), True, lambda stage, detail: None, ("56m",))
    assert report.notes == ("/random",) and report.settings["plan_56m"]["prefix_tokens"] == 1792


def test_a_peer_that_is_missing_or_ends_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(PEERS_VARIABLE, raising=False)
    peer = Peer("vLLM", "vllm_serve.py", tmp_path)
    assert not peer.is_installed
    for path in (peer.path, peer.python):
        path.parent.mkdir(parents=True)
    peer.python.symlink_to(sys.executable)
    peer.path.write_text(
        "import sys\nprint('{}', flush=True)\nsys.stdin.readline()\nsys.exit('no such wheel')\n"
    )
    assert peer.is_installed
    with VllmEngine(tmp_path, 1, peer) as engine, pytest.raises(BenchInvalid, match="no such wheel"):
        engine.measure([[1]], 1, None)


def test_the_random_model_is_equal_each_time_and_converts(tmp_path: Path) -> None:
    small = CONFIG_56M | {
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "vocab_size": 700,
        "intermediate_size": 64,
    }
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    first, second = (random_llama(tmp_path, small, name) for name in ("a", "b"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert random_llama(tmp_path, None, "a") == first and sorted(p.name for p in tmp_path.iterdir()) == [
        "a",
        "b",
    ]
    checkpoint = convert(first, tmp_path / "cache", 1, None, "bfloat16")
    assert checkpoint.config.vocab_size == 700 and not checkpoint.config.tied_embeddings
    tokenizer = ChatTokenizer.load(checkpoint.path)
    assert tokenizer.decode([699]).isalpha()
