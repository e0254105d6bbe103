"""Three ranks and two replicas: the same answers, requests where their prefix lies, and one replica when the other dies."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_cluster import LiveServer, run_server, tiny_config, wait_until
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.actors.routing import DIGEST_EVERY_TOKENS
from copyhold.cluster.sdk import Client

# Two whole strides of routing digests, and too little after them for a long answer to make a third.
HARBOUR = [5 + n % 90 for n in range(530)]
MARKET = [8 + 7 * n % 101 for n in range(530)]


@pytest.fixture(scope="module")
def three_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine query and three KV heads, as SmolLM2 has: three ranks are the most."""
    shape: dict[str, Any] = {"hidden_size": 144, "num_heads": 9, "num_kv_heads": 3, "intermediate_size": 192}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("three") / "model", seed=5, **shape)


@pytest.fixture(scope="module")
def pair(three_heads: Path, model_cache: Path) -> Iterator[LiveServer]:
    """Two replicas of three ranks."""
    yield from run_server(tiny_config(three_heads, model_cache, tp=3, replicas=2))


@dataclass
class Warm:
    """A tenant with one prefix on each replica: the incarnations that hold them."""

    client: Client
    harbour: str
    market: str


@pytest.fixture(scope="module")
def warm(pair: LiveServer) -> Warm:
    """The second prefix goes to the other replica, because the first still runs on its own."""
    client = pair.tenant().client
    started, finish = threading.Event(), threading.Event()

    def hold() -> None:
        with client.stream_complete(HARBOUR, max_tokens=200, ignore_eos=True) as stream:
            for _ in stream:
                started.set()
                if finish.is_set():
                    return

    thread = threading.Thread(target=hold)
    thread.start()
    assert started.wait(60)
    client.complete(MARKET, max_tokens=2, ignore_eos=True)
    finish.set()
    thread.join(60)
    first, second = routes(pair)[-2:]
    wait_until(lambda: coordinator(pair)["entries"] == 2 * (len(HARBOUR) // DIGEST_EVERY_TOKENS))
    return Warm(client, first["incarnation"], second["incarnation"])


def coordinator(server: LiveServer) -> dict[str, Any]:
    return server.admin.status()["coordinator"]


def routes(server: LiveServer) -> list[dict[str, Any]]:
    """The last route receipts, oldest first."""
    return coordinator(server)["routes"]


def counts(server: LiveServer) -> dict[str, tuple[int, int]]:
    """Admitted requests and tokens served from the cache, by incarnation."""
    return {
        r["incarnation"]: (r["admitted_requests"], r["cached_tokens"])
        for r in server.admin.status()["replicas"]
    }


def test_a_prefix_of_its_own_warms_each_replica(warm: Warm) -> None:
    assert warm.harbour != warm.market
    assert {name.rpartition("-")[0] for name in (warm.harbour, warm.market)} == {"replica-0", "replica-1"}


@pytest.mark.parametrize("turn", range(2))
def test_requests_go_where_their_prefix_lies(pair: LiveServer, warm: Warm, turn: int) -> None:
    for tokens, holder, other in ((HARBOUR, warm.harbour, warm.market), (MARKET, warm.market, warm.harbour)):
        before = counts(pair)
        reply = warm.client.complete([*tokens, 40 + turn, 41, 42], max_tokens=4, ignore_eos=True)
        route = routes(pair)[-1]
        assert route["incarnation"] == holder and holder.startswith(route["replica"])
        assert route["expected_hit_tokens"] == len(tokens) // DIGEST_EVERY_TOKENS * DIGEST_EVERY_TOKENS == 512
        assert reply.cached_tokens >= route["expected_hit_tokens"], "the receipt of the route kept its word"
        after = counts(pair)
        assert after[holder] == (before[holder][0] + 1, before[holder][1] + reply.cached_tokens)
        assert after[other] == before[other]


def test_without_a_prefix_the_less_loaded_replica_is_chosen(pair: LiveServer, warm: Warm) -> None:
    with warm.client.stream_complete(HARBOUR, max_tokens=200, ignore_eos=True) as stream:
        next(iter(stream))
        warm.client.complete([99, 98, 97], max_tokens=2, ignore_eos=True)
        held, free = routes(pair)[-2:]
    assert (held["incarnation"], free["incarnation"]) == (warm.harbour, warm.market)
    assert free["expected_hit_tokens"] == 0


def test_another_tenant_is_not_drawn_to_a_prefix(pair: LiveServer, warm: Warm) -> None:
    reply = pair.tenant().client.complete([*MARKET, 1, 2], max_tokens=2, ignore_eos=True)
    assert reply.cached_tokens == 0 and routes(pair)[-1]["expected_hit_tokens"] == 0


def test_three_ranks_agree_and_answer_as_one_rank_does(
    pair: LiveServer, warm: Warm, three_heads: Path, model_cache: Path
) -> None:
    prompts = [HARBOUR[:50], MARKET[:333], [*HARBOUR, 17], [9]]

    def answers(client: Client) -> list[str]:
        return [client.complete(tokens, max_tokens=24, ignore_eos=True).text for tokens in prompts]

    three = answers(warm.client)
    for replica in pair.admin.status()["replicas"]:
        assert replica["agreement"]["ledgers"] == 4 and replica["agreement"]["differing"] == 0
    assert len(pair.admin.ranks()["ranks"]) == 6
    for single in run_server(tiny_config(three_heads, model_cache, tp=1)):
        assert answers(single.tenant().client) == three


def test_when_one_replica_dies_requests_go_on_through_the_other(pair: LiveServer, warm: Warm) -> None:
    alive, doomed = warm.harbour, warm.market
    expected = warm.client.complete(MARKET, max_tokens=4, ignore_eos=True).text
    pid = scheduler_process(pair, doomed)
    os.kill(pid, signal.SIGKILL)
    replies = [warm.client.complete(MARKET, max_tokens=4, ignore_eos=True) for _ in range(3)]
    assert [reply.text for reply in replies] == [expected] * 3
    assert replies[-1].cached_tokens > 0, "computed once by the other, reused since"
    assert counts(pair)[alive][0] > 0 and routes(pair)[-1]["incarnation"] == alive
    wait_until(
        lambda: len(coordinator(pair)["replicas"]) == 2 and doomed not in coordinator(pair)["replicas"], 60.0
    )
    assert all(route["incarnation"] != doomed for route in routes(pair)[-2:])
    pair.assert_quiet()


def scheduler_process(server: LiveServer, incarnation: str) -> int:
    """The process that holds this incarnation's step channel open as its listener."""
    for pid in server.supervisor.pids():
        process = psutil.Process(pid)
        if "ray::Replica" not in " ".join(process.cmdline()):
            continue
        if any(incarnation in connection.laddr for connection in process.net_connections("unix")):
            return pid
    raise AssertionError(f"no process listens for {incarnation}")
