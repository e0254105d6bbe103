"""The retention fields of a body reach the engine, and a wrong one is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer
from scripted_backend import ScriptedBackend

from copyhold.actors.retention import DEFAULT_RETENTION, Retention
from copyhold.cluster.sdk import Client

BODY: dict[str, Any] = {"model": "toy", "prompt": "hi", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, DEFAULT_RETENTION),
        ({"cache_priority": None, "cache_ttl_s": None, "cache_no_store": None}, DEFAULT_RETENTION),
        ({"cache_priority": 2, "cache_ttl_s": 600}, Retention(2, 600.0)),
        ({"cache_ttl_s": 0.5}, Retention(ttl_s=0.5)),
        ({"cache_no_store": True}, Retention(no_store=True)),
        ({"cache_no_store": False, "cache_priority": 1}, Retention(1)),
    ],
)
def test_what_is_asked_reaches_the_engine(
    server: LiveServer, backend: ScriptedBackend, endpoint, fields, expected
) -> None:
    body = BODY if endpoint == "completions" else CHAT
    with server.http() as http:
        assert http.post(f"/v1/{endpoint}", json={**body, **fields}).status_code == 200
    assert backend.retentions == [expected]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_priority": -1}, "cache_priority"),
        ({"cache_priority": 1.0}, "cache_priority"),
        ({"cache_priority": True}, "cache_priority"),
        ({"cache_ttl_s": 0}, "cache_ttl_s"),
        ({"cache_ttl_s": "10"}, "cache_ttl_s"),
        ({"cache_ttl_s": -1}, "cache_ttl_s"),
        ({"cache_no_store": 1}, "cache_no_store"),
        ({"cache_no_store": True, "cache_priority": 1}, "cache_no_store"),
        ({"cache_no_store": True, "cache_ttl_s": 5}, "cache_no_store"),
        ({"cache_ttl": 5}, "cache_ttl"),
    ],
)
def test_a_wrong_field_is_refused_by_name_and_starts_nothing(
    server: LiveServer, backend: ScriptedBackend, fields, param
) -> None:
    with server.http() as http:
        answer = http.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert backend.retentions == []


def test_the_sdk_asks_the_same(server: LiveServer, backend: ScriptedBackend) -> None:
    with Client(server.url, "key-a") as client:
        client.complete("x", cache_priority=1, cache_ttl_s=60.0)
        client.chat([{"role": "user", "content": "hi"}], cache_no_store=True)
    assert backend.retentions == [Retention(1, 60.0), Retention(no_store=True)]
