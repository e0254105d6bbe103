"""`/metrics`: documented names, few labels, true figures, and nothing of any tenant; the drain that closes the door."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from byte_model import MODEL
from live_server import LiveServer
from prometheus_client.parser import text_string_to_metric_families
from scripted_backend import ScriptedBackend

from copyhold.actors.errors import ServiceUnavailable
from copyhold.actors.messages import Admitted, Failed, Finished, ReuseReceipt, TokenChunk
from copyhold.actors.request_counts import RequestCounts
from copyhold.cluster.admin_app import create_admin_app
from copyhold.cluster.http_admission import Admission
from copyhold.cluster.http_app import create_tenant_app
from copyhold.cluster.http_schema import GatewaySettings
from copyhold.cluster.http_stream import OpenStreams
from copyhold.cluster.metrics import METRICS, GatewayFigures, exposition
from copyhold.models.tokenizer import ChatTokenizer

CANARY = "canary"
LABELS = ("replica", "rank", "kind")
SHARED_READS = {
    "steps": {"plain": 3, "shared": 2},
    "logical_rows": 50,
    "physical_rows": 20,
    "samples": 2,
    "measured_gain": 1.5,
}
RANK = {
    "rank": 0,
    "pid": 1,
    "steps": 4,
    "log_index": 9,
    "pool_bytes": 1,
    "failure": CANARY,
    "shared_reads": SHARED_READS,
}
REPLICA = {
    "replica": "replica-3",
    "incarnation": CANARY,
    "serving": True,
    "failure": CANARY,
    "running": 2,
    "waiting": 1,
    "preemptions": 5,
    "receipts_lost": 6,
    "agreement": {"compared_log_indices": 7, "differing": 0, "last_machine_digest": CANARY},
    "times": {"steps": 8, "step_s": 1.5, "execution_s": 1.25},
    "requests": {
        "admitted": 10,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "generated_tokens": 30,
        "finished": {"stop": 3, "length": 4},
        "failed": {"cancelled": 1},
        "unproved_routes": 2,
    },
    "lease_remaining_s": 7.5,
    "pool": {"free": 1, "evictable": 2, "live": 3, "reserved": 4, "total": 10},
    "kernels": {
        "backend": "cpu",
        "considered": [
            {"backend": "cpu", "outcome": "selected", "why": CANARY},
            {"backend": "reference", "outcome": "not_needed", "why": CANARY},
        ],
    },
    "ranks": [RANK, {"name": CANARY, "serving": False, "failure": CANARY}],
    "namespaces": {CANARY: {"generation": 1}},
}
LOST = {"replica": "replica-4", "name": CANARY, "serving": False, "failure": CANARY, "ranks": []}
FLEET = {"store_up": True, "replicas": [REPLICA, LOST], "revocations": {"complete": 2}, "recoveries": 1}
GATEWAY = GatewayFigures(open_streams=3, draining=False, refused={"unauthenticated": 4})

Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(text: bytes | str) -> Samples:
    """Values by exposed name and label values."""
    shown = text.decode() if isinstance(text, bytes) else text
    return {
        (sample.name, tuple(sample.labels[name] for name in LABELS if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
    }


def test_every_documented_metric_is_exposed_with_its_figure() -> None:
    shown = samples(exposition(FLEET, GATEWAY))
    assert {name for name, _ in shown} == {spec.name for spec in METRICS}
    assert shown["copyhold_requests_admitted_total", ("3",)] == 10
    assert shown["copyhold_requests_finished_total", ("3", "length")] == 4
    assert shown["copyhold_requests_failed_total", ("3", "cancelled")] == 1
    assert shown["copyhold_cached_tokens_total", ("3",)] == 64
    assert shown["copyhold_step_seconds_total", ("3",)] == 1.5
    assert shown["copyhold_pool_blocks", ("3", "reserved")] == 4
    assert shown["copyhold_differing_log_indices_total", ("3",)] == 0
    assert shown["copyhold_rank_log_index", ("3", "0")] == 9
    assert shown["copyhold_revocations_total", ("complete",)] == 2
    assert shown["copyhold_authorizations_refused_total", ("unauthenticated",)] == 4
    assert shown["copyhold_kernel_backends", ("3", "cpu_selected")] == 1
    assert shown["copyhold_kernel_backends", ("3", "reference_not_needed")] == 1
    assert shown["copyhold_leases", ()] == 1
    assert (shown["copyhold_replica_serving", ("3",)], shown["copyhold_replica_serving", ("4",)]) == (1, 0)
    assert ("copyhold_rank_log_index", ("3", "1")) not in shown, "a lost rank has no figures"


def test_labels_are_replica_rank_and_kind_only() -> None:
    assert {label for spec in METRICS for label in spec.labels} == set(LABELS)
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    for spec in METRICS:
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        assert spec.doc.endswith("."), spec.name


def test_names_digests_and_failures_of_the_status_stay_out() -> None:
    assert CANARY not in exposition(FLEET, GATEWAY).decode()


def test_a_scrape_without_the_authority_says_so() -> None:
    shown = samples(exposition(None, GATEWAY))
    assert shown["copyhold_authority_up", ()] == 0
    assert shown["copyhold_open_streams", ()] == 3
    assert ("copyhold_leases", ()) not in shown


def test_requests_are_counted_once_each() -> None:
    receipt = ReuseReceipt("r", "q", CANARY, "m", 0.0, 40, 16, 16, 16, 39, 16, "cap", "logits_cap")
    counts = RequestCounts()
    for item in (Admitted(receipt), TokenChunk((1, 2)), TokenChunk((3,)), Finished("stop", receipt)):
        counts.count(item)
    counts.count(Failed("service_unavailable", CANARY))
    counts.count(Admitted(receipt))
    counts.count_abandoned()
    report = counts.report()
    assert (report.admitted, report.prompt_tokens, report.cached_tokens, report.generated_tokens) == (
        2,
        80,
        32,
        3,
    )
    assert report.finished == {"stop": 1}
    assert report.failed == {"service_unavailable": 1, "cancelled": 1}


class Fleet:
    """An ``AdminBackend`` whose status the test sets."""

    def __init__(self) -> None:
        self.running = 0
        self.drained = 0
        self.away = False

    async def status(self) -> dict[str, Any]:
        return {"replicas": [{"running": self.running, "waiting": 0}, {"failure": "lost"}]}

    async def drain(self) -> dict[str, Any]:
        self.drained += 1
        return {"replicas": []}

    async def metrics(self) -> dict[str, Any]:
        if self.away:
            raise ServiceUnavailable("gone")
        return FLEET


class Doors:
    """Both applications of one gateway, behind one server."""

    def __init__(self, live: LiveServer, backend: ScriptedBackend, tokenizer: ChatTokenizer) -> None:
        self.fleet, self.streams, self.admission = Fleet(), OpenStreams(), Admission()
        self.backend, self.live = backend, live
        settings = GatewaySettings(auth_failure_burst=1)
        self._tenant = create_tenant_app(
            backend, tokenizer, MODEL, settings, self.streams, admission=self.admission
        )
        self._admin = create_admin_app(self.fleet, self.streams, self.admission)  # pyright: ignore[reportArgumentType]
        live.app = self._dispatch

    async def _dispatch(self, scope: Any, receive: Any, send: Any) -> None:
        tenant = scope["type"] == "http" and scope["path"].startswith(("/v1", "/health"))
        await (self._tenant if tenant else self._admin)(scope, receive, send)

    def ask(self, http: httpx.Client, key: str = "key-a", **headers: str) -> httpx.Response:
        body = {"model": MODEL.name, "prompt": "hello", "max_tokens": 4}
        headers |= {"authorization": f"Bearer {key}"}
        return http.post("/v1/completions", json=body, headers=headers)

    def metrics(self, http: httpx.Client) -> Samples:
        response = http.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain")
        return samples(response.text)


@pytest.fixture
def doors(live_server: LiveServer, backend: ScriptedBackend, tokenizer: ChatTokenizer) -> Doors:
    return Doors(live_server, backend, tokenizer)


@pytest.fixture
def http(live_server: LiveServer) -> httpx.Client:
    return live_server.http(key=None)


def test_refused_callers_are_counted_by_kind(doors: Doors, http: httpx.Client) -> None:
    assert doors.ask(http).status_code == 200
    assert doors.ask(http, "key-nobody").status_code == 401
    assert doors.ask(http, "key-nobody").status_code == 429
    assert doors.ask(http, **{"x-copyhold-namespace": "b"}).status_code == 404
    shown = doors.metrics(http)
    assert {labels[0]: value for (name, labels), value in shown.items() if "refused" in name} == {
        "unauthenticated": 1,
        "rate_limited": 1,
        "not_found": 1,
    }


def test_metrics_answer_when_the_authority_is_away(doors: Doors, http: httpx.Client) -> None:
    assert doors.metrics(http)["copyhold_authority_up", ()] == 1
    doors.fleet.away = True
    assert doors.metrics(http)["copyhold_authority_up", ()] == 0


def test_the_tenant_port_has_no_metrics(server: LiveServer) -> None:
    assert server.http(key=None).get("/metrics").status_code == 404


def test_a_drain_refuses_new_requests_and_lets_running_ones_finish(doors: Doors, http: httpx.Client) -> None:
    async def hold() -> None:
        doors.backend.gate = asyncio.Semaphore(1)

    async def release() -> None:
        assert doors.backend.gate is not None
        for _ in range(100):
            doors.backend.gate.release()

    doors.live.run(hold())
    body = {"model": MODEL.name, "prompt": "hello", "max_tokens": 8, "stream": True}
    with http.stream(
        "POST", "/v1/completions", json=body, headers={"authorization": "Bearer key-a"}
    ) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        answer = http.post("/admin/drain", json={"wait_s": 0.2}).json()
        assert (answer["quiet"], answer["open_streams"]) == (False, 1)
        refused = doors.ask(http)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "service_unavailable"
        assert doors.ask(http, "key-nobody").status_code == 401, "a stranger learns nothing of the drain"
        assert http.get("/health/ready").status_code == 503
        assert http.get("/admin/status").json()["gateway"] == {"open_streams": 1, "draining": True}
        doors.live.run(release())
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    assert http.post("/admin/drain", json={"wait_s": 5}).json()["quiet"]
    assert doors.metrics(http)["copyhold_draining", ()] == 1
    assert doors.fleet.drained == 2


def test_a_drain_waits_for_the_replicas_too(doors: Doors, http: httpx.Client) -> None:
    doors.fleet.running = 1
    assert not http.post("/admin/drain", json={"wait_s": 0.15}).json()["quiet"]
    assert not http.post("/admin/drain").json()["quiet"]
    doors.fleet.running = 0
    assert http.post("/admin/drain").json()["quiet"]


@pytest.mark.parametrize("wait", [-1, 1e9, True, "1"])
def test_a_wrong_wait_closes_nothing(doors: Doors, http: httpx.Client, wait: Any) -> None:
    assert http.post("/admin/drain", json={"wait_s": wait}).status_code == 400
    assert not doors.admission.closed and doors.fleet.drained == 0


def test_a_service_that_cannot_take_a_request_says_when_to_repeat(doors: Doors, http: httpx.Client) -> None:
    doors.backend.refuse = ServiceUnavailable("no replica")
    refused = doors.ask(http)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
