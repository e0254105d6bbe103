"""The documents' radix trace (F070 to F07A) and the change at token 37 (F063), played as commands of the ledger.

Pages of one token. What the trace calls a lock is a running request, which holds blocks of its own besides.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from copyhold.kvcore.commands import Evict, NodeHandle

FACTS = {
    fact["id"]: fact
    for fact in json.loads((Path(__file__).parents[2] / "data" / "fixtures.json").read_text())["fixtures"]
}
CHAT_A, CHAT_B = [10, 11, 12, 13, 20, 21], [10, 11, 12, 13, 30, 31]
NEXT = 99


class Trace:
    """A pool of 24 pages, and what the trace counts."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.counted = driver, {}
        self.evicted_edges = self.evicted_pages = self.duplicates = 0

    def count(self, operation: str) -> None:
        pool = self.driver.ledger.state.pool
        tree = int(np.count_nonzero(pool.node.array))
        private = int(np.count_nonzero((pool.ref.array > 0) & (pool.node.array == 0)))
        self.counted[operation] = (tree, pool.free.count + private)

    def edges(self) -> dict[tuple[int, ...], NodeHandle]:
        state = self.driver.ledger.state
        return {
            tuple(state.tree.tokens[node].tolist()): NodeHandle(node, int(state.tree.generation.array[node]))
            for scope in state.tree.roots
            for node in state.tree.subtree(scope)
        }

    def insert(self, tokens: list[int]) -> int:
        """Computes and publishes a prompt without a lookup; pages that the tree had already."""
        handle = self.driver.admit(tokens, lookup=False).request
        self.driver.prefill(handle)
        duplicates = self.driver.publish(handle).entries[0].duplicate_blocks
        assert self.driver.release(handle).freed_blocks == duplicates
        self.duplicates += duplicates
        return duplicates

    def evict(self, *edges: tuple[int, ...]) -> int:
        known = self.edges()
        receipt = self.driver.apply(Evict(tuple([known[edge] for edge in edges])))
        self.evicted_edges += receipt.nodes
        self.evicted_pages += receipt.freed_blocks
        return receipt.freed_blocks

    def ready(self) -> list[tuple[int, ...]]:
        """Edges that could go now."""
        tree = self.driver.ledger.state.tree
        return [
            tuple(tree.tokens[leaf.handle.node].tolist()) for leaf in self.driver.ledger.evictable_leaves()
        ]


def test_the_radix_trace_has_the_documents_counts(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(block_size=1, num_blocks=24)
    trace = Trace(driver)
    assert trace.insert(CHAT_A) == 0
    trace.count("r01")
    before = driver.ledger.paths("a")[0][2].tolist()
    split = driver.admit([10, 11, 12, 99])
    driver.abort()
    lcp = FACTS["F070"]["expected"]
    assert split.match.runtime == lcp["lcp"] == lcp["matched"]
    assert list(trace.edges()) == [tuple(lcp["shared"]["tokens"]), tuple(lcp["old"]["tokens"])]
    assert driver.ledger.paths("a")[0][2].tolist() == before, "a split moves no page"
    trace.count("r02")
    assert driver.ledger.probe(driver.scope(), np.array([*CHAT_A, NEXT], "<i4").tobytes()).match.runtime == 6
    trace.count("r03")
    appended = FACTS["F072"]["inputs"]["append_tokens"]
    chat_a = driver.admit([*CHAT_A, *appended])
    trace.count("r04")
    inserted = FACTS["F071"]["expected"]
    assert trace.insert(CHAT_B) == inserted["cached_prefix"] == len(inserted["duplicates_released"])
    assert {str(list(edge)).replace(" ", "") for edge in trace.edges()} == set(inserted["edges_after"])
    assert sum(map(len, trace.edges())) == FACTS["F07A"]["expected"]["C_KV"]
    trace.count("r05")
    chat_b = driver.admit([*CHAT_B, NEXT])
    trace.count("r06")
    driver.prefill(chat_a.request)
    published = driver.publish(chat_a.request).entries[0]
    assert published.duplicate_blocks == FACTS["F072"]["expected"]["duplicates_released"]
    assert published.tokens_after == FACTS["F072"]["expected"]["matched"]
    assert published.path[-1] == trace.edges()[tuple(appended)] != chat_a.path[-1], "the lock has moved"
    trace.count("r07")
    trace.insert([50, 51, 52])
    trace.count("r08")
    assert trace.insert([50, 51, 60]) == 2
    trace.count("r09")
    few_shot = driver.admit([50, 51, 60, NEXT])
    trace.count("r10")
    assert trace.ready() == [(52,)] and trace.evict((52,)) == 1
    trace.count("r11")
    driver.release(few_shot.request)
    trace.count("r12")
    trace.count("r13")
    leaf_first = FACTS["F073"]["expected"]
    assert trace.ready() == [(60,)], "its parent is exposed only by its going"
    assert trace.evict((60,), (50, 51)) == leaf_first["released"]
    trace.count("r14")
    driver.release(chat_a.request)
    trace.count("r15")
    driver.release(chat_b.request)
    trace.count("r16")
    assert trace.evict((22, 23), (20, 21)) == FACTS["F074"]["expected"]["released"]
    trace.count("r17")
    handoff, expected = driver.admit([*CHAT_B, NEXT]), FACTS["F076"]["expected"]
    assert handoff.match.runtime == expected["matched_tokens"] and len(handoff.path) == len(
        expected["path_nodes"]
    )
    assert [handoff.match.runtime, handoff.match.prompt] == expected["suffix_interval"]
    assert not hasattr(handoff, "policy_decision"), "a receipt is a fact, not a schedule"
    trace.count("r18")
    listed = FACTS["F077"]["expected"]["operations"]
    assert trace.counted == {one["op"]: (one["tree"], one["free"]) for one in listed}
    end = FACTS["F075"]["expected"]
    assert (trace.evicted_edges, trace.evicted_pages) == (end["evicted_edges"], end["evicted_slots"])
    assert trace.duplicates == end["duplicates_released"]
    gauge = driver.ledger.gauge()
    assert gauge.evictable == end["evictable"] and gauge.total == FACTS["F075"]["inputs"]["pool_slots"]


def test_f079_a_whole_edge_goes_however_little_was_asked(make_driver: Callable[..., Any]) -> None:
    trace = Trace(make_driver(block_size=1, num_blocks=8))
    trace.insert([1, 2, 3])
    assert (
        trace.driver.evict_up_to(FACTS["F079"]["inputs"]["target"]) == FACTS["F079"]["expected"]["released"]
    )


def test_f063_a_change_at_token_37_leaves_two_pages_of_sixteen(make_driver: Callable[..., Any]) -> None:
    given, expected = FACTS["F063"]["inputs"], FACTS["F063"]["expected"]
    driver = make_driver(block_size=given["P"], num_blocks=16)
    prompt = list(range(given["S_indexed"]))
    driver.serve(prompt)
    prompt[given["change_at"]] = 999
    match = driver.ledger.probe(driver.scope(), np.array(prompt, "<i4").tobytes()).match
    assert (match.semantic, match.runtime) == (expected["S_sem"], expected["S_runtime"])
    assert match.runtime // given["P"] == expected["blocks_hit"] == expected["change_block"]


def test_hits_by_block_size_are_a_staircase(make_driver: Callable[..., Any]) -> None:
    """A prompt of n cached tokens hits n - 1 of them, rounded down to whole pages."""
    for page in (1, 4, 16, 32):
        driver = make_driver(block_size=page, num_blocks=96 // page)
        tokens = list(range(64))
        driver.serve(tokens)
        for length in range(1, 65):
            match = driver.ledger.probe(driver.scope(), np.array(tokens[:length], "<i4").tobytes()).match
            assert match.runtime == (length - 1) // page * page, (page, length)
