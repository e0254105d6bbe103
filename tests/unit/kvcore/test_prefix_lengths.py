"""Lengths of a prefix hit: worked examples and the inequality between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhold.kvcore.lengths import prefix_lengths

FIXTURES = json.loads((Path(__file__).parents[2] / "data" / "fixtures.json").read_text())["fixtures"]
BY_ID = {fixture["id"]: fixture for fixture in FIXTURES}


@pytest.mark.parametrize("name", ["F060", "F061", "F062", "F066"])
def test_worked_example_reproduces_every_length(name: str) -> None:
    given_, expected = BY_ID[name]["inputs"], BY_ID[name]["expected"]
    found = prefix_lengths(
        given_["S_prompt"],
        given_["S_sem"],
        given_["S_indexed"],
        given_["P"],
        requires_logits=given_["requires_logits"],
    )
    assert (found.cap, found.runtime) == (expected["S_cap"], expected["S_runtime"])
    assert found.prompt - found.runtime == expected["S_recompute"]
    new_blocks = -(-found.prompt // given_["P"]) - found.runtime // given_["P"]
    assert new_blocks == expected["new_block_bundles"]


def test_empty_prompt_never_enters_the_arithmetic() -> None:
    assert BY_ID["F065"]["inputs"]["S_prompt"] == 0
    with pytest.raises(ValueError, match="empty prompt"):
        prefix_lengths(0, 0, 0, 16)


def test_lengths_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="out of order"):
        prefix_lengths(10, 4, 8, 4)


@pytest.mark.parametrize(
    ("lengths", "flags", "limit", "reason"),
    [
        ((48, 48, 48, 16), {}, "cap", "logits_cap"),
        ((50, 50, 48, 16), {}, "alignment", "page_alignment"),
        ((16, 16, 16, 16), {}, "cap", "logits_cap"),
        ((100, 50, 48, 16), {"diverged": True}, "semantic", "tokens_differ"),
        ((100, 48, 48, 16), {}, "indexed", "not_indexed"),
        ((100, 64, 16, 16), {"diverged": True}, "indexed", "not_indexed"),
        ((100, 0, 0, 16), {"root_empty": True}, "indexed", "root_empty"),
        ((100, 0, 0, 16), {"lookup": False}, "indexed", "lookup_not_permitted"),
        ((15, 15, 0, 16), {}, "alignment", "prompt_shorter_than_block"),
        ((48, 48, 48, 16), {"requires_logits": False}, "semantic", "whole_prompt"),
    ],
)
def test_receipt_names_the_limit_and_the_reason(
    lengths: tuple[int, int, int, int], flags: dict[str, Any], limit: str, reason: str
) -> None:
    found = prefix_lengths(*lengths, **flags)
    assert (found.limit, found.reason) == (limit, reason)


@given(st.data())
def test_runtime_never_exceeds_any_length(data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, 500))
    semantic = data.draw(st.integers(0, prompt))
    indexed = data.draw(st.integers(0, semantic))
    alignment = data.draw(st.sampled_from([1, 4, 16, 64]))
    found = prefix_lengths(prompt, semantic, indexed, alignment, diverged=data.draw(st.booleans()))
    assert found.runtime <= min(semantic, indexed, found.cap) <= prompt
    assert found.runtime < prompt
    assert found.runtime % alignment == 0
    assert min(semantic, indexed, found.cap) - found.runtime < alignment
