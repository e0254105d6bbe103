"""Answers of real servers: equal over ranks and reuse, in OpenAI's shapes, with receipts that hold."""

from __future__ import annotations

import platform
from typing import Any

import httpx
import openai
import pytest
from live_cluster import LiveServer

SYSTEM = "You are the clerk of a small harbour. " * 6
LONG = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which ships came in today?"}]


def test_second_request_reuses_whole_blocks_and_answers_the_same(server: LiveServer) -> None:
    tenant = server.tenant()
    cold = tenant.client.chat(LONG, max_tokens=24, ignore_eos=True)
    warm = tenant.client.chat(LONG, max_tokens=24, ignore_eos=True)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 16 * ((cold.prompt_tokens - 1) // 16) > 0
    assert warm.text == cold.text
    server.assert_quiet()


def test_one_rank_and_two_ranks_answer_the_same(server: LiveServer, server_tp1: LiveServer) -> None:
    two, one = server.tenant(), server_tp1.tenant()
    for question in ("Which ships came in today?", "Who pays for the rope?", "a", "Tell me of the storm."):
        messages = [LONG[0], {"role": "user", "content": question}]
        with two.client.stream(messages, max_tokens=32, ignore_eos=True, return_token_ids=True) as a:
            a.reply()
        with one.client.stream(messages, max_tokens=32, ignore_eos=True, return_token_ids=True) as b:
            b.reply()
        assert a.token_ids == b.token_ids
        assert len(a.token_ids) == 32
    assert one.client.chat(LONG, max_tokens=1).cached_tokens > 0, "reuse happened on one rank as well"
    server_tp1.assert_quiet()


def test_streamed_text_is_the_whole_text(server: LiveServer) -> None:
    tenant = server.tenant()
    whole = tenant.client.chat(LONG, max_tokens=40, ignore_eos=True)
    with tenant.client.stream(LONG, max_tokens=40, ignore_eos=True) as stream:
        assert "".join(stream) == whole.text


def test_openai_client_is_served(server: LiveServer) -> None:
    tenant = server.tenant()
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=tenant.key, max_retries=0)
    messages: Any = LONG
    plain = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert plain.usage is not None and plain.usage.prompt_tokens > 0
    events = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in events if chunk.choices)
    assert text == plain.choices[0].message.content
    ids = client.completions.create(model="tiny", prompt=[5, 6, 7, 8], max_tokens=4)
    texts = client.completions.create(model="tiny", prompt=["one", "two words"], max_tokens=4)
    assert len(ids.choices) == 1 and len(texts.choices) == 2
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="ch_x_y", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=messages, max_tokens=8)


def test_many_requests_at_once_answer_as_each_alone(server: LiveServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    tenant = server.tenant()
    prompts = [[7 + n, *range(20, 20 + 9 * n)] for n in range(1, 9)]
    alone = [tenant.client.complete(prompt, max_tokens=12, ignore_eos=True).text for prompt in prompts]
    other = server.tenant()
    with ThreadPoolExecutor(8) as threads:
        together = list(
            threads.map(lambda p: other.client.complete(p, max_tokens=12, ignore_eos=True).text, prompts)
        )
    assert together == alone
    server.assert_quiet()


def test_explain_and_receipt_show_own_lengths_only(server: LiveServer) -> None:
    tenant, stranger = server.tenant(), server.tenant()
    miss = tenant.client.chat(LONG, max_tokens=2)
    hit = tenant.client.chat(LONG, max_tokens=2)
    why_miss, why_hit = tenant.client.explain(miss.receipt_id), tenant.client.explain(hit.receipt_id)
    assert why_miss.cached_tokens == 0 and why_miss.reason == "root_empty"
    assert why_hit.cached_tokens == hit.cached_tokens == why_hit.lengths.runtime > 0
    assert why_hit.lengths.cap == hit.prompt_tokens - 1
    raw = httpx.get(
        f"{server.url}/v1/receipts/{hit.receipt_id}", headers={"authorization": f"Bearer {tenant.key}"}
    ).json()
    for hidden in ("generation", "digest", "replica", "incarnation", "block_id", "epoch"):
        assert not any(hidden in name for name in raw), raw
    foreign = httpx.get(
        f"{server.url}/v1/receipts/{hit.receipt_id}", headers={"authorization": f"Bearer {stranger.key}"}
    )
    absent = httpx.get(
        f"{server.url}/v1/receipts/rcp_absent", headers={"authorization": f"Bearer {stranger.key}"}
    )
    assert (
        (foreign.status_code, foreign.content)
        == (absent.status_code, absent.content)
        == (404, absent.content)
    )


def test_actors_compiled_no_kernel_and_share_memory(server: LiveServer) -> None:
    expected = "shm" if platform.machine() == "x86_64" else "gloo"
    ranks = server.admin.ranks()["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert [rank["kernel_compilations"] for rank in ranks] == [0, 0]
    assert [rank["collective"] for rank in ranks] == [expected, expected]
    kernels = server.replica()["kernels"]
    assert (kernels["backend"], kernels["kv_dtype"], kernels["tile"]) == ("cpu", "float32", 16)
    outcomes = {each["backend"]: each["outcome"] for each in kernels["considered"]}
    assert (outcomes["cpu"], outcomes["reference"]) == ("selected", "not_needed")
    assert outcomes["triton"] in ("triton_not_installed", "no_cuda_device", "host_activations")
    assert {rank["kernels"]["layout"]["backend"] for rank in ranks} == {"cpu"}


def test_ledgers_were_compared_at_every_step(server: LiveServer) -> None:
    tenant = server.tenant()
    before = server.replica()["agreement"]
    tenant.client.chat(LONG, max_tokens=16, ignore_eos=True)
    server.assert_quiet()
    after = server.replica()["agreement"]
    assert after["ledgers"] == 3
    assert after["compared_log_indices"] >= before["compared_log_indices"] + 16
    assert after["differing"] == 0


def test_sampled_rows_equal_a_cold_recompute(server: LiveServer) -> None:
    tenant = server.tenant()
    tenant.client.chat(LONG, max_tokens=40, ignore_eos=True)
    ranks = server.admin.audit_kv(tenant.name, 16)["ranks"]
    assert len(ranks) == 2
    assert all(rank["rows_compared"] > 0 and rank["max_abs_difference"] <= 1e-3 for rank in ranks)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_wholly_cached_prompt_still_computes_its_last_token(server: LiveServer, length: int) -> None:
    """Case B18 at block size 16: never the whole prompt, and the last block stays in the chain for the next turn."""
    tenant = server.tenant()
    prompt = list(range(10, 10 + length))
    cold = tenant.client.complete(prompt, max_tokens=1, ignore_eos=True)
    warm = tenant.client.complete(prompt, max_tokens=1, ignore_eos=True)
    longer = tenant.client.complete([*prompt, *range(200, 209)], max_tokens=1, ignore_eos=True)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 16 * ((length - 1) // 16))
    assert longer.cached_tokens == 16 * (length // 16)
    assert warm.text == cold.text
