"""A server that records: its logs replay to what it reported, and a revocation takes them along.

The same server's pools are sized from memory over two ranks of 2 + 1 KV heads, while a neighbour takes and returns 1 GiB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from live_cluster import LiveServer, copyhold, run_server, tiny_config, wait_until
from tiny_checkpoint import make_tiny_checkpoint

SECRET = "the harbour master's secret is seven ropes. " * 4


def _agreed(live: LiveServer) -> tuple[int, str]:
    """Log index and machine digest once scheduler, ranks and file stand at the same place."""

    def still() -> bool:
        replica = live.replica()
        recording = replica["recording"]
        return replica["agreement"]["last_log_index"] == recording["first_index"] + recording["records"]

    live.assert_quiet()
    wait_until(still)
    agreement = live.replica()["agreement"]
    return agreement["last_log_index"], agreement["last_machine_digest"]


def _replay(*arguments: str | Path) -> tuple[int, dict[str, object]]:
    done = copyhold("ledger", "replay", *map(str, arguments), "--json")
    return done.returncode, json.loads(done.stdout)


def _check_pool(live: LiveServer) -> None:
    """Case B34 (a): what the share is worth on the rank with two heads, whatever a neighbour does meanwhile."""
    block_bytes = (2 * 2 * 2 * 16 * 4 * 16, 2 * 2 * 1 * 16 * 4 * 16)
    pool = live.replica()["pool_size"]
    assert pool["num_blocks"] == 10**6 // block_bytes[0] == live.pool()["total"] == 122
    assert (pool["source"], pool["budget_bytes"]) == ("pool_mb", [10**6, 10**6])
    assert pool["block_bytes"] == list(block_bytes)
    assert pool["affordable_blocks"] == [122, 244]
    ranks = live.admin.ranks()["ranks"]
    assert [rank["pool_bytes"] for rank in ranks] == pool["used_bytes"]
    assert len({rank["layout"] for rank in ranks}) == 2 and all(rank["layout"] for rank in ranks)


def _check_trail(live: LiveServer, folder: Path) -> None:
    """What the operator did is exported and verified offline."""
    trail, head, key = folder / "trail", folder / "head", folder / "key"
    key.write_bytes(live.admin.public_key())
    where = "--admin-socket", str(live.supervisor.admin_socket)
    exported = copyhold("audit-trail", "export", "--out", str(trail), "--head", str(head), *where)
    assert exported.returncode == 0, exported.stderr
    arguments = "--head", str(head), "--public-key", str(key)
    verified = copyhold("audit-trail", "verify", str(trail), *arguments, "--json")
    assert json.loads(verified.stdout)["records"] == len(trail.read_bytes().splitlines()) > 10
    assert b"revocation_certified" in trail.read_bytes()


@pytest.fixture(scope="module")
def uneven_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven") / "model"
    return make_tiny_checkpoint(folder, num_heads=6, num_kv_heads=3, head_dim=16, hidden_size=96)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recorded") / "logs"


def test_logs_of_a_live_server_replay_and_a_revocation_takes_them_along(
    uneven_model: Path, model_cache: Path, logs: Path
) -> None:
    taker = [sys.executable, "-c", "held = bytearray(b'x') * (1 << 30); input(); del held; input()"]
    neighbour = subprocess.Popen(taker, stdin=subprocess.PIPE, text=True)
    config = tiny_config(uneven_model, model_cache, tp=2, pool_mb=1, max_model_len=1024, record_dir=str(logs))
    servers = run_server(config)
    live = next(servers)
    neighbour.communicate("\n\n", timeout=30.0)
    try:
        _check_pool(live)
        one, other = live.tenant(), live.tenant()
        assert live.replica()["recording"]["state"] == "on"
        one.client.complete(SECRET, max_tokens=4, ignore_eos=True)
        other.client.complete("Which ships came in today, and what did they carry?", max_tokens=4)
        before = _agreed(live)
        (first,) = logs.iterdir()
        kept = logs.parent / "before"
        kept.write_bytes(first.read_bytes())

        certificate = json.loads(live.admin.revoke(one.name))
        assert [outcome["detail"] for outcome in certificate["outcomes"]] == [
            "every rank gave evidence; recorded logs deleted: 1"
        ]
        assert not first.exists()
        recording = live.replica()["recording"]
        assert (recording["state"], recording["erased_files"]) == ("on", 1)
        other.client.complete("Which ships came in today?", max_tokens=4, ignore_eos=True)
        after = _agreed(live)
        audited = copyhold("ledger", "audit", "--admin-socket", str(live.supervisor.admin_socket), "--json")
        findings = json.loads(audited.stdout)["findings"]
        assert (audited.returncode, len(findings), any(findings.values())) == (0, 3, False)
        _check_trail(live, logs.parent)
    finally:
        for _ in servers:
            raise AssertionError("one server only")
    (second,) = logs.iterdir()
    assert second.stat().st_mode & 0o777 == 0o600

    code, whole = _replay(kept)
    assert (code, whole["records"], whole["machine_digest"]) == (0, *before)
    code, later = _replay(second, "--against", second)
    assert (code, later["machine_digest"]) == (0, after[1])
    assert later["first_index"] + later["records"] == after[0]  # type: ignore[operator]

    content = kept.read_bytes()
    damaged = logs.parent / "damaged"
    damaged.write_bytes(content[:-1])
    code, refused = _replay(damaged)
    assert (code, refused["refusal"]) == (
        1,
        {"reason": "log_truncated", "detail": f"log_truncated: record={before[0] - 1}"},
    )
    damaged.write_bytes(content[:-30] + bytes([content[-30] ^ 1]) + content[-29:])
    code, refused = _replay(damaged)
    assert code == 1 and f"record={before[0] - 1}" in json.dumps(refused["refusal"])


def test_recording_is_off_unless_asked_for(server: LiveServer) -> None:
    assert server.replica()["recording"]["state"] == "off"
