"""bfloat16 weights: rounded once and to even, logits within stated bounds of float32, as near as transformers comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_ranks import ModelRanks
from paged_run import make_batch
from safetensors.torch import load_file
from tiny_checkpoint import make_tiny_checkpoint
from transformers import AutoModelForCausalLM

from copyhold.actors.world import world_of
from copyhold.models.convert import convert
from copyhold.models.errors import ModelFileInvalid
from copyhold.models.linear import Linear
from copyhold.models.llama import LlamaShard
from copyhold.models.oneshot import audit_kv
from copyhold.models.shard_writer import bfloat16_bits
from copyhold.models.tokenizer import ChatTokenizer

LOGITS_RMS_BOUND = 0.02
"""Root mean square of the logits' error, in units of the logits' standard deviation."""

TEXT = "A copyholder held land by the custom of the manor; his only proof was a copy of the court roll."


@pytest.fixture(autouse=True)
def _no_gradients() -> None:
    torch.set_grad_enabled(False)


def all_logits(ranks: ModelRanks, tokens: list[int], chunk: int = 1 << 20) -> np.ndarray:
    blocks = -(-len(tokens) // 16)
    tables = np.random.default_rng(1).permutation(blocks).astype(np.int32)[None]
    parts = []
    for start in range(0, len(tokens), chunk):
        batch = make_batch([tokens[start : start + chunk]], [start], tables)
        batch.logit_rows = np.arange(batch.num_tokens, dtype=np.int64)
        shards = ranks.each(lambda shard, batch=batch: shard.forward(batch).numpy())
        parts.append(np.concatenate(shards, axis=1))
    return np.concatenate(parts)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean()) / expected.std())


def test_rounding_is_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([bits, (np.arange(4096, dtype=np.uint32) << 20) + 0x8000]).view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16().float().numpy()
    found = torch.from_numpy(bfloat16_bits(values)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found, expected)


def test_shards_and_worlds_are_keyed_by_dtype_and_norms_stay_float32(tmp_path: Path) -> None:
    source = make_tiny_checkpoint(tmp_path / "hf", tied=False)
    wide = convert(source, tmp_path / "cache", 1)
    narrow = convert(source, tmp_path / "cache", 1, dtype="bfloat16")
    assert narrow.path != wide.path and narrow.digest == wide.digest and narrow.dtype == "bfloat16"
    assert world_of(narrow, 16) != world_of(wide, 16)
    exact, rounded = load_file(wide.shard_path(0)), load_file(narrow.shard_path(0))
    for name, tensor in exact.items():
        kind = torch.float32 if "norm" in name else torch.bfloat16
        assert torch.equal(rounded[name], tensor.to(kind)), name


@pytest.mark.parametrize("tp_size", [1, 2])
def test_logits_are_as_near_to_float32_as_transformers_in_bfloat16(tmp_path: Path, tp_size: int) -> None:
    source = make_tiny_checkpoint(tmp_path / "hf")
    tokens = np.random.default_rng(3).integers(3, 300, 100).tolist()

    def theirs(dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        return model(torch.tensor([tokens])).logits[0].float().numpy()

    exact = theirs(torch.float32)
    narrow = convert(source, tmp_path / "cache", tp_size, dtype="bfloat16")
    ours = error(all_logits(ModelRanks(narrow, 16), tokens), exact)
    print(f"rms error {ours:.4f}, transformers {error(theirs(torch.bfloat16), exact):.4f}")
    assert ours < LOGITS_RMS_BOUND
    assert ours < error(theirs(torch.bfloat16), exact)


def test_chunks_equal_one_shot_and_an_audit_finds_no_difference_beyond_rounding(tmp_path: Path) -> None:
    narrow = convert(make_tiny_checkpoint(tmp_path / "hf"), tmp_path / "cache", 1, dtype="bfloat16")
    tokens = np.random.default_rng(5).integers(3, 300, 90).tolist()
    ranks = ModelRanks(narrow, 16)
    whole = all_logits(ranks, tokens)
    for chunk in (1, 7, 24):
        assert error(all_logits(ranks, tokens, chunk), whole) < LOGITS_RMS_BOUND
    table = np.random.default_rng(1).permutation(6)
    audit = audit_kv(ranks.shards[0], np.array(tokens, dtype=np.int32), table, np.arange(90))
    assert audit.max_abs_difference < 0.05 and audit.rows_compared == 180


def test_smollm2_stays_near_its_float32_logits(tmp_path: Path) -> None:
    wide, narrow = (convert(None, tmp_path, 1, dtype=dtype) for dtype in ("float32", "bfloat16"))
    tokens = ChatTokenizer.load(wide.path).encode(TEXT)
    exact, found = (all_logits(ModelRanks(made, 8), tokens) for made in (wide, narrow))
    agreeing = float((exact.argmax(-1) == found.argmax(-1)).mean())
    print(
        f"rms error {error(found, exact):.4f}, largest {np.abs(found - exact).max():.2f}, top token equal {agreeing:.2f}"
    )
    assert error(found, exact) < LOGITS_RMS_BOUND and agreeing > 0.9


def test_a_shard_of_another_dtype_is_refused(tmp_path: Path) -> None:
    narrow = convert(make_tiny_checkpoint(tmp_path / "hf"), tmp_path / "cache", 1, dtype="bfloat16")
    shard = ModelRanks(narrow, 4).shards[0]
    with pytest.raises(ModelFileInvalid, match=r"should be .* float32, is .* torch\.bfloat16"):
        LlamaShard(narrow.config, narrow.partitions[0], narrow.shard_path(0), shard.pool, shard.collective)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [True, False])
def test_a_product_is_right_packed_or_not(
    dtype: torch.dtype, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(48, 72, generator=generator) * 72**-0.5).to(dtype)
    linear = Linear(weight)
    for rows in (0, 1, 3, 33):
        x = torch.randn(rows, 72, generator=generator).to(dtype)
        expected = (x.double() @ weight.double().T).to(dtype)
        assert linear(x).dtype == dtype and linear(x).shape == (rows, 48)
        torch.testing.assert_close(
            linear(x), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
        )
