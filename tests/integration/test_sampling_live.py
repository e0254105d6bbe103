"""Seeds and stop strings on real servers: equal over ranks and reuse, and the receipt says how the text ended."""

from __future__ import annotations

import openai
from live_cluster import LiveServer

from copyhold.cluster.sdk import Client, TextStream

TALE = [
    {"role": "system", "content": "You are the clerk of a small harbour. " * 6},
    {"role": "user", "content": "Which ships came in today?"},
]


def drawn(client: Client, seed: int, temperature: float = 1.0) -> tuple[int, ...]:
    with client.stream(
        TALE,
        max_tokens=32,
        ignore_eos=True,
        return_token_ids=True,
        temperature=temperature,
        top_p=0.95,
        seed=seed,
    ) as stream:
        stream.reply()
    assert len(stream.token_ids) == 32
    return stream.token_ids


def read(stream: TextStream) -> str:
    with stream:
        return "".join(stream)


def test_a_seed_gives_the_same_text_on_one_rank_and_on_two(
    server: LiveServer, server_tp1: LiveServer
) -> None:
    two, one = server.tenant().client, server_tp1.tenant().client
    first = [drawn(two, seed) for seed in (1, 2, 3)]
    assert first == [drawn(one, seed) for seed in (1, 2, 3)]
    assert first == [drawn(two, seed) for seed in (1, 2, 3)], "with the prefix cached"
    greedy = drawn(two, 1, temperature=0.0)
    assert len({*first, greedy}) == 4, "different seeds differ"
    assert drawn(two, 5, temperature=0.0) == greedy
    unseeded = {
        two.complete([9, 8, 7], max_tokens=16, ignore_eos=True, temperature=1.5).text for _ in range(3)
    }
    assert len(unseeded) == 3
    for live in (server, server_tp1):
        live.assert_quiet()


def test_a_stop_string_ends_text_request_and_receipt_together(server: LiveServer) -> None:
    tenant = server.tenant()
    client = tenant.client
    whole = client.chat(TALE, max_tokens=200, ignore_eos=True, temperature=1.0, seed=4)
    stop = whole.text[40:43]
    text = whole.text[: whole.text.index(stop)]
    for included in (False, True):
        plain = client.chat(
            TALE, max_tokens=200, ignore_eos=True, temperature=1.0, seed=4, stop=stop,
            include_stop_str_in_output=included,
        )  # fmt: skip
        stream = client.stream(
            TALE, max_tokens=200, ignore_eos=True, temperature=1.0, seed=4, stop=[stop, "\u4e16"],
            include_stop_str_in_output=included,
        )  # fmt: skip
        assert plain.text == read(stream) == (text + stop if included else text)
        assert plain.finish_reason == stream.finish_reason == "stop"
        assert stream.usage is not None
        assert 0 < plain.completion_tokens == stream.usage.completion_tokens < 200
        for receipt_id in (plain.receipt_id, stream.receipt_id):
            receipt = client.receipts(receipt_id)
            assert (receipt.finish_reason, receipt.completion_tokens) == ("stop", plain.completion_tokens)
    # A limit that the engine reaches while the text is still read: the receipt is put right afterwards.
    limit = plain.completion_tokens
    for extra in (0, 1, 2):
        reply = client.chat(
            TALE, max_tokens=limit + extra, ignore_eos=True, temperature=1.0, seed=4, stop=stop
        )
        receipt = client.receipts(reply.receipt_id)
        assert (reply.text, reply.completion_tokens, reply.finish_reason) == (text, limit, "stop")
        assert (receipt.completion_tokens, receipt.finish_reason) == (limit, "stop")
    assert client.chat(TALE, max_tokens=8, ignore_eos=True).cached_tokens > 0, "what was published is kept"
    server.assert_quiet()


def test_openais_client_samples(server: LiveServer) -> None:
    tenant = server.tenant()
    with openai.OpenAI(base_url=server.url + "/v1", api_key=tenant.key, max_retries=0) as client:
        texts = [
            client.completions.create(
                model="tiny", prompt=[5, 6, 7, 8], max_tokens=16, temperature=0.9, seed=seed, extra_body={"top_k": 50}
            ).choices[0].text
            for seed in (1, 1, 2)
        ]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]
