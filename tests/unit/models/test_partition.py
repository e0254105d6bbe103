"""How a model is cut over ranks."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhold.models.config import ModelConfig
from copyhold.models.errors import InvalidRankCount, TooManyRanks
from copyhold.models.partition import partition

SMOLLM2 = ModelConfig(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_positions=8192,
    rms_eps=1e-5,
    rope_theta=1e5,
    tied_embeddings=True,
)


def test_two_ranks_of_smollm2_are_uneven() -> None:
    first, second = partition(SMOLLM2, 2)
    assert [len(part.kv_heads) for part in (first, second)] == [2, 1]
    assert [len(part.q_heads) for part in (first, second)] == [6, 3]
    assert [len(part.ffn) for part in (first, second)] == [1024, 512]
    assert 0 < len(first.vocab) < len(second.vocab) < SMOLLM2.vocab_size


def test_three_ranks_of_smollm2_are_even() -> None:
    parts = partition(SMOLLM2, 3)
    assert {(len(p.kv_heads), len(p.q_heads), len(p.ffn), len(p.vocab)) for p in parts} == {
        (1, 3, 512, 16384)
    }


def test_more_ranks_than_kv_heads_are_refused_with_both_numbers() -> None:
    with pytest.raises(TooManyRanks, match=r"4 tensor-parallel ranks .* 3 KV heads") as refused:
        partition(SMOLLM2, 4)
    assert (refused.value.ranks, refused.value.kv_heads) == (4, 3)


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(InvalidRankCount):
        partition(SMOLLM2, ranks)


@given(
    kv_heads=st.integers(1, 16),
    group=st.integers(1, 8),
    ffn=st.integers(16, 15000),
    vocab=st.integers(32, 130_000),
    layers=st.integers(1, 80),
    ranks=st.integers(1, 16),
)
def test_ranges_cover_every_axis_once_and_no_rank_is_empty(
    kv_heads: int, group: int, ffn: int, vocab: int, layers: int, ranks: int
) -> None:
    config = msgspec.structs.replace(
        SMOLLM2,
        num_kv_heads=kv_heads,
        num_heads=kv_heads * group,
        intermediate_size=ffn,
        vocab_size=vocab,
        num_layers=layers,
    )
    if ranks > kv_heads:
        with pytest.raises(TooManyRanks):
            partition(config, ranks)
        return
    parts = partition(config, ranks)
    totals = {"kv_heads": kv_heads, "q_heads": kv_heads * group, "ffn": ffn, "vocab": vocab}
    for axis, total in totals.items():
        ranges = [getattr(part, axis) for part in parts]
        assert ranges[0].start == 0 and ranges[-1].stop == total
        assert all(a.stop == b.start for a, b in pairwise(ranges))
        assert all(len(r) > 0 for r in ranges)
    heads = [len(part.kv_heads) for part in parts]
    assert heads == sorted(heads, reverse=True) and heads[0] - heads[-1] <= 1
