"""A model over K/V of every storage type and over the float64 kernels: close to float32, and as cached as when cold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_ranks import ModelRanks
from paged_run import make_batch
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.kernels import reference_backend
from copyhold.kernels.choices import KVDtype
from copyhold.models.convert import convert
from copyhold.models.manifest import ConvertedCheckpoint
from copyhold.models.oneshot import audit_kv

TOKENS = np.random.default_rng(3).integers(3, 300, 50).tolist()
TABLE = np.array([[3, 0, 2, 1]], dtype=np.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> ConvertedCheckpoint:
    torch.set_grad_enabled(False)
    folder = tmp_path_factory.mktemp("kv-storage")
    return convert(make_tiny_checkpoint(folder / "hf"), folder / "cache", 1)


def logits(ranks: ModelRanks) -> np.ndarray:
    """Of all rows, in chunks of 20."""
    parts = []
    for start in range(0, len(TOKENS), 20):
        rows = TOKENS[start : start + 20]
        batch = make_batch([rows], [start], TABLE)
        batch.logit_rows = np.arange(len(rows), dtype=np.int64)
        parts.append(ranks.shards[0].forward(batch).numpy())
    return np.concatenate(parts)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("float16", 0.004), ("bfloat16", 0.03)])
def test_rows_of_sixteen_bits_move_logits_a_little(
    checkpoint: ConvertedCheckpoint, kv_dtype: KVDtype, bound: float
) -> None:
    exact = logits(ModelRanks(checkpoint, 4))
    ranks = ModelRanks(checkpoint, 4, kv_dtype=kv_dtype)
    found = logits(ranks)
    assert 0 < np.sqrt(((found - exact) ** 2).mean()) / exact.std() < bound
    half = ModelRanks(checkpoint, 4).shards[0].pool.total_bytes
    assert ranks.shards[0].pool.total_bytes * 2 == half
    # A row computed in another chunk may round to the neighbouring 16-bit number, and no further.
    ids, sample = np.array(TOKENS, dtype=np.int32), np.arange(len(TOKENS))
    largest = max(
        np.abs(part).max()
        for layer in range(checkpoint.config.num_layers)
        for part in ranks.shards[0].pool.read_rows(layer, TABLE[0][sample // 16], sample % 16)
    )
    report = audit_kv(ranks.shards[0], ids, TABLE[0], sample)
    spacing = 2.0 ** (-10 if kv_dtype == "float16" else -7)
    assert report.max_abs_difference <= 2 * largest * spacing


def test_the_float64_kernels_give_the_same_logits(checkpoint: ConvertedCheckpoint) -> None:
    fast = logits(ModelRanks(checkpoint, 4))
    plain = logits(ModelRanks(checkpoint, 4, kernels=reference_backend))
    np.testing.assert_allclose(fast, plain, atol=1e-4)
