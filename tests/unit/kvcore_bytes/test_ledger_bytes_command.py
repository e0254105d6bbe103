"""The documents of `copyhold ledger bytes`: given lengths, and a server's pools."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from copyhold.cluster.errors import UsageError
from copyhold.cluster.ledger_bytes import (
    PoolFiguresUnusable,
    RowGeometry,
    group_ledger_bytes,
    ledger_bytes,
    ledger_bytes_text,
    parse_group,
    parse_numbers,
    server_ledger_bytes,
)

EXAMPLE = RowGeometry(num_layers=32, kv_heads=4, head_dim=128, k_dtype="bfloat16", v_dtype="bfloat16")


def _pool(**changes: Any) -> dict[str, Any]:
    gauge = {"free": 5, "evictable": 2, "live": 3, "reserved": 2, "total": 12, "log_index": 9}
    return {"replicas": [{**gauge, "namespaces": {"a": [1, 2, 3]}, **changes}]}


def _ranks(*pool_bytes: int) -> dict[str, Any]:
    return {"ranks": [{"rank": rank, "pool_bytes": size} for rank, size in enumerate(pool_bytes)]}


def test_lengths_give_the_worked_figures() -> None:
    (rank,) = ledger_bytes([33, 25, 16], EXAMPLE, [64, 48, 32])["ranks"]
    assert rank["row_bytes"] == 65536
    assert rank["rectangular"]["reserved"] == 9437184 and rank["rectangular"]["slack_rows"] == 70
    assert rank["request_view"]["references"] == 6 and rank["request_view"]["tail_slots"] == 22
    assert rank["unique_physical"]["blocks"] == 6 and rank["savings"] == {"payload": 0, "capacity": 0}
    for whole, *parts in rank["identities"].values():
        assert whole == sum(parts)


def test_whole_blocks_of_a_shared_prefix_are_stored_once() -> None:
    (rank,) = ledger_bytes([33, 40, 35], EXAMPLE, shared_rows=31)["ranks"]
    assert rank["unique_physical"]["blocks"] == 3 * 2 + 1 and rank["unique_physical"]["rows"] == 108 - 2 * 16
    assert rank["savings"] == {"payload": 2 * 16 * 65536, "capacity": 2 * 16 * 65536}


def test_uneven_ranks_have_rows_of_their_own() -> None:
    document = ledger_bytes([100], RowGeometry(ranks=2))
    assert [rank["row_bytes"] for rank in document["ranks"]] == [2 * 30 * 2 * 64 * 4, 2 * 30 * 1 * 64 * 4]
    assert json.loads(json.dumps(document)) == document


def test_no_request_is_an_answer() -> None:
    (rank,) = ledger_bytes([], EXAMPLE)["ranks"]
    assert rank["rectangular"]["reserved"] == rank["unique_physical"]["capacity"] == 0


@pytest.mark.parametrize(
    ("lengths", "geometry", "options"),
    [
        ([-1], EXAMPLE, {}),
        ([2**31], EXAMPLE, {}),
        ([2**31 - 1], EXAMPLE, {}),
        ([9], RowGeometry(ranks=4), {}),
        ([9], RowGeometry(ranks=0), {}),
        ([9], RowGeometry(k_dtype="float12"), {}),
        ([9], RowGeometry(block_size=0), {}),
        ([9], RowGeometry(num_layers=0), {}),
        ([9], EXAMPLE, {"reserved_rows": [8]}),
        ([9], EXAMPLE, {"reserved_rows": [8, 8]}),
        ([9], EXAMPLE, {"shared_rows": 10}),
        ([], EXAMPLE, {"shared_rows": 1}),
        ([9], EXAMPLE, {"shared_rows": -1}),
    ],
)
def test_wrong_calls_are_usage_errors(
    lengths: list[int], geometry: RowGeometry, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        ledger_bytes(lengths, geometry, **options)


def test_cache_groups_sum_up_and_share_whole_pages_of_the_index() -> None:
    base = RowGeometry(kv_heads=2, head_dim=8, ranks=2)
    groups = [parse_group("full:3:16", base), parse_group("coarse:1:24:4:16", base)]
    assert groups[1][1] == RowGeometry(1, 4, 16, "float32", "float32", 24, 2)
    document = group_ledger_bytes([100, 100], groups, shared_rows=99)
    assert (document["alignment"], document["shared_rows"]) == (48, 96)
    assert document["groups"][0]["ranks"] == ledger_bytes([100, 100], groups[0][1], None, 96)["ranks"]
    for total in document["totals"]:
        parts = [group["ranks"][total["rank"]] for group in document["groups"]]
        assert total["stored"] == sum(part["unique_physical"]["capacity"] for part in parts) > 0
        assert total["avoided"] == sum(part["savings"]["capacity"] for part in parts) > 0
    text = ledger_bytes_text(document)
    assert "cache group coarse" in text and "all cache groups" in text and "rank 1" in text


@pytest.mark.parametrize(
    "text", ["full", "full:3", ":3:16", "full:3:16:4", "full:0:16", "full:x:16", "full:3:-1"]
)
def test_a_senseless_group_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--group"):
        parse_group(text, RowGeometry())


def test_groups_have_distinct_names_and_equal_ranks() -> None:
    one = RowGeometry()
    with pytest.raises(UsageError, match="distinct"):
        group_ledger_bytes([5], [("a", one), ("a", one)])
    with pytest.raises(UsageError, match="same ranks"):
        group_ledger_bytes([5], [("a", one), ("b", RowGeometry(ranks=2))])


def test_numbers_of_an_option() -> None:
    assert parse_numbers("33, 25,16", "--lengths") == (33, 25, 16)
    for text in ("", "1,,2", "1.5", "-3", "x", "٣"):
        with pytest.raises(UsageError, match="--lengths"):
            parse_numbers(text, "--lengths")


def test_a_servers_pools_reconcile_on_every_rank() -> None:
    document = server_ledger_bytes(_pool(), _ranks(12 * 4096, 12 * 2048))
    (replica,) = document["replicas"]
    for rank, block in zip(replica["ranks"], (4096, 2048), strict=True):
        assert rank["block_bytes"] == block and rank["held_bytes"] == rank["total_bytes"] == 12 * block
        assert sum(rank["bytes"].values()) == rank["total_bytes"]
        assert rank["bytes"]["live"] == 3 * block and rank["namespaces"] == {"a": 3 * block}
    text = ledger_bytes_text(document)
    assert "replica 0, rank 1: 2048 bytes a block" in text and "held by the process" in text


@pytest.mark.parametrize(
    ("pool", "ranks"),
    [
        (_pool(free=6), _ranks(12)),
        (_pool(total=0, free=0, evictable=0, live=0, reserved=0), _ranks(12)),
        (_pool(), _ranks(13)),
        (_pool(), {"ranks": [{"name": "r-0", "failure": "lost"}]}),
        ({"replicas": []}, _ranks(12)),
        ({"replicas": [*_pool()["replicas"], *_pool()["replicas"]]}, _ranks(12)),
        ({}, _ranks(12)),
        (_pool(live="3"), _ranks(12)),
    ],
)
def test_answers_that_contradict_themselves_are_refused(pool: dict[str, Any], ranks: dict[str, Any]) -> None:
    with pytest.raises(PoolFiguresUnusable):
        server_ledger_bytes(pool, ranks)


def test_text_lines_up_and_imports_stay_light() -> None:
    text = ledger_bytes_text(ledger_bytes([33, 25, 16], EXAMPLE, [64, 48, 32]))
    assert "rank 0: 65536 bytes a row" in text and "  slack" in text and "4587520" in text
    code = (
        "import sys, copyhold.cluster.ledger_bytes; "
        "print([name for name in ('ray', 'torch', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
