"""The serving benchmark on a live server and transformers on the tiny checkpoint: every measure yields its figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_cluster import LiveServer

from copyhold.cluster.bench_peer import PeerTask, measure_transformers
from copyhold.cluster.bench_plan import BenchPlan
from copyhold.cluster.bench_serve import Served, first_token_ms, measure_served, serve_rows
from copyhold.cluster.errors import BenchInvalid

PLAN = BenchPlan(runs=1, prompt_tokens=100, decode_prompt_tokens=20, new_tokens=12, batch=8)


def test_a_live_server_yields_every_row_once(server_tp1: LiveServer, tiny_model: Path) -> None:
    tenant = server_tp1.tenant()
    served = Served(tenant.client, server_tp1.admin, 300, 16, server_tp1.supervisor.pids)
    samples = measure_served(served, PLAN, lambda stage, detail: None)
    samples.start_s.append(1.0)
    peer = measure_transformers(PeerTask(str(tiny_model), ("bfloat16", "float32"), PLAN, 16))
    assert set(peer) == {"bfloat16", "float32"}
    for row in serve_rows(samples, "", True, peer["bfloat16"]):
        assert row.runs == 1 and row.value > 0
        assert set(row.peers) == ({"transformers"} if row.unit in ("tok/s", "ms") else set())
    assert samples.transport_share[0] < 1 and samples.pss_mib[0] > 100
    with pytest.raises(BenchInvalid, match="96 tokens were reused, 0 expected"):
        first_token_ms(served, PLAN.cold_prompt(0, 300), 0)
    server_tp1.assert_quiet()
