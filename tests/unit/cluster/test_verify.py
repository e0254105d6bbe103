"""``copyhold verify`` on a small checkpoint: all holds, every kind of reuse happened, and planted faults are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.actors import rank as rank_module
from copyhold.cluster import cli, verify_plan
from copyhold.cluster.demo_checks import Check
from copyhold.cluster.verify_measure import Compared, RunFound, judge
from copyhold.cluster.verify_plan import VerifyCase, verify_cases
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.commands import Dispatch, RowSpan
from copyhold.models.cold_run import ColdResult
from copyhold.models.config import ModelConfig
from copyhold.models.manifest import read_manifest

KINDS = {
    "one-shot",
    "chunked",
    "prefix hit",
    "warm",
    "after eviction",
    "preempted",
    "forked and cut back",
}
SHARED = {"shared reads, hydragen", "shared reads, chunk"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three KV heads, so that two ranks hold two and one."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("verify"), num_heads=6, num_kv_heads=3)


def run(source: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    arguments = ["verify", "--json", "--model", str(source), "--cache-dir", str(source.parent / "cache")]
    code = cli.run([*arguments, *options])
    return code, json.loads(capsys.readouterr().out)


def test_reuse_changes_nothing_and_really_happened(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(source, capsys)
    checks = document["checks"]
    assert code == 0 and document["ok"], [check for check in checks if not check["ok"]]
    by_case: dict[str, set[str]] = {}
    for check in checks:
        case, _, kind = check["name"].rpartition(": ")
        by_case.setdefault(case, set()).add(kind)
    del by_case[""]
    for case, kinds in by_case.items():
        assert kinds == (KINDS if "deterministic" in case else KINDS | SHARED), case
    assert {case[:4] for case in by_case} == {"tp 1", "tp 2", "tp 3"}
    totals = document["totals"]
    for name in (
        "cached_tokens",
        "shared_reads",
        "partial_chunks",
        "evicted",
        "preempted",
        "forks",
        "copies",
    ):
        assert totals[name] >= len(by_case), name
    assert 0 <= document["max_logit_deviation"]["float32"] <= document["bounds"]["float32"]
    bits = [check for check in checks if "deterministic" in check["name"]]
    assert bits and all(check["value"]["max_logit_deviation"] == 0 for check in bits)


def test_a_quick_run_has_the_smallest_cut_the_widest_and_two_cache_groups(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run(source, capsys, "--quick")
    assert code == 0
    assert {check["name"].split(":")[0] for check in document["checks"]} == {
        "tp 1, block 16, float32",
        "tp 3, block 16, float32",
        "tp 1, blocks 16+32, float32",
        "block 8",
    }


def test_a_checkpoint_that_is_not_there_is_a_wrong_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run(tmp_path / "nothing", capsys)
    assert code == 2 and not document["ok"]


@pytest.fixture
def only_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, one geometry: what a fault needs to be seen."""
    from copyhold.cluster import verify

    monkeypatch.setattr(verify, "verify_cases", lambda config, quick: [VerifyCase(1, 16, "float32")])


def failing(document: dict[str, Any]) -> set[str]:
    return {check["name"].rpartition(": ")[2] for check in document["checks"] if not check["ok"]}


@pytest.fixture
def last_pools(monkeypatch: pytest.MonkeyPatch) -> list[KVPool]:
    """Pools, one a cache group, of the rank that was made last, as it got them."""
    pools: list[KVPool] = []
    made = rank_module.Rank.__init__

    def noted(self, rank, incarnation, shard, pool, *others):
        pools[:] = shard.pools.pools
        made(self, rank, incarnation, shard, pool, *others)

    monkeypatch.setattr(rank_module.Rank, "__init__", noted)
    return pools


def hits(dispatch: Dispatch) -> list[RowSpan]:
    """Rows of prompts that begin behind what was cached."""
    return [span for span in dispatch.rows if span.start >= 64 and span.count > 1]


def assert_stale_rows_are_found(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = run(source, capsys)
    assert code == 1 and {"prefix hit", "warm"} <= failing(document)
    assert "one-shot" not in failing(document)
    assert any("stored rows differ" in check["detail"] for check in document["checks"])


def test_one_stale_row_in_a_cached_block_is_found(
    source: Path,
    only_one_case: None,
    last_pools: list[KVPool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Row 3 of a cached block holds what another token left there, in one layer, when a hit reads it."""
    honest = rank_module.step_batch

    def stale(ledger, dispatch, sample, block_size):
        batch = honest(ledger, dispatch, sample, block_size)
        for span in hits(dispatch):
            tile = int(ledger.tables[span.request.slot, 1])
            pool = last_pools[0]
            pool.v[1, tile, :, 3] = pool.v[1, tile, :, 4]
        return batch

    monkeypatch.setattr(rank_module, "step_batch", stale)
    assert_stale_rows_are_found(source, capsys)


def test_a_wrong_table_is_found(
    source: Path, only_one_case: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table names one block twice and another not at all. (Swapping two whole blocks is the same sum.)"""
    honest = rank_module.step_batch

    def doubled(ledger, dispatch, sample, block_size):
        batch = honest(ledger, dispatch, sample, block_size)
        if batch.num_seqs > 1 and batch.context_lens[1] > 2 * block_size:
            batch.block_tables[1, 1] = batch.block_tables[1, 0]
        return batch

    monkeypatch.setattr(rank_module, "step_batch", doubled)
    code, document = run(source, capsys)
    assert code == 1 and {"one-shot", "warm", "forked and cut back"} <= failing(document)


def test_a_lost_copy_is_found(
    source: Path, only_one_case: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(KVPool, "copy_rows", lambda pool, sources, targets, rows: None)
    code, document = run(source, capsys)
    assert code == 1 and failing(document) == {"forked and cut back"}


@pytest.fixture
def only_two_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer in blocks of 16, the second in blocks of 32."""
    from copyhold.cluster import verify

    case = VerifyCase(1, 16, "float32", other_block_sizes=(32,))
    monkeypatch.setattr(verify, "verify_cases", lambda config, quick: [case])


def test_two_cache_groups_are_both_hit_forked_copied_and_shared(
    source: Path, only_two_groups: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = run(source, capsys)
    assert code == 0 and document["not_applicable"] == []
    counts = {
        check["name"].rpartition(": ")[2]: check["value"]["counts"] for check in document["checks"][:-1]
    }
    assert set(counts) == KINDS | SHARED
    assert counts["forked and cut back"]["copies"] and counts["forked and cut back"]["other_copies"]
    for kind in ("prefix hit", "warm", "forked and cut back", *SHARED):
        assert counts[kind]["shared_reads"] and counts[kind]["other_shared_reads"], kind
    assert counts["prefix hit"]["cached_tokens"] % 32 == 0, "a page of the index is whole in both groups"
    assert counts["after eviction"]["evicted"] and counts["preempted"]["preempted"]
    rows = [check["value"]["rows_compared"] for check in document["checks"][:-1]]
    assert min(rows) > 0


def test_a_copy_that_is_lost_in_the_second_group_only_is_found(
    source: Path, only_two_groups: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = KVPool.copy_rows

    def lost(pool, sources, targets, rows):
        if pool.block_size == 16:
            honest(pool, sources, targets, rows)

    monkeypatch.setattr(KVPool, "copy_rows", lost)
    code, document = run(source, capsys)
    assert code == 1 and failing(document) == {"forked and cut back"}


def test_one_stale_row_in_a_cached_block_of_the_second_group_is_found(
    source: Path,
    only_two_groups: None,
    last_pools: list[KVPool],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Row 19 of a block of 32 holds what another token left there, V only, when a hit reads it."""
    honest = rank_module.other_rows

    def stale(ledger, dispatch, batch, block_sizes):
        for span in hits(dispatch):
            block = int(ledger.group_tables[1][span.request.slot, 1])
            (pool,) = [pool for pool in last_pools if pool.block_size == 32]
            pool.v[0, 2 * block + 1, :, 3] = pool.v[0, 2 * block + 1, :, 4]
        return honest(ledger, dispatch, batch, block_sizes)

    monkeypatch.setattr(rank_module, "other_rows", stale)
    assert_stale_rows_are_found(source, capsys)


def test_a_wrong_table_of_the_second_group_is_found(
    source: Path, only_two_groups: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names one block twice and another not at all; the first group's table is right."""
    honest = rank_module.other_rows

    def doubled(ledger, dispatch, batch, block_sizes):
        (rows,) = honest(ledger, dispatch, batch, block_sizes)
        if batch.num_seqs > 1 and batch.context_lens[1] > 2 * block_sizes[0]:
            rows.block_tables[1, 1] = rows.block_tables[1, 0]
        return (rows,)

    monkeypatch.setattr(rank_module, "other_rows", doubled)
    code, document = run(source, capsys)
    assert code == 1 and {"one-shot", "warm", "forked and cut back"} <= failing(document)


def test_a_rank_that_stops_is_a_finding_and_the_others_go_on(
    source: Path, only_one_case: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(pool, sources, targets, rows):
        raise AssertionError("no copy today")

    monkeypatch.setattr(KVPool, "copy_rows", refuse)
    code, document = run(source, capsys)
    assert code == 1 and failing(document) == {"forked and cut back"}
    (check,) = [check for check in document["checks"] if not check["ok"]]
    assert check["detail"] == "AssertionError: no copy today"


def found(logits: np.ndarray, tokens: tuple[int, ...] = (1,), **facts: Any) -> RunFound:
    cold = ColdResult((1,), (np.array([0.0, 4.0], np.float32),))
    stream = Compared(tokens, (logits,), cold)
    return RunFound("kind", (stream,), facts.pop("counts", {"copies": 1}), ("copies",), **facts)


CASE = VerifyCase(1, 16, "float32")


@pytest.mark.parametrize(
    ("case", "run_found", "named"),
    [
        (CASE, found(np.array([0.0, 4.0], np.float32), (0,)), "other tokens"),
        (CASE, found(np.array([0.0, 4.01], np.float32)), "logits differ"),
        (CASE, found(np.array([0.0, np.nan], np.float32)), "logits differ"),
        (CASE, found(np.array([0.0, 4.0], np.float32), counts={}), "did not happen: copies"),
        (
            CASE,
            found(np.array([0.0, 4.0], np.float32), rows_compared=1, row_difference=1.0, largest_row=2.0),
            "stored rows differ",
        ),
        (VerifyCase(1, 16, "float32", True), found(np.array([1e-8, 4.0], np.float32)), "other bits"),
    ],
)
def test_every_kind_of_difference_is_named(case: VerifyCase, run_found: RunFound, named: str) -> None:
    check = judge(case, run_found)
    assert not check.ok and named in check.detail


def test_equal_logits_hold() -> None:
    assert judge(CASE, found(np.array([0.0, 4.0], np.float32))) == Check(
        "tp 1, block 16, float32: kind",
        True,
        {
            "equal_streams": 1,
            "streams": 1,
            "max_logit_deviation": 0.0,
            "rows_compared": 0,
            "max_row_deviation": 0.0,
            "counts": {"copies": 1},
        },
        "logits within 1e-04",
    )


def test_a_model_with_one_kv_head_is_verified_on_one_rank(tmp_path: Path) -> None:
    made = make_tiny_checkpoint(tmp_path, num_kv_heads=1)
    from copyhold.models.convert import convert

    config: ModelConfig = read_manifest(convert(made, tmp_path / "cache", 1).path).config
    assert {case.tp for case in verify_cases(config, quick=False)} == {1}
    alone = msgspec.structs.replace(config, num_layers=1)
    assert not any(case.other_block_sizes for case in verify_cases(alone, quick=False))
    assert set(verify_plan.BOUNDS) == set(verify_plan.ROW_BOUND_SHARES)
