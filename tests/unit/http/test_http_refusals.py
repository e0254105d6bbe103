"""Bad input: each refusal names the field, starts nothing, and the next good request gets its same answer (B38)."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from scripted_backend import ScriptedBackend

GOOD = {"model": "toy", "prompt": list(range(1, 21)), "max_tokens": 4}
CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}]}

# Body changes of case B38, and the field that must be named.
B38: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [5, -1]}, "prompt[1]"),
    ({"prompt": [32000]}, "prompt[0]"),
    ({"prompt": [9223372036854775808]}, "prompt[0]"),
    ({"prompt": [1.0]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [[1, 2], []]}, "prompt[1]"),
    ({"stop_token_ids": [32005]}, "stop_token_ids[0]"),
    ({"logit_bias": {"32005": 1}}, "logit_bias"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
]

OTHER: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": [None]}, "prompt[0]", "invalid_type"),
    ({"prompt": ["a", [1]]}, "prompt[1]", "invalid_type"),
    ({"prompt": ["a", ""]}, "prompt[1]", "empty_prompt"),
    ({"prompt": [[1], [2, 40000]]}, "prompt[1][1]", "token_id_out_of_range"),
    ({"prompt": {"text": "x"}}, "prompt", "invalid_type"),
    ({"prompt": ["x"] * 65}, "prompt", "invalid_value"),
    ({"prompt": [1] * 256}, "prompt", "context_length_exceeded"),
    ({"prompt": ["ok", "x" * 256]}, "prompt[1]", "context_length_exceeded"),
    ({"prompt": [1] * 250, "max_tokens": 7}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"stop_token_ids": 3}, "stop_token_ids", "invalid_type"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", "invalid_type"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids", "invalid_value"),
    ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "unknown_parameter"),
    ({"kv_compression": "snapkv"}, "kv_compression", "lossy_eviction_in_exact_mode"),
    ({"cache_implementation": "sink"}, "cache_implementation", "lossy_eviction_in_exact_mode"),
    ({"sink_token_length": 4}, "sink_token_length", "lossy_eviction_in_exact_mode"),
    ({"max_attention_window": 512}, "max_attention_window", "lossy_eviction_in_exact_mode"),
    ({"temperature": 2.01}, "temperature", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 10**400}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"temperature": "0"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_p": True}, "top_p", "invalid_type"),
    ({"top_k": -1}, "top_k", "invalid_value"),
    ({"top_k": 2.0}, "top_k", "invalid_type"),
    ({"n": 2}, "n", "unsupported_value"),
    ({"n": True}, "n", "invalid_type"),
    ({"best_of": 2}, "best_of", "unsupported_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": 3}, "stop", "invalid_type"),
    ({"stop": {"a": 1}}, "stop", "invalid_type"),
    ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
    ({"stop": ["a", None]}, "stop[1]", "invalid_type"),
    ({"stop": list("abcde")}, "stop", "invalid_value"),
    ({"stop": ["ok", "x" * 257]}, "stop[1]", "invalid_value"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "invalid_type"),
    ({"logprobs": 0}, "logprobs", "unsupported_parameter"),
    ({"echo": True}, "echo", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"presence_penalty": 0.1}, "presence_penalty", "unsupported_value"),
    ({"frequency_penalty": -1}, "frequency_penalty", "unsupported_value"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"seed": "x"}, "seed", "invalid_type"),
    ({"seed": 1.0}, "seed", "invalid_type"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
    ({"cache_salt": "v"}, "cache_salt", "unknown_parameter"),
    ({"model": None}, "model", "invalid_type"),
]


@pytest.mark.parametrize("change, param", B38)
def test_b38_names_the_field_and_the_server_goes_on(
    server: LiveServer, backend: ScriptedBackend, change: dict[str, Any], param: str
) -> None:
    with server.http() as http:
        before = http.post("/v1/completions", json=GOOD).json()["choices"]
        for streaming in ({}, {"stream": True}):
            started = len(backend.prompts)
            response = http.post("/v1/completions", json={**GOOD, **change, **streaming})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert len(backend.prompts) == started, "something was started"
        assert http.post("/v1/completions", json=GOOD).json()["choices"] == before
        assert http.get("/health/ready").status_code == 200


@pytest.mark.parametrize("change, param, code", OTHER)
def test_a_refusal_names_field_and_code(
    server: LiveServer, backend: ScriptedBackend, change: dict[str, Any], param: str, code: str
) -> None:
    with server.http() as http:
        error = _refused(http, "/v1/completions", {**GOOD, **change})
    assert (error["param"], error["code"]) == (param, code)
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert backend.prompts == []


@pytest.mark.parametrize(
    "change, param, code",
    [
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": []}, "messages", "empty_prompt"),
        ({"messages": ["x"]}, "messages[0]", "invalid_type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "invalid_type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "invalid_type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "unsupported_value",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "user", "content": ""}, {"role": "system", "content": ""}]},
            "messages",
            "chat_template_refused",
        ),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context_length_exceeded"),
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"prompt": "x"}, "prompt", "unknown_parameter"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ],
)
def test_a_chat_refusal_names_field_and_code(
    server: LiveServer, change: dict[str, Any], param: str, code: str
) -> None:
    with server.http() as http:
        error = _refused(http, "/v1/chat/completions", {**CHAT, **change})
    assert (error["param"], error["code"]) == (param, code)


def test_values_that_mean_what_the_server_does_are_accepted(server: LiveServer) -> None:
    neutral = {
        "temperature": 0, "top_p": 1.0, "n": 1, "stop": None, "logit_bias": {}, "presence_penalty": 0.0,
        "frequency_penalty": 0, "user": "u", "seed": 7, "metadata": {"k": "v"}, "store": False,
        "stream_options": None, "max_tokens": None, "stop_token_ids": [],
    }  # fmt: skip
    chat = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False}
    text_parts = {"messages": [{"role": "developer", "content": [{"type": "text", "text": "Hi"}]}]}
    with server.http() as http:
        assert http.post("/v1/completions", json={**GOOD, **neutral}).status_code == 200
        response = http.post("/v1/chat/completions", json={**CHAT, **neutral, **chat, **text_parts})
        assert response.status_code == 200, response.text


def test_an_unknown_name_is_told_its_nearest_neighbour(server: LiveServer) -> None:
    with server.http() as http:
        error = _refused(http, "/v1/completions", {**GOOD, "max_token": 3})
    assert "'max_tokens'" in error["message"]


def test_an_absent_limit_is_the_default_within_the_room(server: LiveServer, backend: ScriptedBackend) -> None:
    with server.http() as http:
        for length in (10, 250):
            http.post("/v1/completions", json={"model": "toy", "prompt": [1] * length})
    assert backend.budgets == [32, 6]


def test_ignore_eos_leaves_only_the_callers_stop_ids(server: LiveServer, backend: ScriptedBackend) -> None:
    with server.http() as http:
        http.post("/v1/completions", json={**GOOD, "stop_token_ids": [9, 9, 8]})
        http.post("/v1/completions", json={**GOOD, "stop_token_ids": [9], "ignore_eos": True})
    assert backend.stop_ids == [(256, 9, 8), (9,)]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"model": NaN}', b'"\xff"', b"[" * 100_000, b'{"a":"\\ud800"}']
)
def test_a_body_that_is_no_json_object_is_refused(server: LiveServer, body: bytes) -> None:
    with server.http() as http:
        response = http.post("/v1/completions", content=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"
        assert http.post("/v1/completions", json=GOOD).status_code == 200


def test_a_body_over_the_limit_is_refused_declared_or_not(server: LiveServer) -> None:
    body = json.dumps({**GOOD, "user": "x" * 3_000_000}).encode()
    with server.http() as http:
        declared = http.post("/v1/completions", content=body)
        chunked = http.post("/v1/completions", content=iter([body[:1000], body[1000:]]))
        assert (declared.status_code, chunked.status_code) == (413, 413)
        assert declared.json() == chunked.json()
        assert declared.json()["error"]["code"] == "body_too_large"
        assert http.post("/v1/completions", json=GOOD).status_code == 200


def test_unknown_paths_and_methods_answer_in_the_one_format(server: LiveServer) -> None:
    with server.http() as http:
        assert http.get("/v1/nothing").json()["error"]["code"] == "not_found"
        assert http.get("/admin/status").status_code == 404
        response = http.get("/v1/completions")
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")


def _refused(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]
