"""Drawn and greedy rows of one batch on one rank and on two: equal tokens, whatever shares the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_ranks import ModelRanks
from paged_run import make_batch
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.models.convert import convert
from copyhold.models.llama import LlamaShard
from copyhold.models.sampling import RowDraw, SamplingParams, sample_token

ROWS, BLOCKS = 6, 4
PARAMS = [
    SamplingParams(1.0, seed=1),
    SamplingParams(0.7, 0.9, seed=-5),
    SamplingParams(1.5, 1.0, 20, seed=2**63 - 1),
    SamplingParams(2.0, 0.5, 40, seed=4),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, ModelRanks]:
    """By number of ranks; two hold 2 and 1 KV heads and uneven parts of the vocabulary."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("sampling")
    source = make_tiny_checkpoint(root / "hf", hidden_size=72, num_heads=9, num_kv_heads=3, tied=False)
    return {tp: ModelRanks(convert(source, root / "cache", tp), num_blocks=ROWS * BLOCKS) for tp in (1, 2)}


def draws_of(rows: list[int], position: int) -> list[RowDraw]:
    return [RowDraw(row, position, PARAMS[row % len(PARAMS)]) for row in rows]


def prompts(count: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(3, 300, 30).tolist() for n in range(count)]


def tables() -> np.ndarray:
    return np.arange(ROWS * BLOCKS, dtype=np.int32).reshape(ROWS, BLOCKS)


def generate(ranks: ModelRanks, drawn_rows: list[int], steps: int) -> np.ndarray:
    """Tokens `[steps, ROWS]`; every rank must have chosen the same."""
    rows, chosen = prompts(ROWS), []
    starts = [0] * ROWS
    for step in range(steps):
        batch, draws = make_batch(rows, starts, tables()), draws_of(drawn_rows, 30 + step)
        each = ranks.each(lambda shard, batch=batch, draws=draws: shard.choose(shard.forward(batch), draws))
        assert all(np.array_equal(each[0], other) for other in each)
        chosen.append(each[0])
        starts, rows = [30 + step] * ROWS, [[int(token)] for token in each[0]]
    return np.stack(chosen)


def test_one_rank_and_two_draw_the_same_tokens(ranks: dict[int, ModelRanks]) -> None:
    parts = [len(shard.partition.vocab) for shard in ranks[2].shards]
    assert len(set(parts)) == 2, "the shards of the vocabulary are uneven"
    one, two = (generate(ranks[tp], [0, 1, 2, 3, 4], 24) for tp in (1, 2))
    assert np.array_equal(one, two)
    assert len(set(one[:, 0].tolist())) > 10, "a drawn row varies"


def test_a_row_is_the_same_alone_and_beside_others(ranks: dict[int, ModelRanks]) -> None:
    mixed = generate(ranks[2], [0, 2, 4], 8)
    greedy = generate(ranks[1], [], 8)
    drawn = generate(ranks[1], [0, 1, 2, 3, 4, 5], 8)
    assert np.array_equal(mixed[:, [1, 3, 5]], greedy[:, [1, 3, 5]])
    assert np.array_equal(mixed[:, [0, 2, 4]], drawn[:, [0, 2, 4]])


def test_gathered_rows_have_the_same_bits_on_every_rank(ranks: dict[int, ModelRanks]) -> None:
    batch = make_batch(prompts(ROWS), [0] * ROWS, tables())
    whole = ranks[1].shards[0].forward(batch).numpy()
    first, second = ranks[2].each(lambda shard: shard.full_rows(shard.forward(batch)))
    assert first.tobytes() == second.tobytes()
    np.testing.assert_allclose(first, whole, atol=1e-4)


def test_greedy_rows_are_not_gathered(ranks: dict[int, ModelRanks], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(prompts(ROWS), [0] * ROWS, tables())
    logits = ranks[1].shards[0].forward(batch)
    gathered: list[int] = []
    full_rows = LlamaShard.full_rows

    def counting(shard: LlamaShard, rows: torch.Tensor) -> np.ndarray:
        gathered.append(rows.shape[0])
        return full_rows(shard, rows)

    monkeypatch.setattr(LlamaShard, "full_rows", counting)
    shard = ranks[1].shards[0]
    assert np.array_equal(shard.choose(logits), shard.greedy(logits))
    assert gathered == []
    draws = draws_of([1, 4], 30)
    chosen = shard.choose(logits, draws)
    assert gathered == [2]
    assert [chosen[draw.row] for draw in draws] == [
        sample_token(logits[draw.row].numpy(), draw.params, draw.position) for draw in draws
    ]
