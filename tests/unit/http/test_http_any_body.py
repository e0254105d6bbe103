"""Whatever JSON arrives, the answer is a success or a client error in the one format; nothing is left running."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from byte_model import MODEL
from direct_asgi import DirectClient
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_backend import ScriptedBackend

from copyhold.cluster.http_app import create_tenant_app
from copyhold.cluster.http_rules import CHAT_CHECKS, COMPLETION_CHECKS
from copyhold.cluster.http_sampling import SAMPLING_NAMES, STOP_NAMES
from copyhold.models.tokenizer import ChatTokenizer

NAMES = [
    *sorted({*CHAT_CHECKS, *COMPLETION_CHECKS}), "model", "prompt", "messages", "max_tokens", "stream",
    "max_completion_tokens", "stream_options", "stop_token_ids", "ignore_eos", "return_token_ids", "other",
    *sorted(SAMPLING_NAMES | STOP_NAMES),
]  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 40_000), st.just(2**64), st.floats(allow_nan=False),
    st.sampled_from(["", "toy", "user", "text", "auto", "x" * 300]), st.text(max_size=5),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage", "z"]), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
BASES = [
    ("/v1/completions", {"model": "toy", "prompt": "hi"}),
    ("/v1/chat/completions", {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}),
]


def _post(tokenizer: ChatTokenizer, path: str, body: bytes) -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        client = DirectClient(path, {})
        client.body = body
        await client.post(create_tenant_app(backend, tokenizer, MODEL))
        assert client.status in (200, 400, 404), (client.status, client.text)
        if client.status != 200:
            assert set(msgspec.json.decode(client.text)["error"]) == {"message", "type", "param", "code"}
            assert backend.prompts == []
        assert backend.blocks_in_use == 0

    asyncio.run(run())


@settings(max_examples=120, deadline=None)
@given(base=st.sampled_from(BASES), change=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
@example(base=BASES[0], change={"temperature": 1e300})
@example(base=BASES[0], change={"logit_bias": {"\ud7ff": 2**63}})
def test_any_values_are_answered_or_refused(
    tokenizer: ChatTokenizer, base: tuple[str, dict[str, Any]], change: dict[str, Any]
) -> None:
    path, good = base
    _post(tokenizer, path, _encode({**good, **change}))


def test_numbers_beyond_64_bits_are_refused_by_name(tokenizer: ChatTokenizer) -> None:
    for digits in (20, 400, 4000, 6000):
        number = b"9" * digits
        names = (
            b"prompt",
            b"max_tokens",
            b"n",
            b"logprobs",
            b"stop",
            b"temperature",
            b"top_p",
            b"top_k",
            b"seed",
        )
        for name in names:
            for value in (number, b"-" + number, b"[" + number + b"]"):
                body = b'{"model":"toy","prompt":"x","' + name + b'":' + value + b"}"
                _post(tokenizer, "/v1/completions", body)


def _encode(value: Any) -> bytes:
    """JSON of any size of integer, which msgspec does not write."""
    if isinstance(value, dict):
        return b"{" + b",".join(_encode(k) + b":" + _encode(v) for k, v in value.items()) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join(map(_encode, value)) + b"]"
    if type(value) is int:
        return str(value).encode()
    return msgspec.json.encode(value)
