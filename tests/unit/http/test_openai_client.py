"""The official client against both endpoints, whole and streaming."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from byte_model import END_OF_TURN, MODEL
from live_server import LiveServer
from openai.types.chat import ChatCompletionMessageParam
from scripted_backend import ScriptedBackend

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
]
RENDERED = b"[system]Be kind.\x00[user]Hi\x00[assistant]"


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-a", max_retries=0) as client:
        yield client


def test_chat_answers_whole(client: openai.OpenAI, backend: ScriptedBackend) -> None:
    raw = client.chat.completions.with_raw_response.create(model="toy", messages=MESSAGES, temperature=0)
    reply = raw.parse()
    assert reply.id.startswith("chatcmpl-") and reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == "Hello there"
    assert reply.choices[0].finish_reason == "length"
    prompt = [END_OF_TURN if byte == 0 else byte for byte in RENDERED]
    assert backend.prompts == [prompt]
    assert reply.usage is not None and reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == 11
    assert reply.usage.total_tokens == len(prompt) + 11
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    assert reply.model_extra == {"copyhold": {"receipt_id": raw.headers["x-copyhold-receipt"]}}


def test_chat_streams_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="toy",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello there"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count("length") == 1
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 11
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].model_extra and chunks[-1].model_extra["copyhold"]["receipt_id"]


def test_the_last_chunk_carries_the_receipt_without_usage_too(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="toy", messages=MESSAGES, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].model_extra and chunks[-1].model_extra["copyhold"]["receipt_id"]


def test_completion_of_a_list_has_a_choice_per_prompt(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="toy", prompt=["one", "three"], max_tokens=5)
    reply = raw.parse()
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, "Hello"), (1, "Hello")]
    assert reply.usage is not None and reply.usage.prompt_tokens == len("one") + len("three")
    assert reply.usage.completion_tokens == 10
    ids = raw.headers["x-copyhold-receipt"].split(",")
    assert len(set(ids)) == 2
    assert reply.model_extra == {"copyhold": {"receipt_ids": ids}}


@pytest.mark.parametrize(
    "prompt, seen",
    [
        ("ab", [[97, 98]]),
        (["ab"], [[97, 98]]),
        (["7"], [[55]]),
        ([5, 31999], [[5, 31999]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_every_form_of_prompt_reaches_the_engine(
    client: openai.OpenAI, backend: ScriptedBackend, prompt: object, seen: list[list[int]]
) -> None:
    client.completions.create(model="toy", prompt=prompt, max_tokens=1)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert backend.prompts == seen


def test_completion_streams_a_list_with_indices(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="toy", prompt=["x", "y"], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "Hello there", 1: "Hello there"}


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL.name]
    assert client.models.retrieve("toy").created == MODEL.created
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_errors_arrive_as_the_clients_own(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="toy", prompt="x", logit_bias={"5": 1})
    assert refused.value.param == "logit_bias" and refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError) as absent:
        client.completions.create(model="gpt-x", prompt="x")
    assert absent.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="nope", max_retries=0).models.list()


def test_a_second_run_reports_its_cached_tokens(client: openai.OpenAI) -> None:
    cached = [
        client.completions.create(
            model="toy", prompt="p" * 33, max_tokens=1
        ).usage.prompt_tokens_details.cached_tokens  # pyright: ignore[reportOptionalMemberAccess]
        for _ in range(2)
    ]
    assert cached == [0, 32]
