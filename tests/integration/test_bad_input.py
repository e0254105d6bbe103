"""Bad input on a real server: each a client error that names the field; the server goes on, the pool reconciles (B38)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from live_cluster import LiveServer

GOOD = list(range(10, 30))
BAD_PROMPTS: list[Any] = [
    "",
    [],
    [[]],
    None,
    [5, -1],
    [32000],
    [9223372036854775808],
    [1.0],
    [True],
    [[1, 2], []],
    {"a": 1},
    list(range(10, 40)) * 60,
]
BAD_FIELDS: list[dict[str, Any]] = [
    {"stop_token_ids": [32005]},
    {"stop_token_ids": [-1]},
    {"logit_bias": {"32005": 1}},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 100000},
    {"max_tokens": True},
    {"stream": "yes"},
    {"temperature": "warm"},
    {"no_such_field": 1},
]


def post(server: LiveServer, key: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else None
    return httpx.post(
        f"{server.url}/v1/completions",
        content=content,
        json=None if content is not None else body,
        headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
        timeout=60,
    )


@pytest.mark.parametrize("number", range(len(BAD_PROMPTS) + len(BAD_FIELDS) + 3))
def test_bad_input_is_refused_and_changes_nothing(server: LiveServer, number: int) -> None:
    tenant = server.tenant()
    good = {"model": "tiny", "prompt": GOOD, "max_tokens": 4, "ignore_eos": True}
    before_answer = post(server, tenant.key, good).json()["choices"][0]["text"]
    server.assert_quiet()
    before = server.pool()
    bodies: list[Any] = [
        *({"model": "tiny", "prompt": prompt, "max_tokens": 4} for prompt in BAD_PROMPTS),
        *({**good, **fields} for fields in BAD_FIELDS),
        b"{not json",
        b"[1, 2]",
        {"model": "other", "prompt": GOOD},
    ]
    answer = post(server, tenant.key, bodies[number])
    assert 400 <= answer.status_code < 500, (bodies[number], answer.text)
    error = answer.json()["error"]
    assert error["message"] and error["type"]
    assert server.pool() == before
    assert post(server, tenant.key, good).json()["choices"][0]["text"] == before_answer
    assert httpx.get(f"{server.url}/health/ready").status_code == 200


def test_a_prompt_of_text_that_is_one_digit_is_text(server: LiveServer) -> None:
    tenant = server.tenant()
    answer = post(server, tenant.key, {"model": "tiny", "prompt": ["7"], "max_tokens": 2})
    assert answer.status_code == 200
