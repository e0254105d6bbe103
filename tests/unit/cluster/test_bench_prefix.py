"""``copyhold bench prefix``: the load, the churn and the peers' notes; figures themselves are no test."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from copyhold.cluster.bench_churn import Prefixes, Replica, play_churn
from copyhold.cluster.bench_prefix import _TARGETS
from copyhold.cluster.bench_prefix_load import BLOCK, make_churn, random_tokens, write_load
from copyhold.cluster.bench_prefix_peers import measure_peers
from copyhold.cluster.bench_process import PEERS_VARIABLE
from copyhold.kvcore.audit import audit

NAMED = ["match 32k", "match path 64", "miss", "publish 32k", "evict 1000", "churn", "bytes per block"]


def test_rows_have_the_names_and_targets_that_were_promised():
    assert set(NAMED) <= set(_TARGETS)
    promised = {name: target for name in NAMED if (target := _TARGETS[name][1]) is not None}
    assert {name: target.bound for name, target in promised.items()} == {
        "match 32k": 40,
        "match path 64": 80,
        "miss": 5,
        "publish 32k": 250,
        "evict 1000": 2000,
        "churn": 15_000,
        "bytes per block": 200,
    }


def test_a_load_is_the_same_for_everybody_and_travels_in_a_file(tmp_path: Path):
    churn, again = make_churn(50), make_churn(50)
    assert all(np.array_equal(one, two) for one, two in zip(churn.prompts(), again.prompts(), strict=True))
    loaded = np.load(write_load(tmp_path, churn, random_tokens(64, 1)))
    assert np.array_equal(loaded["tokens"], churn.tokens)


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_a_churn_evicts_keeps_its_books_and_hits_alike_in_steps_of_one_and_of_many(policy):
    churn = make_churn(240, tenants=6)
    rates = []
    for step_requests in (1, 8):
        replica, tenants, prompts = Replica(6, policy, 9_600), churn.tenants.tolist(), churn.prompts()
        for at in range(0, len(prompts), step_requests):
            replica.serve(tenants[at : at + step_requests], prompts[at : at + step_requests])
        audit(replica.ledger)
        gauge = replica.ledger.gauge()
        assert sum(replica.shares.all_held().values()) == gauge.total - gauge.free
        rates.append(replica.hit_tokens / replica.prompt_tokens)
    assert abs(rates[0] - rates[1]) < 0.05, "only cold first requests of one step miss each other"
    small = Replica(6, policy, 3_000)
    for tenant, prompt in zip(churn.tenants.tolist(), churn.prompts(), strict=True):
        small.serve([tenant], [prompt])
    assert small.evictor.report().evicted_blocks > 0
    audit(small.ledger)


def test_digests_change_no_hit():
    churn = make_churn(120, tenants=4)
    plain, routed = [play_churn(churn, "lru", digests=digests) for digests in (False, True)]
    assert plain.hit_rate == routed.hit_rate > 0.5


def test_a_prefix_cached_for_a_row_is_found_after_a_command_that_changes_nothing():
    prefixes, prompt = Prefixes(64, 256), random_tokens(128, 3)
    prefixes.cache(prompt)
    before = prefixes.ledger.committed_digest
    prefixes.stir()
    assert prefixes.ledger.committed_digest == before
    asked = np.concatenate([prompt, random_tokens(BLOCK, 4)])
    assert prefixes.ledger.probe(prefixes.scopes[0], asked.tobytes()).match.runtime == 128


def test_a_peer_that_is_not_installed_is_a_note_and_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(PEERS_VARIABLE, raising=False)
    found, notes = measure_peers(tmp_path / "load.npz", 1, 1, tmp_path)
    assert found == {}
    assert [note.partition(" ")[0] for note in notes] == ["vLLM", "SGLang"]
    assert msgspec.json.encode(notes)
