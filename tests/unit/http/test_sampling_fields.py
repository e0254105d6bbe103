"""Temperature, top-p, top-k, seed and stop on their way to the engine: from HTTP, OpenAI's client and the SDK."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer
from scripted_backend import ScriptedBackend

from copyhold import Client
from copyhold.models.sampling import GREEDY, MAX_SEED, MIN_SEED, SamplingParams

BODY: dict[str, Any] = {"model": "toy", "prompt": "hi", "max_tokens": 4}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, "key-a") as client:
        yield client


@pytest.mark.parametrize(
    "fields, asked",
    [
        ({}, GREEDY),
        ({"temperature": None, "top_p": None, "top_k": None, "seed": None}, GREEDY),
        ({"temperature": 0, "top_p": 0.5, "top_k": 5, "seed": 9}, GREEDY),
        ({"temperature": 1, "seed": 9}, SamplingParams(1.0, seed=9)),
        ({"temperature": 2.0, "top_p": 1, "seed": MIN_SEED}, SamplingParams(2.0, seed=MIN_SEED)),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": MAX_SEED},
            SamplingParams(0.7, 0.9, 40, MAX_SEED),
        ),
        ({"temperature": 0.5, "top_k": 10**30, "seed": 0}, SamplingParams(0.5)),
        ({"top_p": 0.5, "top_k": 3, "seed": 1}, GREEDY),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_reach_the_engine(
    server: LiveServer, backend: ScriptedBackend, path: str, fields: dict[str, Any], asked: SamplingParams
) -> None:
    body = BODY if path == "/v1/completions" else {"model": "toy", "messages": MESSAGES}
    with server.http() as http:
        response = http.post(path, json={**body, **fields})
    assert response.status_code == 200, response.text
    assert backend.samplings == [asked]


def test_an_absent_seed_is_another_one_for_each_prompt(server: LiveServer, backend: ScriptedBackend) -> None:
    with server.http() as http:
        for _ in range(2):
            response = http.post("/v1/completions", json={**BODY, "prompt": ["hi", "hi"], "temperature": 1})
            assert "seed" not in response.text
            for receipt_id in response.json()["copyhold"]["receipt_ids"]:
                assert "seed" not in http.get(f"/v1/receipts/{receipt_id}").text
    seeds = [params.seed for params in backend.samplings]
    assert len(set(seeds)) == 4
    assert all(MIN_SEED <= seed <= MAX_SEED and abs(seed) > 2**32 for seed in seeds)


def test_a_given_seed_is_each_prompts_own(server: LiveServer, backend: ScriptedBackend) -> None:
    with server.http() as http:
        http.post("/v1/completions", json={**BODY, "prompt": ["hi", "ho"], "temperature": 1, "seed": 3})
    assert backend.samplings == [SamplingParams(1.0, seed=3)] * 2


def test_openais_client_asks_for_temperature_seed_and_stop(
    server: LiveServer, backend: ScriptedBackend
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key-a", max_retries=0) as client:
        whole = client.chat.completions.create(
            model="toy", messages=MESSAGES, temperature=0.8, top_p=0.9, seed=42, stop=["the"],
            extra_body={"top_k": 50},
        )  # fmt: skip
        assert whole.choices[0].message.content == "Hello "
        assert whole.choices[0].finish_reason == "stop"
        stream = client.completions.create(
            model="toy", prompt="x", stop="lo", stream=True, stream_options={"include_usage": True},
            extra_body={"include_stop_str_in_output": True},
        )  # fmt: skip
        chunks = list(stream)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "Hello"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    assert backend.samplings == [SamplingParams(0.8, 0.9, 50, 42), GREEDY]


def test_the_sdk_asks_the_same_in_all_four_calls(client: Client, backend: ScriptedBackend) -> None:
    asked: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 42, "stop": ("zz", "the")}
    assert client.chat(MESSAGES, **asked).text == "Hello "
    assert client.complete("x", **asked).finish_reason == "stop"
    assert client.stream(MESSAGES, **asked).reply().completion_tokens == len("Hello the")
    included = client.stream_complete([5], **asked, include_stop_str_in_output=True).reply()
    assert included.text == "Hello the"
    assert backend.samplings == [SamplingParams(0.8, 0.9, 50, 42)] * 4
    assert client.chat(MESSAGES, stop="lo", temperature=None).text == "Hel"
    assert backend.samplings[-1] == GREEDY


def test_the_sdk_knows_its_own_arguments(client: Client, backend: ScriptedBackend) -> None:
    with pytest.raises(TypeError, match="temprature"):
        client.chat(MESSAGES, temprature=1.0)  # pyright: ignore[reportCallIssue]
    assert backend.prompts == []


def test_the_gateways_parsing_loads_no_torch() -> None:
    code = "import sys, copyhold.cluster.http_app; assert not {'torch', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
