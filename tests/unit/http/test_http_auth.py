"""Who may ask: identical refusals, authorization before everything, and the brake on guessing."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from byte_model import MODEL
from live_server import LiveServer
from scripted_backend import ScriptedBackend

from copyhold.cluster.http_app import create_tenant_app
from copyhold.cluster.http_auth import FailureBuckets
from copyhold.cluster.http_errors import ApiError
from copyhold.cluster.http_schema import GatewaySettings
from copyhold.models.tokenizer import ChatTokenizer

GOOD = {"model": "toy", "prompt": "Hello", "max_tokens": 4}
PATHS = ["/v1/models", "/v1/models/toy", "/v1/receipts/rcpt-1", "/v1/explain/rcpt-1"]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def braked(
    live_server: LiveServer, backend: ScriptedBackend, tokenizer: ChatTokenizer, clock: Clock
) -> LiveServer:
    settings = GatewaySettings(auth_failure_burst=3, auth_failures_per_s=0.5)
    live_server.app = create_tenant_app(backend, tokenizer, MODEL, settings, monotonic=clock)
    return live_server


def test_missing_and_wrong_keys_get_one_identical_body(server: LiveServer, backend: ScriptedBackend) -> None:
    refusals: list[httpx.Response] = []
    for header in (None, "", "Bearer", "Basic key-a", "Bearer wrong", "bearer key-a-not", "key-a"):
        with server.http(key=None) as http:
            headers = {} if header is None else {"authorization": header}
            refusals.append(http.post("/v1/completions", json=GOOD, headers=headers))
            refusals.append(http.post("/v1/completions", content=b"{", headers=headers))
            refusals += [http.get(path, headers=headers) for path in PATHS]
    assert {(r.status_code, r.content, r.headers["www-authenticate"]) for r in refusals} == {
        (401, refusals[0].content, "Bearer")
    }
    assert set(backend.events) == {"authorize"}, "something was looked up before authorization"


def test_absent_and_foreign_things_get_one_identical_body(
    server: LiveServer, backend: ScriptedBackend
) -> None:
    with server.http() as a, server.http("key-b") as b:
        own = a.post("/v1/completions", json=GOOD).headers["x-copyhold-receipt"]
        assert a.get(f"/v1/receipts/{own}").status_code == 200
        refusals = [
            b.get(f"/v1/receipts/{own}"),
            b.get(f"/v1/explain/{own}"),
            a.get("/v1/receipts/rcpt-999"),
            a.get("/v1/explain/none"),
            a.get(f"/v1/receipts/{own}", headers={"x-copyhold-namespace": "a2"}),
            a.get("/v1/models", headers={"x-copyhold-namespace": "b"}),
            a.get("/v1/models", headers={"x-copyhold-namespace": "never-was"}),
            a.post("/v1/completions", json=GOOD, headers={"x-copyhold-namespace": "b"}),
        ]
    assert {(r.status_code, r.content) for r in refusals} == {(404, refusals[0].content)}
    assert len(backend.prompts) == 1


def test_the_namespace_header_narrows_the_key(server: LiveServer) -> None:
    with server.http(**{"x-copyhold-namespace": "a2"}) as http:
        receipt = http.post("/v1/completions", json=GOOD).headers["x-copyhold-receipt"]
        assert http.get(f"/v1/receipts/{receipt}").json()["namespace"] == "a2"


def test_authorization_comes_before_the_body(server: LiveServer, backend: ScriptedBackend) -> None:
    with server.http("wrong") as http:
        assert http.post("/v1/completions", content=b"x" * 1_000_000).status_code == 401
        assert http.post("/v1/completions", content=iter([b"x" * 400_000] * 4)).status_code == 401
    with server.http() as http:
        assert http.post("/v1/completions", json=GOOD).status_code == 200


def test_guessing_is_braked_before_the_authority(
    braked: LiveServer, backend: ScriptedBackend, clock: Clock
) -> None:
    with braked.http("wrong") as wrong, braked.http() as good, braked.http("key-b") as unseen:
        assert good.get("/v1/models").status_code == 200
        assert [wrong.get("/v1/models").status_code for _ in range(5)] == [401, 401, 401, 429, 429]
        asked = len(backend.events)
        assert asked == 4
        limited = wrong.get("/v1/models")
        assert limited.headers["retry-after"] == "2"
        assert limited.json()["error"]["code"] == "rate_limit_exceeded"
        assert unseen.get("/v1/models").status_code == 429
        assert len(backend.events) == asked
        assert good.get("/v1/models").status_code == 200, "a known key was locked out by another's failures"
        clock.now_s += 2.0
        assert unseen.get("/v1/models").status_code == 200
        assert wrong.get("/v1/models").status_code == 401


def test_a_key_that_stopped_working_is_known_no_more(braked: LiveServer, backend: ScriptedBackend) -> None:
    with braked.http() as http:
        assert http.get("/v1/models").status_code == 200
        del backend.keys["key-a"]
        statuses = [http.get("/v1/models").status_code for _ in range(6)]
    assert statuses == [401, 401, 401, 401, 429, 429]


def test_a_burst_of_one_new_good_key_is_not_taken_for_guessing(braked: LiveServer) -> None:
    async def burst() -> list[int]:
        headers = {"authorization": "Bearer key-a"}
        async with httpx.AsyncClient(base_url=braked.url, headers=headers, trust_env=False) as http:
            replies = await asyncio.gather(*[http.get("/v1/models") for _ in range(12)])
        return [reply.status_code for reply in replies]

    assert asyncio.run(burst()) == [200] * 12


def test_the_buckets_forget_the_oldest_source_first() -> None:
    buckets = FailureBuckets(burst=1, refill_per_s=0.001, max_sources=2, clock=Clock())
    for source in ("s1", "s2", "s3"):
        buckets.take(source)
    buckets.take("s1")
    with pytest.raises(ApiError) as refused:
        buckets.take("s3")
    assert refused.value.status == 429


def test_liveness_and_readiness_need_no_key(server: LiveServer, backend: ScriptedBackend) -> None:
    with server.http(key=None) as http:
        assert http.get("/health/live").json() == {"status": "live"}
        assert http.get("/health/ready").status_code == 200
        backend.is_ready = False
        unready = http.get("/health/ready")
    assert (unready.status_code, unready.json()) == (503, {"status": "not_ready"})
    assert backend.events == []
