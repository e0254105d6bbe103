"""Checkpoints in, shards out: whole or not at all, once per content, and every refusal names its file."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.models import convert as convert_module
from copyhold.models.convert import convert
from copyhold.models.errors import (
    ModelError,
    ModelFileInvalid,
    ModelFileMissing,
    TooManyRanks,
    UnsupportedModel,
)
from copyhold.models.gguf_source import half_split
from copyhold.models.manifest import load_checkpoint


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "hf")


@pytest.mark.parametrize("tied", [True, False])
def test_shards_put_together_are_the_source(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_checkpoint(tmp_path / "hf", tied=tied)
    source = load_file(folder / "model.safetensors")
    made = convert(folder, tmp_path / "cache", 2)
    shards = [load_file(made.shard_path(rank)) for rank in range(2)]
    at = "model.layers.1."
    down = torch.cat([shard["layers.1.down"] for shard in shards], dim=1)
    assert torch.equal(down, source[at + "mlp.down_proj.weight"])
    gate = torch.cat([shard["layers.1.gate_up"].chunk(2)[0] for shard in shards])
    assert torch.equal(gate, source[at + "mlp.gate_proj.weight"])
    queries = torch.cat([shard["layers.1.qkv"][:32] for shard in shards])
    assert torch.equal(queries, source[at + "self_attn.q_proj.weight"])
    values = torch.cat([shard["layers.1.qkv"][48:] for shard in shards])
    assert torch.equal(values, source[at + "self_attn.v_proj.weight"])
    head = torch.cat([shard["head"] for shard in shards])
    assert torch.equal(head, source["model.embed_tokens.weight" if tied else "lm_head.weight"])
    assert ("embed" in shards[0]) != tied
    if not tied:
        assert torch.equal(torch.cat([s["embed"] for s in shards]), source["model.embed_tokens.weight"])


def test_no_rank_holds_the_whole_vocabulary(tiny: Path, tmp_path: Path) -> None:
    made = convert(tiny, tmp_path / "cache", 2)
    assert all(0 < len(part.vocab) < made.config.vocab_size for part in made.partitions)


def test_half_precision_and_indexed_shards_are_read(tiny: Path, tmp_path: Path) -> None:
    whole = convert(tiny, tmp_path / "cache", 1)
    tensors = {name: t.to(torch.bfloat16) for name, t in load_file(tiny / "model.safetensors").items()}
    (tiny / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, tiny / file)
    weight_map = {name: file for file, some in files.items() for name in some}
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    split = convert(tiny, tmp_path / "cache", 1)
    assert split.digest != whole.digest
    expected, found = load_file(whole.shard_path(0)), load_file(split.shard_path(0))
    assert all(torch.equal(expected[name].to(torch.bfloat16).float(), found[name]) for name in expected)


def test_a_second_conversion_reads_nothing_but_the_cache(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = convert(tiny, tmp_path / "cache", 1)
    monkeypatch.setattr(convert_module, "_open", lambda path: pytest.fail("converted again"))
    seen: list[tuple[str, int, int]] = []
    assert convert(tiny, tmp_path / "cache", 1, lambda *step: seen.append(step)) == first
    assert {stage for stage, _, _ in seen} == {"hash"} and seen[-1][1] == seen[-1][2]
    assert load_checkpoint(first.path) == first


def test_changed_content_is_another_checkpoint(tiny: Path, tmp_path: Path) -> None:
    first = convert(tiny, tmp_path / "cache", 1)
    make_tiny_checkpoint(tiny, seed=1)
    second = convert(tiny, tmp_path / "cache", 1)
    assert first.digest != second.digest and first.path != second.path and first.path.is_dir()


def test_progress_counts_layers(tiny: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    convert(tiny, tmp_path / "cache", 2, lambda *step: seen.append(step))
    assert [step for step in seen if step[0] == "convert"] == [
        ("convert", 1, 3),
        ("convert", 2, 3),
        ("convert", 3, 3),
    ]


def test_two_conversions_at_once_make_one_whole_result(tiny: Path, tmp_path: Path) -> None:
    gate = threading.Barrier(2)
    results: list[Any] = []

    def work() -> None:
        gate.wait()
        results.append(convert(tiny, tmp_path / "cache", 2))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and results[0] == results[1]
    visible = [p.name for p in (tmp_path / "cache").iterdir() if not p.name.endswith(".lock")]
    assert sorted(visible) == sorted([results[0].path.name, "hashes"])


def test_a_conversion_that_dies_leaves_nothing_and_the_next_one_works(tiny: Path, tmp_path: Path) -> None:
    def die(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("convert", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny, tmp_path / "cache", 1, die)
    assert {p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()} == {"hashes"}
    partial = tmp_path / "cache" / ".x.partial"
    made = convert(tiny, tmp_path / "cache", 1)
    partial = made.path.with_name(f".{made.path.name}.partial")
    shutil.copytree(made.path, partial)
    shutil.rmtree(made.path)
    (partial / "rank-0-of-1.safetensors").write_bytes(b"half")
    assert convert(tiny, tmp_path / "cache", 1) == made and not partial.exists()


def test_more_ranks_than_kv_heads_leave_the_cache_empty(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(TooManyRanks):
        convert(tiny, tmp_path / "cache", 3)
    assert {p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()} == {"hashes"}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(tiny: Path, tmp_path: Path, name: str) -> None:
    (tiny / name).unlink()
    with pytest.raises(ModelFileMissing, match=name) as refused:
        convert(tiny, tmp_path / "cache", 1)
    assert "\n" not in str(refused.value) and refused.value.path.endswith(name)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match="nowhere"):
        convert(tmp_path / "nowhere", tmp_path / "cache", 1)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "mamba"}, UnsupportedModel, "'mamba'"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act"),
        ({"attention_bias": True}, UnsupportedModel, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, UnsupportedModel, "yarn"),
        ({"head_dim": 12}, UnsupportedModel, "head dim 12"),
        ({"num_hidden_layers": 0}, ModelFileInvalid, "num_layers must be positive"),
        ({"num_attention_heads": 0}, ModelFileInvalid, "num_attention_heads"),
        ({"num_key_value_heads": 3}, ModelFileInvalid, "3 KV heads"),
        ({"vocab_size": "many"}, ModelFileInvalid, "vocab_size"),
        ({"num_hidden_layers": 3}, ModelFileInvalid, "no tensor model.layers.2."),
        ({"eos_token_id": 300}, ModelFileInvalid, "outside the vocabulary"),
        ({"tie_word_embeddings": False}, ModelFileInvalid, "lm_head.weight"),
    ],
)
def test_a_configuration_we_do_not_compute_is_refused(
    tiny: Path, tmp_path: Path, change: dict[str, Any], error: type[ModelError], message: str
) -> None:
    path = tiny / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=message) as refused:
        convert(tiny, tmp_path / "cache", 1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_file_of_rubbish_is_refused_by_its_name(tiny: Path, tmp_path: Path, name: str) -> None:
    (tiny / name).write_bytes(b"\xff\xfe rubbish")
    with pytest.raises(ModelFileInvalid, match=name):
        convert(tiny, tmp_path / "cache", 1)


def test_a_truncated_weight_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = tiny / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileInvalid, match=r"model\.safetensors"):
        convert(tiny, tmp_path / "cache", 1)


def test_an_index_cannot_name_a_file_elsewhere(tiny: Path, tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileInvalid, match="weight_map"):
        convert(tiny, tmp_path / "cache", 1)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + b"\x03\0\0\0" + b"\xff" * 40, b"PK\x03\x04" * 10]
)
def test_a_bad_gguf_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileInvalid, match=r"bad\.gguf"):
        convert(path, tmp_path / "cache", 1)


def test_a_gguf_cut_short_is_refused(tmp_path: Path) -> None:
    whole = convert_module.default_source()
    for size in (100, 5_000, 3_000_000):
        path = tmp_path / f"cut-{size}.gguf"
        with whole.open("rb") as file:
            path.write_bytes(file.read(size))
        with pytest.raises(ModelFileInvalid, match=f"cut-{size}"):
            convert(path, tmp_path / "cache", 1)


def test_rotary_rows_come_out_in_half_split_order() -> None:
    halves = np.arange(2 * 6, dtype=np.float32).reshape(12, 1)
    stored = np.concatenate([head.reshape(2, 3).T.reshape(6) for head in halves.reshape(2, 6)]).reshape(12, 1)
    assert np.array_equal(half_split(stored, 2), halves)
