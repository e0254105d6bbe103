"""Tenants apart: what one holds neither shows nor helps another, and a revocation leaves nothing of it."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from live_cluster import LiveServer, copyhold, wait_until

from copyhold.cluster.sdk import AuthenticationError, Client, NamespaceRevoked, NotFoundError
from copyhold.namespace.certificate import parse_certificate, verify_certificate
from copyhold.namespace.signing import PUBLIC_KEY_BYTES, parse_hex

SECRET = [{"role": "user", "content": "The combination of the harbour safe is seven, eleven, thirteen. " * 3}]


def test_a_guessed_prompt_is_cold_for_another_tenant(server: LiveServer) -> None:
    a, b = server.tenant(), server.tenant()
    first = a.client.chat(SECRET, max_tokens=2)
    assert a.client.chat(SECRET, max_tokens=2).cached_tokens > 0, "twin: the owner does hit"
    assert b.client.chat(SECRET, max_tokens=2).cached_tokens == 0
    again = b.client.chat(SECRET, max_tokens=2).cached_tokens
    assert again == 16 * ((first.prompt_tokens - 1) // 16)
    assert a.client.chat(SECRET, max_tokens=2).cached_tokens == again
    held = server.pool()["namespaces"]
    assert held[a.name] and held[b.name]
    assert not set(held[a.name]) & set(held[b.name])


def test_nothing_in_a_request_selects_another_namespace(server: LiveServer) -> None:
    a, b = server.tenant(), server.tenant()
    a.client.chat(SECRET, max_tokens=2)
    body = {"model": "tiny", "messages": SECRET, "max_tokens": 2}
    url = f"{server.url}/v1/chat/completions"
    headers = {"authorization": f"Bearer {b.key}"}
    foreign = httpx.post(url, json=body, headers={**headers, "x-copyhold-namespace": a.name})
    absent = httpx.post(url, json=body, headers={**headers, "x-copyhold-namespace": "no-such-namespace"})
    assert foreign.status_code == absent.status_code == 404
    assert foreign.content == absent.content
    for extra in ({"cache_salt": a.name}, {"namespace": a.name}, {"salt": "x"}):
        refused = httpx.post(url, json={**body, **extra}, headers=headers)
        assert refused.status_code == 400, refused.text
    assert b.client.chat(SECRET, max_tokens=2).cached_tokens == 0


def test_an_unauthorized_call_touches_no_ledger_and_no_index(server: LiveServer) -> None:
    server.assert_quiet()
    before = (
        server.pool()["log_index"],
        server.admin.status()["coordinator"],
        server.replica()["admitted_requests"],
    )
    bodies = []
    for key in ("", "Bearer", "Bearer ch_nope", "Bearer ch_" + "0" * 16 + "_" + "0" * 64):
        answer = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"model": "tiny", "messages": SECRET},
            headers={"authorization": key} if key else {},
        )
        assert answer.status_code == 401
        bodies.append(answer.content)
    assert len(set(bodies)) == 1
    assert before == (
        server.pool()["log_index"],
        server.admin.status()["coordinator"],
        server.replica()["admitted_requests"],
    )


def test_revocation_ends_the_stream_frees_and_zeroes_and_certifies(
    server: LiveServer, tmp_path: Path
) -> None:
    a, b = server.tenant(), server.tenant()
    b_prompt = b.client.chat(SECRET, max_tokens=2).prompt_tokens
    receipt = a.client.chat(SECRET, max_tokens=2).receipt_id
    b_blocks = server.pool()["namespaces"][b.name]
    outcome: dict[str, object] = {}
    enough = threading.Event()

    def read() -> None:
        texts = 0
        try:
            with a.client.stream(SECRET, max_tokens=700, ignore_eos=True) as stream:
                for _ in stream:
                    texts += 1
                    if texts >= 8:
                        enough.set()
        except NamespaceRevoked as error:
            outcome["error"] = error
        outcome["texts"] = texts
        enough.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert enough.wait(30)
    document = server.admin.revoke(a.name, 0.0)
    reader.join(30)
    assert isinstance(outcome.get("error"), NamespaceRevoked), outcome
    floors = server.pool()["floors"][a.name]
    certificate = parse_certificate(document)
    ranks = [evidence for entry in certificate.outcomes for evidence in entry.evidence]
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank.nonzero_bytes == 0 and rank.inventory_after_blocks == 0
        assert rank.blocks_zeroed >= rank.blocks_released > 0
        rose = floors["free_blocks_after"] - floors["free_blocks_before"]
        assert rose == rank.blocks_released - floors["grown_blocks"]
    key_file = server.supervisor.state_dir / "secrets" / "certificate.pub"
    key = parse_hex(key_file.read_text().strip(), PUBLIC_KEY_BYTES)
    assert key is not None and verify_certificate(document, key).ok
    path = tmp_path / "certificate.json"
    path.write_bytes(document)
    assert copyhold("certificate", "verify", str(path), "--public-key", str(key_file)).returncode == 0
    path.write_bytes(document.replace(b'"generation_to":2', b'"generation_to":3'))
    assert copyhold("certificate", "verify", str(path), "--public-key", str(key_file)).returncode == 1
    with pytest.raises(NotFoundError):
        a.client.receipts(receipt)
    assert a.client.chat(SECRET, max_tokens=2).cached_tokens == 0, (
        "the new generation knows nothing of the old"
    )
    assert a.client.chat(SECRET, max_tokens=2).cached_tokens > 0, "and the namespace serves on"
    assert server.pool()["namespaces"][b.name] == b_blocks
    assert b.client.chat(SECRET, max_tokens=2).cached_tokens == 16 * ((b_prompt - 1) // 16)
    server.assert_quiet()


def test_a_client_that_goes_away_leaves_nothing_running(server: LiveServer) -> None:
    tenant = server.tenant()
    with tenant.client.stream(SECRET, max_tokens=700, ignore_eos=True) as stream:
        next(stream)
        assert server.replica()["running"] == 1
    wait_until(lambda: server.replica()["running"] == 0)
    server.assert_quiet()
    assert tenant.client.chat(SECRET, max_tokens=2).text is not None


def test_a_key_that_was_never_given_is_refused_like_any_other(server: LiveServer) -> None:
    with Client(server.url, "ch_wrong_key") as client, pytest.raises(AuthenticationError):
        client.models()


def test_a_disabled_key_is_refused_like_a_wrong_one_and_ends_what_runs_under_it(server: LiveServer) -> None:
    tenant = server.tenant()
    key_id = tenant.key.split("_")[1]
    headers = {"authorization": f"Bearer {tenant.key}"}
    wrong = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer ch_no_such"})
    with tenant.client.stream(SECRET, max_tokens=700, ignore_eos=True) as stream:
        next(stream)
        server.admin.set_key_enabled(key_id, False)
        assert server.replica()["running"] == 0, "it ended before the call returned"
        with pytest.raises(AuthenticationError):
            for _ in stream:
                pass
    refused = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert (refused.status_code, refused.content) == (401, wrong.content)
    socket_path = server.supervisor.admin_socket
    assert copyhold("tenants", "disable-key", key_id, "--admin-socket", socket_path).returncode == 0
    server.assert_quiet()
    server.admin.set_key_enabled(key_id, True)
    assert tenant.client.chat(SECRET, max_tokens=2).cached_tokens > 0, "its cached state stayed"


def test_a_disabled_namespace_is_not_found_until_it_is_enabled(server: LiveServer) -> None:
    tenant = server.tenant()
    tenant.client.chat(SECRET, max_tokens=2)
    server.admin.set_namespace_enabled(tenant.name, False)
    with pytest.raises(NotFoundError):
        tenant.client.chat(SECRET, max_tokens=2)
    server.admin.set_namespace_enabled(tenant.name, True)
    assert tenant.client.chat(SECRET, max_tokens=2).cached_tokens > 0
