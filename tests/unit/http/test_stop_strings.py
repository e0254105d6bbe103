"""Stop strings: cut at the same character in every mode, whatever the pieces, and nothing of them leaks (B39)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from byte_model import MODEL
from direct_asgi import DirectClient
from hypothesis import example, given, settings
from hypothesis import strategies as st
from live_server import LiveServer
from scripted_backend import ScriptedBackend

from copyhold import Client
from copyhold.cluster.http_app import create_tenant_app
from copyhold.cluster.http_stop import StopText
from copyhold.models.tokenizer import ChatTokenizer

B39 = b"A " + b"\xe4\xb8\x96" + b"a" + b"\xed\x95\x9c" + b"\xf0\x9f\x98\x80" + b"e" + b"\xcc\x81" + b" end"
BODY: dict[str, Any] = {"model": "toy", "prompt": "x" * 20, "max_tokens": 60}


def naive_cut(text: str, stops: list[str], included: bool) -> str:
    """Read character by character: at the first that completes a stop string, the longest one is cut off."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[:end] if included else text[: end - max(map(len, ended))]
    return text


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("ab한", max_size=4), max_size=8),
    stops=st.lists(st.text("ab한", min_size=1, max_size=4), max_size=4),
    included=st.booleans(),
)
@example(pieces=["ab", "ca", "b"], stops=["abab", "ba"], included=False)
@example(pieces=["aab"], stops=["ab", "aab", "b"], included=False)
def test_any_pieces_are_cut_as_the_whole_text_is(pieces: list[str], stops: list[str], included: bool) -> None:
    text = StopText(stops, included)
    out = ""
    for piece in pieces:
        out += text.push(piece)
        # What left may never have to be taken back.
        assert naive_cut("".join(pieces), stops, included).startswith(out)
    out += text.finish()
    assert out == naive_cut("".join(pieces), stops, included)
    assert text.matched == any(stop in "".join(pieces) for stop in stops)
    assert text.push("more") == ("" if text.matched else "more") or stops


@pytest.mark.parametrize("per_step", [1, 2, 5, 100])
@pytest.mark.parametrize("late", [False, True], ids=["engine-told", "engine-already-over"])
@pytest.mark.parametrize(
    "stop, included, text, tokens",
    [
        ("a한", False, "A 世", 9),
        ("a한", True, "A 世a한", 9),
        ("nd", False, "A 世a한😀e\u0301 e", 20),
        ("nd", True, "A 世a한😀e\u0301 end", 20),
        (["zz", "\u0301", "한😀e"], False, "A 世a", 14),
        ("A", False, "", 1),
    ],
)
def test_b39_a_stop_string_cuts_both_modes_at_one_place(
    server: LiveServer,
    backend: ScriptedBackend,
    stop: str | list[str],
    included: bool,
    text: str,
    tokens: int,
    late: bool,
    per_step: int,
) -> None:
    backend.answer, backend.per_step, backend.finishes_late = list(B39) + list(b" and more"), per_step, late
    body = {**BODY, "stop": stop, "include_stop_str_in_output": included, "return_token_ids": True}
    whole, events = _both(server, body)
    choice = whole["choices"][0]
    deltas = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert choice["text"] == "".join(deltas) == text
    last = events[-2]["choices"][0]
    assert choice["finish_reason"] == last["finish_reason"] == "stop"
    assert choice["token_ids"] == last["token_ids"] == backend.answer[:tokens]
    assert whole["usage"] == {
        **events[-1]["usage"],
        "prompt_tokens_details": whole["usage"]["prompt_tokens_details"],
    }
    assert whole["usage"]["completion_tokens"] == tokens
    assert [generation.wanted for generation in backend.running] == [tokens, tokens]
    assert [generation.cancelled for generation in backend.running] == [0, 0]
    with Client(server.url, "key-a") as client:
        for receipt_id in (whole["copyhold"]["receipt_id"], events[-1]["copyhold"]["receipt_id"]):
            receipt = client.receipts(receipt_id)
            assert (receipt.finish_reason, receipt.completion_tokens) == ("stop", tokens)
    assert backend.amended == (2 if late else 0)


def test_b39_without_a_match_held_text_and_a_truncated_character_still_come(
    server: LiveServer, backend: ScriptedBackend
) -> None:
    backend.answer = list(B39)
    for limit, stop, text in (
        (4, "A \ufffd!", "A \ufffd"),
        (60, "end.", B39.decode()),
        (60, [], B39.decode()),
    ):
        whole, events = _both(server, {**BODY, "max_tokens": limit, "stop": stop})
        assert whole["choices"][0]["text"] == text
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
        assert whole["choices"][0]["finish_reason"] == events[-2]["choices"][0]["finish_reason"] == "length"
    assert all(generation.wanted is None for generation in backend.running)


def test_a_stop_string_in_the_mark_of_a_truncated_character_ends_as_stopped(
    server: LiveServer, backend: ScriptedBackend
) -> None:
    backend.answer = list(B39)
    whole, events = _both(server, {**BODY, "max_tokens": 4, "stop": " \ufffd"})
    assert whole["choices"][0]["text"] == "A" == "".join(event["choices"][0]["text"] for event in events[:-1])
    assert whole["choices"][0]["finish_reason"] == "stop" and whole["usage"]["completion_tokens"] == 4


def test_interleaved_prompts_are_cut_each_on_its_own(server: LiveServer, backend: ScriptedBackend) -> None:
    backend.answer = list(B39)
    whole, events = _both(server, {**BODY, "prompt": ["p", "q", "r"], "stop": "a한"})
    assert [choice["text"] for choice in whole["choices"]] == ["A 世"] * 3
    for index in range(3):
        deltas = [
            choice["text"] for event in events for choice in event["choices"] if choice["index"] == index
        ]
        assert "".join(deltas) == "A 世"
    assert whole["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"] == 27


def test_no_byte_of_an_excluded_stop_string_is_written(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        backend.answer = list(b"one STOP two")
        client = DirectClient("/v1/completions", {**BODY, "stream": True, "stop": "STOP"})
        await client.post(create_tenant_app(backend, tokenizer, MODEL))
        texts = [event["choices"][0]["text"] for event in _events(client.text)]
        assert texts == ["o", "n", "e", " ", ""]
        assert client.text.endswith(b"data: [DONE]\n\n") and backend.blocks_in_use == 0
        assert backend.running[0].delivered == 1 + len("one STOP"), "the engine was told at once"

    asyncio.run(run())


def test_a_failure_after_the_match_is_told(server: LiveServer, backend: ScriptedBackend) -> None:
    backend.finishes_late, backend.fail_after = True, (6, "namespace_revoked")
    with server.http() as http:
        assert http.post("/v1/completions", json={**BODY, "stop": "lo"}).status_code == 409
        response = http.post("/v1/completions", json={**BODY, "stop": "lo", "stream": True})
    assert b"[DONE]" not in response.content and b"namespace_revoked" in response.content


def _both(server: LiveServer, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with server.http() as http:
        whole = http.post("/v1/completions", json=body).json()
        usage = {"include_usage": True}
        stream = http.post("/v1/completions", json={**body, "stream": True, "stream_options": usage})
    return whole, _events(stream.content)


def _events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]
