"""The sentence of an explanation says what the receipt says, for every limit and reason."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from copyhold.actors.messages import ReuseReceipt
from copyhold.cluster.explain import explanation, explanation_sentence, receipt_projection
from copyhold.kvcore.lengths import prefix_lengths

RECEIPT = ReuseReceipt(
    receipt_id="r", request_id="q", namespace="a", model="m", created_at=12.9, prompt_tokens=50,
    cached_tokens=48, semantic_tokens=50, indexed_tokens=48, cap_tokens=49, junction_tokens=48, block_size=16,
    limit="indexed", reason="not_indexed",
)  # fmt: skip


@pytest.mark.parametrize("limit", ["semantic", "indexed", "cap", "alignment", "junction"])
def test_a_hit_names_its_blocks_and_its_limit(limit: str) -> None:
    sentence = explanation_sentence(msgspec.structs.replace(RECEIPT, limit=limit, reason="logits_cap"))
    assert sentence.startswith("48 of 50 prompt tokens (3 blocks of 16) came from the cache; the limit was ")
    assert "because the last prompt token" in sentence and sentence.endswith(".")


@pytest.mark.parametrize(
    "reason",
    ["tokens_differ", "not_indexed", "prompt_shorter_than_block", "root_empty", "lookup_not_permitted"],
)
def test_a_miss_says_why(reason: str) -> None:
    sentence = explanation_sentence(msgspec.structs.replace(RECEIPT, cached_tokens=0, reason=reason))
    assert sentence.startswith("None of the 50 prompt tokens came from the cache because ")
    assert reason not in sentence, "a name is not a sentence"


def test_every_limit_and_reason_of_the_ledger_has_words() -> None:
    flags = list(itertools.product((False, True), repeat=3))
    lengths = [(p, s, i) for p in range(1, 14) for s in range(p + 1) for i in range(s + 1)]
    matches = {
        (match.limit, match.reason, match.runtime)
        for (prompt, semantic, indexed), (diverged, empty, lookup) in itertools.product(lengths, flags)
        for match in [
            prefix_lengths(prompt, semantic, indexed, 4, diverged=diverged, root_empty=empty, lookup=lookup)
        ]
    }
    assert len({reason for _, reason, _ in matches}) >= 6
    for limit, reason, runtime in matches:
        receipt = msgspec.structs.replace(
            RECEIPT, cached_tokens=runtime, limit=limit, reason=reason, block_size=4
        )
        sentence = explanation_sentence(receipt)
        assert reason not in sentence and reason.replace("_", " ") not in sentence
        assert runtime == 0 or f"the limit was {limit}," not in sentence


def test_a_name_it_does_not_know_is_still_said() -> None:
    sentence = explanation_sentence(msgspec.structs.replace(RECEIPT, limit="junction", reason="window_gone"))
    assert "junction" in sentence and "window gone" in sentence


def test_projections_hold_the_tenants_own_figures_only() -> None:
    told = {"semantic": 50, "indexed": 48, "cap": 49, "junction": 48, "runtime": 48, "recompute": 2}
    assert explanation(RECEIPT)["lengths"] == told
    body = receipt_projection(RECEIPT)
    assert body["created"] == 12 and body["deterministic"] is False
    assert receipt_projection(msgspec.structs.replace(RECEIPT, deterministic=True))["deterministic"] is True
    assert not {"generation", "replica", "incarnation", "blocks", "digest"} & set(body)
