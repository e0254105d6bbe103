"""The demonstration's checks can fail: a right observation passes all of them, each planted fault fails the one it should."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import msgspec
import pytest

from copyhold.cluster.demo_checks import (
    Check,
    Latency,
    LatencyAttempt,
    Turn,
    check_explanations,
    check_isolation,
    check_latency,
    check_memory,
    check_pool,
    check_ranks,
    check_revocation,
    check_turns,
    common_prefix,
    expected_cached,
    rows_with_kv,
)


def turn(number: int, cached: int, expected: int) -> Turn:
    return Turn("acme", number, 100, cached, expected, 10.0, "text", f"rcp_{number}")


def explanation(cached: int) -> dict[str, Any]:
    lengths = {"semantic": cached + 5, "indexed": cached, "cap": 99, "runtime": cached}
    return {
        "prompt_tokens": 100,
        "cached_tokens": cached,
        "lengths": lengths if cached else lengths | {"semantic": 0, "indexed": 0},
        "limit": "indexed",
        "reason": "not_indexed",
        "explanation": "a sentence",
    }


RIGHT: dict[str, Any] = {
    "turns": [(1, 0, 0), (2, 64, 64), (3, 80, 80)],
    "latency": [(10.0, 11.0, 12.0), (100.0, 110.0, 90.0)],
    "isolation": {
        "b_first_cached": 0,
        "b_second_cached": 480,
        "a_again_cached": 480,
        "expected_cached_tokens": 480,
        "shared_blocks": [],
        "blocks_held": {"acme": 37, "bravo": 60},
    },
    "explain": (64, 0),
    "revocation": {
        "stream_error": "namespace_revoked",
        "tokens_before": 10,
        "events_after_error": 0,
        "certificate_ok": True,
        "certificate_outcome": "complete",
        "not_covered": ["backups"],
        "flipped_certificate_ok": False,
        "flipped_byte": 7,
        "certified_blocks_released": 5,
        "free_blocks_before": 10,
        "free_blocks_after": 14,
        "grown_blocks": 1,
        "ranks": [
            {
                "nonzero_bytes": 0,
                "inventory_after_blocks": 0,
                "blocks_released": 5,
                "blocks_zeroed": 6,
                "bytes_zeroed": 60,
            }
        ]
        * 2,
        "a_next_cached": 0,
        "generation_before": 1,
        "generation_after": 2,
        "old_receipt_error": "not_found",
        "b_blocks_before": [1, 2],
        "b_blocks_after": [1, 2],
        "b_cached": 32,
        "b_expected_cached": 32,
    },
    "agreement": {"ledgers": 3, "differing": 0, "compared_log_indices": 60},
    "findings": {"replica": [], "rank-0": [], "rank-1": []},
    "audit": [{"rows_compared": 100, "max_abs_difference": 1e-5}] * 2,
    "pool": {"free": 10, "evictable": 6, "live": 0, "reserved": 0, "total": 16},
    "memory": 2000.0,
}


def judged(seen: dict[str, Any]) -> dict[str, Check]:
    cached, cold = seen["latency"]
    checks = [
        check_turns("acme", [turn(*fields) for fields in seen["turns"]]),
        check_latency(Latency("acme", 100, (LatencyAttempt(cached, cold),))),
        *check_isolation(seen["isolation"]),
        *check_explanations(explanation(seen["explain"][0]), explanation(seen["explain"][1]), 16),
        *check_revocation(seen["revocation"]),
        *check_ranks(seen["agreement"], seen["findings"], seen["audit"], 2),
        check_pool(seen["pool"]),
        check_memory(seen["memory"]),
    ]
    return {check.name: check for check in checks}


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *folders, last = path.split(".")

    def plant(seen: dict[str, Any]) -> None:
        place: Any = seen
        for name in folders:
            place = place[int(name)] if isinstance(place, list) else place[name]
        place[int(last) if isinstance(place, list) else last] = value

    return plant


FAULTS: list[tuple[str, str, Callable[[dict[str, Any]], None]]] = [
    ("a hit that is one block short", "turns/acme", put("turns.1", (2, 48, 64))),
    ("a hit where nothing can be cached", "turns/acme", put("turns.0", (1, 16, 16))),
    ("reuse that never happens", "turns/acme", put("turns", [(1, 0, 0), (2, 0, 0)])),
    (
        "reuse that saves nothing",
        "first_token/acme",
        put("latency", [(90.0, 91.0, 92.0), (100.0, 110.0, 90.0)]),
    ),
    ("another tenant's prompt is warm", "isolation/first", put("isolation.b_first_cached", 16)),
    ("the second time is not warm", "isolation/second", put("isolation.b_second_cached", 0)),
    ("the owner lost its prefix", "isolation/owner", put("isolation.a_again_cached", 0)),
    ("a block of two tenants", "isolation/blocks", put("isolation.shared_blocks", [7])),
    ("an explained hit that was none", "explain/hit", put("explain", (0, 0))),
    ("an explained miss that was a hit", "explain/miss", put("explain", (64, 64))),
    ("an event after the revocation", "revocation/stream", put("revocation.events_after_error", 1)),
    ("a stream that ends as if nothing were", "revocation/stream", put("revocation.stream_error", "")),
    ("a certificate that does not verify", "revocation/certificate", put("revocation.certificate_ok", False)),
    (
        "an incomplete purge",
        "revocation/certificate",
        put("revocation.certificate_outcome", "fenced-incomplete"),
    ),
    (
        "a forged certificate that verifies",
        "revocation/forgery",
        put("revocation.flipped_certificate_ok", True),
    ),
    ("zeroing left out on one rank", "revocation/zeroed", put("revocation.ranks.1.nonzero_bytes", 4096)),
    (
        "blocks left behind on one rank",
        "revocation/zeroed",
        put("revocation.ranks.1.inventory_after_blocks", 1),
    ),
    ("fewer free blocks than certified", "revocation/free", put("revocation.free_blocks_after", 13)),
    ("the new generation is warm", "revocation/next", put("revocation.a_next_cached", 16)),
    ("the generation did not advance", "revocation/next", put("revocation.generation_after", 1)),
    (
        "a receipt outlives its generation",
        "revocation/receipts",
        put("revocation.old_receipt_error", "still there"),
    ),
    ("the other tenant lost a block", "revocation/others", put("revocation.b_blocks_after", [1])),
    ("a lost command", "ranks/ledgers", put("agreement.differing", 1)),
    ("a rank that was not compared", "ranks/ledgers", put("agreement.ledgers", 2)),
    ("too few comparisons", "ranks/ledgers", put("agreement.compared_log_indices", 49)),
    ("a block given to two requests", "ranks/audit", put("findings.rank-1", ["refcount_mismatch: block 3"])),
    ("a ledger that was not audited", "ranks/audit", put("findings", {"replica": []})),
    ("a corrupted K/V row", "ranks/kv", put("audit.1.max_abs_difference", 0.5)),
    ("a rank without compared rows", "ranks/kv", put("audit.1.rows_compared", 0)),
    ("a pool that does not reconcile", "pool", put("pool.free", 9)),
    (
        "blocks held by nobody",
        "pool",
        put("pool", {"free": 9, "evictable": 6, "live": 1, "reserved": 0, "total": 16}),
    ),
    ("too much memory", "memory", put("memory", 4000.0)),
]


def test_right_observations_pass_every_check() -> None:
    assert [check.name for check in judged(deepcopy(RIGHT)).values() if not check.ok] == []


@pytest.mark.parametrize(("fault", "name", "plant"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_a_planted_fault_fails_the_check_it_should(
    fault: str, name: str, plant: Callable[[dict[str, Any]], None]
) -> None:
    seen = deepcopy(RIGHT)
    seen["revocation"]["ranks"] = [dict(rank) for rank in seen["revocation"]["ranks"]]
    seen["audit"] = [dict(rank) for rank in seen["audit"]]
    plant(seen)
    failed = [check.name for check in judged(seen).values() if not check.ok]
    assert name in failed, fault


def test_every_check_has_a_fault_that_fails_it() -> None:
    assert set(judged(deepcopy(RIGHT))) == {name for _, name, _ in FAULTS}


def test_expected_hits_come_from_token_ids_alone() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert rows_with_kv([1, 2], [3, 4], stopped=True) == [1, 2, 3, 4]
    assert rows_with_kv([1, 2], [3, 4], stopped=False) == [1, 2, 3]
    assert expected_cached(list(range(33)), [list(range(40))], 16) == 32
    assert expected_cached(list(range(32)), [list(range(40))], 16) == 16, "the last token is computed"
    assert expected_cached(list(range(32)), [], 16) == 0
    assert msgspec.to_builtins(check_memory(1.0))["ok"]
