"""Stores that die or go away under a real server, what it says of itself meanwhile, and its drain."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis
from live_cluster import LiveServer, Tenant, copyhold, run_server, tiny_config
from prometheus_client.parser import text_string_to_metric_families
from store_servers import OutsideStore, outside_store

from copyhold.cluster.metrics import METRICS
from copyhold.cluster.sdk import ServiceUnavailable
from copyhold.namespace.certificate import parse_certificate
from copyhold.namespace.leases import LEASE_S
from copyhold.namespace.store import open_client

BACK_WITHIN_S = 2.0
BAD_WITHIN_S = 10.0
GOOD_WITHIN_S = 60.0
CANARY = "The heron counts seventeen brass buttons under the old quay."
LONG = [{"role": "user", "content": CANARY}]


@pytest.fixture(scope="module")
def embedded(tiny_model: Path, model_cache: Path) -> Iterator[LiveServer]:
    """One rank and the two embedded stores, which are killed."""
    yield from run_server(tiny_config(tiny_model, model_cache, tp=1))


@pytest.fixture(scope="module")
def authority_store() -> Iterator[OutsideStore]:
    with outside_store() as store:
        yield store


@pytest.fixture(scope="module")
def sessions_store() -> Iterator[OutsideStore]:
    with outside_store("--appendonly", "yes", "--appendfsync", "always") as store:
        yield store


@pytest.fixture(scope="module")
def outside(
    tiny_model: Path, model_cache: Path, authority_store: OutsideStore, sessions_store: OutsideStore
) -> Iterator[LiveServer]:
    """One rank and two stores that are not the server's own."""
    stores = {"authority_store": authority_store.url, "sessions_store": f"{sessions_store.url}/1"}
    yield from run_server(tiny_config(tiny_model, model_cache, tp=1, **stores))


def within(seconds: float, condition: Callable[[], bool], what: str) -> None:
    """Ask until it holds; the short pause only paces the questions."""
    deadline_s = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {seconds:g} s"
        pause.wait(0.02)


def readiness(server: LiveServer) -> int:
    return httpx.get(f"{server.url}/health/ready", timeout=8.0).status_code


def models(server: LiveServer, tenant: Tenant) -> int:
    headers = {"authorization": f"Bearer {tenant.key}"}
    return httpx.get(f"{server.url}/v1/models", headers=headers, timeout=30.0).status_code


def explain(server: LiveServer, tenant: Tenant, receipt_id: str) -> int:
    headers = {"authorization": f"Bearer {tenant.key}"}
    return httpx.get(f"{server.url}/v1/explain/{receipt_id}", headers=headers, timeout=30.0).status_code


def figures(server: LiveServer) -> dict[tuple[str, str], float]:
    """Values of /metrics by name and kind (empty where there is none), replicas and ranks summed."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(server.admin.metrics()):
        for sample in family.samples:
            key = (sample.name, sample.labels.get("kind", ""))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def kill_store(server: LiveServer, name: str) -> None:
    client = open_client(str(server.supervisor.run_dir / f"{name}.sock"))
    facts = dict(client.info("server"))  # pyright: ignore[reportArgumentType, reportCallIssue]
    client.close()
    os.kill(int(facts["process_id"]), signal.SIGKILL)


def answers(server: LiveServer, name: str) -> bool:
    client = open_client(str(server.supervisor.run_dir / f"{name}.sock"))
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


# -- embedded stores ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["authority", "sessions"])
def test_a_killed_embedded_store_is_back_and_a_running_stream_never_notices(
    embedded: LiveServer, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tenant = embedded.tenant()
    before = tenant.client.chat(LONG, max_tokens=4)
    incarnation = embedded.replica()["incarnation"]
    with tenant.client.stream(LONG, max_tokens=400, ignore_eos=True) as stream:
        next(stream)
        kill_store(embedded, name)
        within(BACK_WITHIN_S, lambda: answers(embedded, name), f"the {name} store's return")
        assert stream.reply().completion_tokens == 400
    within(BAD_WITHIN_S, lambda: readiness(embedded) == 200, "readiness")
    assert tenant.client.chat(LONG, max_tokens=4).text == before.text, "its key outlived the store's process"
    assert explain(embedded, tenant, before.receipt_id) == 200
    assert embedded.replica()["incarnation"] == incarnation, "no replica was replaced"
    assert f"supervisor: the {name} store ended by signal SIGKILL; it answers again" in capfd.readouterr().err
    embedded.assert_quiet()


def test_a_revocation_after_a_killed_store_is_complete(embedded: LiveServer) -> None:
    tenant = embedded.tenant()
    tenant.client.chat(LONG, max_tokens=4)
    kill_store(embedded, "authority")
    kill_store(embedded, "sessions")
    within(BACK_WITHIN_S, lambda: answers(embedded, "sessions"), "the sessions store's return")
    within(BACK_WITHIN_S, lambda: answers(embedded, "authority"), "the authority store's return")
    within(BAD_WITHIN_S, lambda: readiness(embedded) == 200, "readiness")
    certificate = parse_certificate(embedded.admin.revoke(tenant.name, 0.0))
    assert certificate.outcome == "complete"
    assert figures(embedded)["copyhold_revocations_total", "complete"] >= 1


def test_metrics_count_what_happened_and_tell_nothing_of_a_tenant(embedded: LiveServer) -> None:
    tenant = embedded.tenant()
    before = figures(embedded)
    cold = tenant.client.chat(LONG, max_tokens=8, ignore_eos=True)
    warm = tenant.client.chat(LONG, max_tokens=8, ignore_eos=True)
    with tenant.client.stream(LONG, max_tokens=400, ignore_eos=True, return_token_ids=True) as stream:
        next(stream)
    bad = httpx.get(f"{embedded.url}/v1/models", headers={"authorization": "Bearer ch_nobody"})
    assert bad.status_code == 401
    within(
        5.0, lambda: figures(embedded)["copyhold_requests_running", ""] == 0, "the cancelled request's end"
    )
    text = embedded.admin.metrics()
    after = figures(embedded)
    assert {name for name, _ in after} <= {spec.name for spec in METRICS}

    def grown(name: str, kind: str = "") -> float:
        return after.get((name, kind), 0.0) - before.get((name, kind), 0.0)

    assert grown("copyhold_requests_admitted_total") == 3
    assert grown("copyhold_requests_finished_total", "length") == 2
    assert grown("copyhold_requests_failed_total", "cancelled") == 1
    assert grown("copyhold_prompt_tokens_total") == 3 * cold.prompt_tokens
    assert grown("copyhold_cached_tokens_total") == 2 * warm.cached_tokens > 0
    assert grown("copyhold_generated_tokens_total") >= 16
    assert grown("copyhold_authorizations_refused_total", "unauthenticated") == 1
    assert after["copyhold_steps_total", ""] == after["copyhold_rank_steps_total", ""] > 0
    assert after["copyhold_step_seconds_total", ""] >= after["copyhold_execution_seconds_total", ""] > 0
    assert after["copyhold_differing_log_indices_total", ""] == after["copyhold_open_streams", ""] == 0
    assert after["copyhold_leases", ""] == after["copyhold_replica_serving", ""] == 1
    pool = embedded.pool()
    for kind in ("free", "evictable", "live", "reserved"):
        assert after["copyhold_pool_blocks", kind] == pool[kind]

    status = embedded.admin.status()
    replica = status["replicas"][0]
    secrets = [tenant.name, tenant.key, *tenant.key.split("_")[1:], warm.receipt_id, "nobody"]
    secrets += [status["cluster_id"], replica["incarnation"], replica["agreement"]["last_machine_digest"]]
    secrets += [*CANARY.rstrip(".").split(), *warm.text.split()]
    ids = embedded.tokenizer.apply_chat_template(LONG)
    secrets += [f"{a}, {b}" for a, b in itertools.pairwise(ids)]
    words = set(text.replace("{", " ").replace("}", " ").replace('"', " ").split())
    documented = {word for spec in METRICS for word in f"{spec.name} {spec.doc} HELP TYPE".split()}
    for secret in secrets:
        assert secret not in words - documented, secret
        assert len(secret) < 6 or secret in documented or secret not in text, secret
    assert httpx.get(f"{embedded.url}/metrics").status_code == 404, "not on the tenant port"


# -- stores of others --------------------------------------------------------------------------------------------


def test_an_authority_store_that_goes_away_closes_the_door_and_no_stream(
    outside: LiveServer, authority_store: OutsideStore
) -> None:
    tenant = outside.tenant()
    assert tenant.client.chat(LONG, max_tokens=4).completion_tokens == 4
    with tenant.client.stream(LONG, max_tokens=300, ignore_eos=True) as stream:
        next(stream)
        authority_store.stop()
        within(BAD_WITHIN_S, lambda: readiness(outside) == 503, "bad readiness")
        with pytest.raises(ServiceUnavailable) as refused:
            tenant.client.chat(LONG, max_tokens=4)
        assert (refused.value.status, refused.value.code) == (503, "service_unavailable")
        shown = figures(outside)
        assert (shown["copyhold_authority_up", ""], shown["copyhold_authority_store_up", ""]) == (1, 0)
        assert shown["copyhold_replica_serving", ""] == 1
        assert shown["copyhold_authorizations_refused_total", "unavailable"] >= 1
        assert stream.reply().completion_tokens == 300, "what ran goes on"
    authority_store.start()
    within(GOOD_WITHIN_S, lambda: readiness(outside) == 200, "good readiness")
    assert tenant.client.chat(LONG, max_tokens=4).cached_tokens > 0, "the pool was kept"


def test_a_sessions_store_that_goes_away_costs_receipts_and_no_answer(
    outside: LiveServer, sessions_store: OutsideStore
) -> None:
    tenant = outside.tenant()
    kept = tenant.client.chat(LONG, max_tokens=4)
    assert explain(outside, tenant, kept.receipt_id) == 200
    lost = outside.replica()["receipts_lost"]
    sessions_store.stop()
    answer = tenant.client.chat(LONG, max_tokens=4)
    assert answer.text == kept.text
    assert outside.replica()["receipts_lost"] > lost
    assert figures(outside)["copyhold_receipts_lost_total", ""] == outside.replica()["receipts_lost"]
    assert explain(outside, tenant, kept.receipt_id) == 503
    assert readiness(outside) == 200, "answers need no receipts"
    sessions_store.start()
    within(BAD_WITHIN_S, lambda: explain(outside, tenant, kept.receipt_id) == 200, "the receipt's return")
    assert explain(outside, tenant, answer.receipt_id) == 404, "a lost receipt stays lost"
    again = tenant.client.chat(LONG, max_tokens=4)
    assert explain(outside, tenant, again.receipt_id) == 200


def test_an_outage_longer_than_the_lease_ends_streams_and_leaves_a_complete_revocation(
    outside: LiveServer, authority_store: OutsideStore
) -> None:
    tenant = outside.tenant()
    tenant.client.chat(LONG, max_tokens=4)
    incarnation = outside.replica()["incarnation"]
    authority_store.stop()
    within(
        LEASE_S + BAD_WITHIN_S,
        lambda: not figures(outside).get(("copyhold_replica_serving", ""), 0.0),
        "the loss of the lease",
    )
    assert figures(outside)["copyhold_leases", ""] == 0
    authority_store.start()
    within(GOOD_WITHIN_S, lambda: readiness(outside) == 200, "good readiness")
    assert outside.replica()["incarnation"] != incarnation, (
        "the pool of a lost lease is gone with its processes"
    )
    assert tenant.client.chat(LONG, max_tokens=4).cached_tokens == 0
    within(BAD_WITHIN_S, lambda: figures(outside)["copyhold_recoveries_total", ""] == 1, "the count")
    certificate = parse_certificate(outside.admin.revoke(tenant.name, 0.0))
    assert certificate.outcome == "complete"
    assert sorted(entry.outcome for entry in certificate.outcomes) == ["confirmed", "ended"]


def test_a_drain_lets_running_requests_finish_and_says_when_nothing_runs(outside: LiveServer) -> None:
    tenant = outside.tenant()
    socket = ("--admin-socket", outside.supervisor.admin_socket)
    with tenant.client.stream(LONG, max_tokens=300, ignore_eos=True) as stream:
        next(stream)
        early = outside.admin.drain()
        assert not early["quiet"] and early["open_streams"] == 1
        with pytest.raises(ServiceUnavailable):
            tenant.client.chat(LONG, max_tokens=4)
        assert models(outside, tenant) == 200
        assert readiness(outside) == 503
        status = json.loads(copyhold("status", *socket, "--json").stdout)
        assert status["draining"] and status["gateway"]["draining"] and status["replicas"][0]["draining"]
        assert stream.reply().completion_tokens == 300
    done = copyhold("drain", *socket, "--wait-s", "20", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["quiet"]
    assert "draining: True" in copyhold("status", *socket).stdout
    outside.assert_quiet()
