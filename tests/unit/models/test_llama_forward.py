"""The forward pass against transformers on random checkpoints: logits, greedy tokens, every cut, every chunking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_ranks import ModelRanks
from paged_run import make_batch
from tiny_checkpoint import make_tiny_checkpoint
from transformers import AutoModelForCausalLM

from copyhold.kernels.errors import KernelContractMismatch, KernelInputRefused
from copyhold.kernels.pool import KVPool
from copyhold.models.collective import SingleProcess
from copyhold.models.convert import convert
from copyhold.models.errors import (
    ModelFileInvalid,
    ModelFileMissing,
    NonFiniteLogits,
    PositionOutOfRange,
    TokenOutOfVocabulary,
)
from copyhold.models.llama import LlamaShard
from copyhold.models.oneshot import audit_kv

LOGITS_TOLERANCE_FP32 = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False},
    "uneven_heads": {"hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "tied": False},
    "no_groups": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 32},
    "llama3_rope": {
        "config_overrides": {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        }
    },
    "linear_rope": {"config_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}},
}


@pytest.fixture(autouse=True)
def _no_gradients() -> None:
    torch.set_grad_enabled(False)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def shuffled_tables(sequences: int, blocks_each: int, num_blocks: int) -> np.ndarray:
    blocks = np.random.default_rng(9).permutation(num_blocks)[: sequences * blocks_each]
    return blocks.reshape(sequences, blocks_each).astype(np.int32)


def oracle(folder: Path, tokens: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model(torch.tensor([tokens])).logits[0].numpy()


def logits_of(ranks: ModelRanks, batch: Any) -> np.ndarray:
    return np.concatenate([part.numpy() for part in ranks.each(lambda shard: shard.forward(batch))], axis=1)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_every_row_equal_transformers(tmp_path: Path, shape: str, tp_size: int) -> None:
    folder = make_tiny_checkpoint(tmp_path / "hf", **SHAPES[shape])
    tokens = prompt(150)
    ranks = ModelRanks(convert(folder, tmp_path / "cache", tp_size), num_blocks=20)
    batch = make_batch([tokens], [0], shuffled_tables(1, 10, 20))
    batch.logit_rows = np.arange(150, dtype=np.int64)
    expected = oracle(folder, tokens)
    np.testing.assert_allclose(logits_of(ranks, batch), expected, atol=LOGITS_TOLERANCE_FP32)
    logits = ranks.each(lambda shard: shard.greedy(shard.forward(batch)))
    assert all(np.array_equal(chosen, logits[0]) for chosen in logits)
    assert (logits[0] == expected.argmax(-1)).all()


@pytest.mark.parametrize("block_size", [16, 32])
def test_chunks_of_24_and_a_mixed_step_equal_one_shot(tmp_path: Path, block_size: int) -> None:
    checkpoint = convert(make_tiny_checkpoint(tmp_path / "hf"), tmp_path / "cache", 1)
    first, second = prompt(100, 1), prompt(61, 2)
    tables = shuffled_tables(2, 8, 20)
    whole = ModelRanks(checkpoint, 20, block_size)
    expected = [
        logits_of(whole, make_batch([t], [0], tables[i : i + 1], block_size))[0]
        for i, t in enumerate((first, second))
    ]
    ranks = ModelRanks(checkpoint, 20, block_size)
    shard = ranks.shards[0]
    for start in (0, 24, 48):
        shard.forward(make_batch([first[start : start + 24]], [start], tables[:1], block_size))
    shard.forward(make_batch([first[72:96], second[:60]], [72, 0], tables, block_size))
    found = logits_of(ranks, make_batch([first[96:], second[60:]], [96, 60], tables, block_size))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert all(np.abs(whole.shards[0].pool.k - shard.pool.k).max() < 1e-5 for _ in (0,))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_audit_finds_correct_rows_and_one_wrong_value(tmp_path: Path, tp_size: int) -> None:
    ranks = ModelRanks(convert(make_tiny_checkpoint(tmp_path / "hf"), tmp_path / "cache", tp_size), 20)
    tokens, tables = prompt(70), shuffled_tables(1, 5, 20)
    for start, stop in ((0, 33), (33, 69), (69, 70)):
        batch = make_batch([tokens[start:stop]], [start], tables)
        ranks.each(lambda shard, batch=batch: shard.forward(batch))
    ids, sample = np.array(tokens, dtype=np.int32), np.array([0, 15, 16, 40, 68])
    before = [shard.pool.k.copy() for shard in ranks.shards]
    for report in ranks.each(lambda shard: audit_kv(shard, ids, tables[0], sample)):
        assert report.rows_compared == 10 and report.layers == (0, 1)
        assert report.max_abs_difference < 1e-5
    assert all(np.array_equal(a, s.pool.k) for a, s in zip(before, ranks.shards, strict=True))
    tile = tables[0][40 // 16]
    ranks.shards[-1].pool.v[1, tile, -1, 40 % 16, -1] += 0.5
    reports = ranks.each(lambda shard: audit_kv(shard, ids, tables[0], sample))
    assert reports[-1].max_abs_difference == pytest.approx(0.5, abs=1e-4)
    only_first = ranks.each(lambda shard: audit_kv(shard, ids, tables[0], sample, layers=(0,)))
    assert only_first[-1].max_abs_difference < 1e-5 and only_first[-1].rows_compared == 5
    ranks.shards[-1].pool.v[1, tile, -1, 40 % 16, -1] = np.nan
    assert ranks.each(lambda shard: audit_kv(shard, ids, tables[0], sample))[-1].max_abs_difference == float(
        "inf"
    )
    assert ranks.each(lambda shard: audit_kv(shard, ids, tables[0], sample[:0]))[0].rows_compared == 0


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> ModelRanks:
    base = tmp_path_factory.mktemp("alone")
    folder = make_tiny_checkpoint(base / "hf", max_positions=128)
    return ModelRanks(convert(folder, base / "cache", 1), 12)


@pytest.mark.parametrize("token", [-1, 300, 2**40])
def test_a_token_outside_the_vocabulary_writes_no_row(alone: ModelRanks, token: int) -> None:
    shard = alone.shards[0]
    shard.pool.zero_blocks(range(12))
    with pytest.raises(TokenOutOfVocabulary, match=str(token)):
        shard.forward(make_batch([[5, token]], [0], shuffled_tables(1, 1, 12)))
    assert shard.pool.count_nonzero_bytes(range(12)) == 0


def test_a_position_beyond_the_context_and_a_bad_table_write_no_row(alone: ModelRanks) -> None:
    shard = alone.shards[0]
    shard.pool.zero_blocks(range(12))
    with pytest.raises(PositionOutOfRange, match="128"):
        shard.forward(make_batch([[5]], [128], shuffled_tables(1, 9, 12)))
    with pytest.raises(KernelInputRefused):
        shard.forward(make_batch([[5]], [0], np.array([[12]], dtype=np.int32)))
    with pytest.raises(ValueError, match="sampled positions"):
        audit_kv(shard, np.array([5], dtype=np.int32), np.array([0]), np.array([1]))
    assert shard.pool.count_nonzero_bytes(range(12)) == 0


def test_a_step_without_logits_or_rows_is_a_step(alone: ModelRanks) -> None:
    shard = alone.shards[0]
    quiet = make_batch([prompt(40)], [0], shuffled_tables(1, 3, 12))
    quiet.logit_rows = np.empty(0, dtype=np.int64)
    assert shard.forward(quiet).shape == (0, 300)
    empty = make_batch([[]], [0], shuffled_tables(1, 1, 12))
    assert shard.greedy(shard.forward(empty)).shape == (0,)


def test_a_batch_larger_than_the_scratch_grows_it(alone: ModelRanks) -> None:
    shard = alone.shards[0]
    tables = shuffled_tables(1, 7, 12)
    large = shard.forward(make_batch([prompt(100)], [0], tables))
    shard.forward(make_batch([prompt(50)], [0], tables))
    small = shard.forward(make_batch([prompt(100)[50:]], [50], tables))
    np.testing.assert_allclose(large.numpy(), small.numpy(), atol=1e-5)


class Shards:
    """A collective that stands for two ranks whose pairs were computed beforehand."""

    kind, rank, world_size = "shards", 0, 2

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Greedy choice adds nothing."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, self.other]


def test_greedy_takes_the_lowest_id_of_equal_logits_and_refuses_nan(alone: ModelRanks) -> None:
    shard = alone.shards[0]
    logits = torch.tensor([[1.0, 7.0, 7.0], [1.0, 2.0, 3.0], [-5.0, -4.0, -6.0]])
    assert shard.greedy(logits).tolist() == [1, 2, 1]
    shard.collective = Shards(torch.tensor([[7.0, 3.5, -4.5], [200.0, 201.0, 202.0]], dtype=torch.float64))
    try:
        assert shard.greedy(logits).tolist() == [1, 201, 1]
        shard.collective.other[0, 1] = float("nan")
        with pytest.raises(NonFiniteLogits):
            shard.greedy(logits)
    finally:
        shard.collective = SingleProcess()


def test_shards_and_pools_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made = convert(make_tiny_checkpoint(tmp_path / "hf"), tmp_path / "cache", 2)
    part, good = made.partitions[0], KVPool(2, 4, 1, 16)
    with pytest.raises(KernelContractMismatch, match="KV heads"):
        LlamaShard(made.config, part, made.shard_path(0), KVPool(2, 4, 2, 16), SingleProcess())
    with pytest.raises(ModelFileInvalid, match="rank-1-of-2"):
        LlamaShard(made.config, part, made.shard_path(1), good, SingleProcess())
    with pytest.raises(ModelFileMissing, match="nothing"):
        LlamaShard(made.config, part, tmp_path / "nothing", good, SingleProcess())
    made.shard_path(0).write_bytes(made.shard_path(0).read_bytes()[:5000])
    with pytest.raises(ModelFileInvalid, match="rank-0-of-2"):
        LlamaShard(made.config, part, made.shard_path(0), good, SingleProcess())
