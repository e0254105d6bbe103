"""The SDK against a real server: values, streams, typed errors, and what importing it loads."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from byte_model import END_OF_TURN, MODEL
from live_server import LiveServer
from scripted_backend import ScriptedBackend

from copyhold import Client
from copyhold.actors.errors import ServiceUnavailable as EngineFull
from copyhold.cluster.http_app import create_tenant_app
from copyhold.cluster.http_schema import GatewaySettings
from copyhold.cluster.sdk import (
    AuthenticationError,
    ConnectionFailed,
    CopyholdError,
    InvalidRequestError,
    NamespaceRevoked,
    NotFoundError,
    RateLimited,
    ServiceUnavailable,
)
from copyhold.models.tokenizer import ChatTokenizer

MESSAGES = [{"role": "user", "content": "Tell me of the manor and of its court, please."}]


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with Client(server.url, "key-a") as client:
        yield client


def test_chat_returns_text_and_figures(client: Client) -> None:
    first, second = client.chat(MESSAGES), client.chat(MESSAGES, max_tokens=3)
    assert (first.text, first.completion_tokens, first.finish_reason) == ("Hello there", 11, "length")
    assert (second.text, second.completion_tokens) == ("Hel", 3)
    assert first.cached_tokens == 0 and second.cached_tokens > 0
    assert first.receipt_id != second.receipt_id
    assert first.time_to_first_token_s > 0


def test_a_stream_knows_its_figures_at_the_end(client: Client) -> None:
    with client.stream(MESSAGES, max_tokens=5) as stream:
        assert stream.receipt_id and stream.usage is None
        pieces = list(stream)
    assert "".join(pieces) == "Hello" and len(pieces) == 5
    assert stream.usage is not None and stream.usage.completion_tokens == 5
    assert stream.finish_reason == "length"
    assert stream.time_to_first_token_s is not None and stream.time_to_first_token_s > 0
    assert client.stream(MESSAGES, max_tokens=5).reply().text == "Hello"


def test_complete_takes_text_and_token_ids(client: Client, backend: ScriptedBackend) -> None:
    assert client.complete("ab", max_tokens=2).text == "He"
    assert client.complete([97, 98], max_tokens=2).text == "He"
    assert client.stream_complete((97, 98), max_tokens=2).reply().text == "He"
    assert backend.prompts == [[97, 98]] * 3
    client.complete("ab", stop_token_ids=[7], ignore_eos=True)
    assert backend.stop_ids[-1] == (7,)


def test_a_stream_brings_the_ids_behind_its_text(client: Client, backend: ScriptedBackend) -> None:
    backend.answer = [*b"yes", END_OF_TURN, *b"no"]
    with client.stream(MESSAGES, return_token_ids=True) as stream:
        assert "".join(stream) == "yes"
    assert stream.token_ids == tuple(b"yes"), "the end token is not of the text"
    with client.stream(MESSAGES) as stream:
        assert ("".join(stream), stream.token_ids) == ("yes", ())


def test_receipts_and_explanations_of_a_miss_and_a_hit(client: Client) -> None:
    miss, hit = (client.complete("p" * 40, max_tokens=1) for _ in range(2))
    explained = client.explain(miss.receipt_id)
    assert (explained.cached_tokens, explained.reason) == (0, "root_empty")
    assert explained.sentence.startswith("None of the 40 prompt tokens")
    explained = client.explain(hit.receipt_id)
    assert (explained.limit, explained.reason, explained.block_size) == ("cap", "logits_cap", 16)
    assert explained.lengths.cap == 39 and explained.lengths.runtime == explained.cached_tokens == 32
    assert "32 of 40 prompt tokens (2 blocks of 16)" in explained.sentence
    receipt = client.receipts(hit.receipt_id)
    assert (receipt.namespace, receipt.cached_tokens, receipt.finish_reason) == ("a", 32, "length")


def test_models_are_named(client: Client) -> None:
    assert client.models() == [MODEL.name]


def test_a_namespace_narrows_the_key(server: LiveServer) -> None:
    with Client(f"{server.url}/v1/", "key-a", namespace="a2") as client:
        assert client.receipts(client.chat(MESSAGES).receipt_id).namespace == "a2"
    with Client(server.url, "key-a", namespace="b", model="toy") as client, pytest.raises(NotFoundError):
        client.chat(MESSAGES)


def test_every_refusal_has_its_type(client: Client, server: LiveServer, backend: ScriptedBackend) -> None:
    with Client(server.url, "wrong") as wrong, pytest.raises(AuthenticationError) as refused:
        wrong.models()
    assert refused.value.status == 401
    with pytest.raises(NotFoundError):
        client.explain("rcpt-none/../x")
    with pytest.raises(InvalidRequestError) as bad:
        client.complete([5, -1])
    assert bad.value.param == "prompt[1]" and bad.value.code == "token_id_out_of_range"
    with Client(server.url, "key-a", model="gpt-x") as other, pytest.raises(NotFoundError):
        other.chat(MESSAGES)
    backend.refuse = EngineFull("full")
    with pytest.raises(ServiceUnavailable):
        client.chat(MESSAGES)
    backend.refuse, backend.fail_after = None, (0, "namespace_revoked")
    with pytest.raises(NamespaceRevoked):
        client.chat(MESSAGES)


def test_a_failure_in_mid_stream_is_raised_after_the_text(client: Client, backend: ScriptedBackend) -> None:
    for kind, error in (("namespace_revoked", NamespaceRevoked), ("ranks_differ", ServiceUnavailable)):
        backend.fail_after = (2, kind)
        stream = client.stream(MESSAGES)
        assert list(itertools.islice(stream, 2)) == ["H", "e"]
        with pytest.raises(error):
            next(stream)


def test_closing_a_stream_cancels_the_request(
    client: Client, server: LiveServer, backend: ScriptedBackend
) -> None:
    backend.gate = asyncio.Semaphore(2)
    with client.stream(MESSAGES) as stream:
        assert next(stream) == "H"
    server.run(backend.until_idle())
    assert backend.running[-1].cancelled == 1


def test_a_braked_source_is_told_how_long_to_wait(
    live_server: LiveServer, backend: ScriptedBackend, tokenizer: ChatTokenizer
) -> None:
    settings = GatewaySettings(auth_failure_burst=1, auth_failures_per_s=0.01)
    live_server.app = create_tenant_app(backend, tokenizer, MODEL, settings, monotonic=lambda: 0.0)
    with Client(live_server.url, "wrong") as wrong:
        with pytest.raises(AuthenticationError):
            wrong.models()
        with pytest.raises(RateLimited) as braked:
            wrong.models()
    assert braked.value.retry_after_s == 100.0


def test_an_absent_server_is_a_failed_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", "key") as client, pytest.raises(ConnectionFailed):
        client.models()
    with Client("no scheme", "key") as client, pytest.raises(ConnectionFailed):
        client.models()


def test_a_stream_that_breaks_off_is_no_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        script = (
            "import socket,sys\n"
            "s=socket.socket(fileno=int(sys.argv[1])); c,_=s.accept(); c.recv(65536)\n"
            "c.sendall(b'HTTP/1.1 200 OK\\r\\nconnection: close\\r\\n\\r\\n'"
            'b\'data: {"choices":[{"delta":{"content":"hi"}}]}\\n\\n\'); c.close()\n'
        )
        peer = subprocess.Popen(
            [sys.executable, "-c", script, str(listener.fileno())], pass_fds=[listener.fileno()]
        )
        with Client(url, "key", model="toy") as client:
            stream = client.stream(MESSAGES)
            assert next(stream) == "hi"
            with pytest.raises(ConnectionFailed):
                next(stream)
        assert peer.wait(10) == 0


def test_every_error_is_of_one_family() -> None:
    for error in (AuthenticationError, NotFoundError, InvalidRequestError, NamespaceRevoked, RateLimited):
        assert issubclass(error, CopyholdError)
    assert issubclass(RateLimited, ServiceUnavailable) and issubclass(ConnectionFailed, CopyholdError)


def test_importing_the_client_loads_no_server_library() -> None:
    script = (
        "import sys; from copyhold import Client; Client('http://localhost:1', 'k').close()\n"
        "heavy = {'torch','ray','numba','numpy','starlette','uvicorn','redis','tokenizers','cryptography'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
