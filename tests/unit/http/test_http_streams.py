"""Streams: text in whole characters (B39), one write a step, failures, disconnects, and the cut of a revocation."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from byte_model import END_OF_TURN, MODEL
from direct_asgi import DirectClient
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import LiveServer
from scripted_backend import ScriptedBackend
from starlette.types import Message

from copyhold.actors.errors import InvalidRequest, RanksDiffer, ServiceUnavailable
from copyhold.cluster.http_app import create_tenant_app
from copyhold.cluster.http_errors import StreamCut
from copyhold.cluster.http_stream import OpenStreams
from copyhold.models.tokenizer import ChatTokenizer
from copyhold.namespace.errors import GrantBelowFloor, GrantKeyDisabled

BODY: dict[str, Any] = {"model": "toy", "prompt": "x" * 20, "max_tokens": 60}
STREAM = {**BODY, "stream": True}
B39 = b"A " + b"\xe4\xb8\x96" + b"a" + b"\xed\x95\x9c" + b"\xf0\x9f\x98\x80" + b"e" + b"\xcc\x81" + b" end"


def test_b39_joined_deltas_are_the_whole_text(server: LiveServer, backend: ScriptedBackend) -> None:
    backend.answer = list(B39)
    for limit, expected in ((60, B39.decode()), (4, "A \ufffd")):
        whole, deltas = _both(server, limit)
        assert whole == expected
        assert "".join(deltas) == expected


def test_b39_an_invalid_byte_is_one_mark(server: LiveServer, backend: ScriptedBackend) -> None:
    backend.answer = [*B39[:6], 0xFF, *B39[6:]]
    whole, deltas = _both(server, 60)
    assert whole == "".join(deltas) == "A 世a\ufffd한😀e\u0301 end"


@settings(max_examples=25, deadline=None)
@given(answer=st.lists(st.integers(0, 256), max_size=24), per_step=st.integers(1, 5))
def test_any_bytes_in_any_steps_join_to_the_whole(
    tokenizer: ChatTokenizer, answer: list[int], per_step: int
) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        backend.answer, backend.per_step = answer, per_step
        app = create_tenant_app(backend, tokenizer, MODEL)
        whole, stream = DirectClient("/v1/completions", BODY), DirectClient("/v1/completions", STREAM)
        await whole.post(app)
        await stream.post(app)
        text = json.loads(whole.text)["choices"][0]["text"]
        kept = answer[: answer.index(END_OF_TURN)] if END_OF_TURN in answer else answer
        assert text == tokenizer.decode(kept)
        deltas = [event["choices"][0]["text"] for event in _events(stream.text)]
        assert "".join(deltas) == text
        assert not any(delta.startswith("\ufffd") and "\ufffd" not in text for delta in deltas)

    asyncio.run(run())


def test_stop_tokens_are_not_part_of_the_text(server: LiveServer, backend: ScriptedBackend) -> None:
    backend.answer = [*b"yes", END_OF_TURN, *b"no"]
    with server.http() as http:
        reply = http.post("/v1/completions", json=BODY).json()
        assert reply["choices"][0]["text"] == "yes"
        assert reply["choices"][0]["finish_reason"] == "stop"
        reply = http.post("/v1/completions", json={**BODY, "stop_token_ids": [ord("s")]}).json()
        assert reply["choices"][0]["text"] == "ye"
        reply = http.post("/v1/completions", json={**BODY, "ignore_eos": True}).json()
        assert reply["choices"][0]["text"] == "yesno"


def test_a_step_is_one_write(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        backend.answer, backend.per_step = list(b"abcdefgh"), 2
        client = DirectClient("/v1/completions", STREAM)
        await client.post(create_tenant_app(backend, tokenizer, MODEL))
        # The head, four steps, and the last chunk together with the end mark.
        assert len(client.written) == 1 + 4 + 1
        assert client.text.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


@pytest.mark.parametrize(
    "error, status, code",
    [
        (ServiceUnavailable("replica r7"), 503, "service_unavailable"),
        (RanksDiffer(1, "aa", "bb"), 503, "replica_stopped"),
        (InvalidRequest("prompt is odd", "prompt"), 400, "invalid_request"),
        (GrantBelowFloor("a", 1, 2), 409, "namespace_revoked"),
        (GrantKeyDisabled(), 401, "invalid_api_key"),
    ],
)
def test_a_refusal_of_the_engine_has_its_status(
    server: LiveServer, backend: ScriptedBackend, error: Exception, status: int, code: str
) -> None:
    backend.refuse = error
    with server.http() as http:
        for body in (BODY, STREAM):
            response = http.post("/v1/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
            assert "r7" not in response.text and "bb" not in response.text


@pytest.mark.parametrize("kind, status", [("namespace_revoked", 409), ("ranks_differ", 503)])
def test_a_failure_before_the_first_token_has_its_status(
    server: LiveServer, backend: ScriptedBackend, kind: str, status: int
) -> None:
    backend.fail_after = (0, kind)
    with server.http() as http:
        for body in (BODY, STREAM):
            response = http.post("/v1/completions", json=body)
            assert response.status_code == status
            assert "r7" not in response.text


def test_a_failure_in_mid_stream_ends_it_without_the_end_mark(
    server: LiveServer, backend: ScriptedBackend
) -> None:
    backend.fail_after = (3, "namespace_revoked")
    with server.http() as http:
        response = http.post("/v1/completions", json=STREAM)
        assert http.post("/v1/completions", json=BODY).status_code == 409
    assert response.status_code == 200
    events = _events(response.content)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hel"
    assert events[-1]["error"]["code"] == events[-1]["error"]["type"] == "namespace_revoked"
    assert b"[DONE]" not in response.content


def test_one_failed_prompt_cancels_the_others(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        backend.full_at = 1
        client = DirectClient("/v1/completions", {**BODY, "prompt": ["a", "b", "c"]})
        await client.post(create_tenant_app(backend, tokenizer, MODEL))
        assert client.status == 503
        assert [generation.cancelled for generation in backend.running] == [1]
        assert backend.blocks_in_use == 0

    asyncio.run(run())


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
def test_a_client_that_goes_cancels_its_request(
    server: LiveServer, backend: ScriptedBackend, body: dict[str, Any]
) -> None:
    backend.gate = asyncio.Semaphore(3)
    with server.http() as http:
        request = http.build_request("POST", "/v1/completions", json=body, timeout=0.3)
        if body is STREAM:
            response = http.send(request, stream=True)
            next(response.iter_lines())
            response.close()
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.send(request)
    server.run(backend.until_idle())
    assert [generation.cancelled for generation in backend.running] == [1]


def test_a_client_that_goes_while_the_engine_is_asked_leaves_nothing(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        backend.hold_generate = asyncio.Event()
        client = DirectClient("/v1/completions", STREAM)
        posting = asyncio.ensure_future(client.post(create_tenant_app(backend, tokenizer, MODEL)))
        while "generate" not in backend.events:
            await asyncio.sleep(0)
        client.gone.set()
        await posting
        assert client.written == []
        backend.hold_generate.set()
        while not backend.running or not backend.running[0].over:
            await asyncio.sleep(0)
        assert backend.running[0].cancelled == 1

    asyncio.run(run())


def test_a_cut_stream_sends_its_error_and_nothing_else(
    server: LiveServer, backend: ScriptedBackend, open_streams: OpenStreams
) -> None:
    backend.gate = asyncio.Semaphore(4)
    with server.http() as http, server.http("key-b") as other:
        with http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = response.iter_lines()
            seen = [line for line in (next(lines) for _ in range(8)) if line]
            assert len(seen) == 4
            assert server.run(open_streams.close("a", 2)) == 1
            server.call(lambda: [backend.gate.release() for _ in range(100)])  # pyright: ignore[reportOptionalMemberAccess]
            rest = [line for line in lines if line]
        assert [json.loads(line.removeprefix("data: "))["error"]["code"] for line in rest] == [
            "namespace_revoked"
        ]
        assert [generation.cancelled for generation in backend.running] == [1]
        # Generation 1 stays closed, generation 2 and the other tenant are served.
        assert http.post("/v1/completions", json=BODY).status_code == 409
        backend.generations_of["a"] = 2
        assert http.post("/v1/completions", json=BODY).status_code == 200
        assert other.post("/v1/completions", json=BODY).status_code == 200
        assert server.run(open_streams.close("a", 2)) == 0


def test_a_cut_whole_answer_is_a_409(
    server: LiveServer, backend: ScriptedBackend, open_streams: OpenStreams
) -> None:
    backend.gate = asyncio.Semaphore(2)
    replies: list[int] = []

    def post() -> None:
        with server.http() as http:
            replies.append(http.post("/v1/completions", json=BODY).status_code)

    thread = threading.Thread(target=post)
    thread.start()

    async def cut() -> int:
        while not backend.running or backend.running[0].delivered < 3:
            await asyncio.sleep(0.001)
        return await open_streams.close("a", 2)

    assert server.run(cut()) == 1
    thread.join(10)
    assert replies == [409]
    assert backend.running[0].cancelled == 1


@pytest.mark.parametrize("in_write", [True, False], ids=["while-a-write-waits", "between-steps"])
@pytest.mark.parametrize("listed", [False, True], ids=["one", "listed"])
def test_wherever_the_cut_falls_no_text_follows_it(
    tokenizer: ChatTokenizer, listed: bool, in_write: bool
) -> None:
    writes = 1 + 22 + 2 if listed else 1 + 11 + 1
    cuts = [asyncio.run(_cut_at(tokenizer, at, listed, in_write)) for at in range(writes)]
    # A cut that is scheduled with the very last writes may find the answer over; a waiting write is never over.
    assert cuts[:-2] == [1] * (writes - 2)
    assert not in_write or cuts == [1] * writes


async def _cut_at(tokenizer: ChatTokenizer, at: int, listed: bool, in_write: bool) -> int:
    """Cut an answer at its ``at``-th write; check what was written after, and return how many were cut."""
    backend, streams = ScriptedBackend(), OpenStreams()
    client = DirectClient("/v1/completions", {**STREAM, "prompt": ["p", "q"]} if listed else STREAM)
    closing: list[asyncio.Task[int]] = []
    written_at_cut: list[int] = []

    async def close() -> int:
        written_at_cut.append(len(client.written))
        return await streams.close("a", 2)

    async def cut(message: Message) -> None:
        if len(client.written) == at and not closing:
            closing.append(asyncio.ensure_future(close()))
            if in_write:
                # The socket is full: the write waits, the cut comes, and the socket drains at the same moment.
                await asyncio.sleep(0)

    client.before_write = cut
    await client.post(create_tenant_app(backend, tokenizer, MODEL, None, streams))
    count = await closing[0]
    assert backend.blocks_in_use == 0
    after = b"".join(message.get("body", b"") for message in client.written[written_at_cut[0] :])
    assert b'"text"' not in after
    # The answer was whole before the cut, or it ends with the one error event.
    whole = client.text.endswith(b"[DONE]\n\n")
    assert b"[DONE]" not in after
    assert after.count(b'"code":"namespace_revoked"') == (0 if whole else 1)
    return count


def test_a_client_that_does_not_read_cannot_hold_up_a_revocation(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        backend, streams = ScriptedBackend(), OpenStreams()
        client = DirectClient("/v1/completions", STREAM)
        stuck = asyncio.Event()

        async def never(message: Message) -> None:
            if len(client.written) >= 3:
                stuck.set()
                await asyncio.Event().wait()

        client.before_write = never
        posting = asyncio.ensure_future(
            client.post(create_tenant_app(backend, tokenizer, MODEL, None, streams))
        )
        await stuck.wait()
        assert await asyncio.wait_for(streams.close("a", 2), 5.0) == 1
        await posting
        assert len(client.written) == 3 and backend.blocks_in_use == 0

    asyncio.run(run())


def test_a_body_that_trickles_in_cannot_hold_up_a_revocation(tokenizer: ChatTokenizer) -> None:
    async def run() -> None:
        backend, streams = ScriptedBackend(), OpenStreams()
        client = DirectClient("/v1/completions", STREAM)
        arrived, released = asyncio.Event(), asyncio.Event()
        receive = client._receive

        async def trickle() -> Message:
            arrived.set()
            await released.wait()
            return await receive()

        client._receive = trickle
        posting = asyncio.ensure_future(
            client.post(create_tenant_app(backend, tokenizer, MODEL, None, streams))
        )
        await arrived.wait()
        assert await streams.close("a", 2) == 0
        released.set()
        await posting
        assert client.status == 409 and backend.prompts == []

    asyncio.run(run())


def test_floors_only_rise() -> None:
    async def run() -> None:
        streams = OpenStreams()
        await streams.close("a", 5)
        await streams.close("a", 3)
        with pytest.raises(StreamCut):
            streams.register("a", 4)
        with streams.register("a", 5), streams.register("b", 1):
            assert (streams.count("a"), streams.count("b")) == (1, 1)
        assert (streams.count("a"), streams.count("b")) == (0, 0)

    asyncio.run(run())


def test_an_unexpected_error_tells_the_client_nothing(server: LiveServer, backend: ScriptedBackend) -> None:
    backend.refuse = RuntimeError("secret path")
    with server.http() as http:
        response = http.post("/v1/completions", json=BODY)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text


def _both(server: LiveServer, limit: int) -> tuple[str, list[str]]:
    body = {**BODY, "max_tokens": limit}
    with server.http() as http:
        whole = http.post("/v1/completions", json=body).json()
        stream = http.post(
            "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
        )
    events = _events(stream.content)
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    return whole["choices"][0]["text"], [event["choices"][0]["text"] for event in events[:-1]]


def _events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]
