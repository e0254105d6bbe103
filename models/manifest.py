"""Owns the record of a converted checkpoint: what it was made from, how it is cut, and where its parts lie.

Torch-free. Invariant: a folder with a manifest is complete, because the manifest moves into place with
everything else in one rename.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .config import ModelConfig
from .errors import ModelFileInvalid, ModelFileMissing
from .layout import FORMAT_VERSION, Dtype, shard_name
from .partition import RankPartition

MANIFEST_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"


class CheckpointManifest(msgspec.Struct, frozen=True):
    """Content of a converted folder's `config.json`; `source_digest` is SHA-256 in hex."""

    format_version: int
    source_name: str
    source_digest: str
    config: ModelConfig
    partitions: tuple[RankPartition, ...]
    dtype: Dtype = "float32"
    bos_token: str | None = None
    eos_token: str | None = None


class ConvertedCheckpoint(msgspec.Struct, frozen=True):
    """A complete converted folder; `digest` identifies weights, tokenizer and template."""

    path: Path
    config: ModelConfig
    digest: str
    partitions: tuple[RankPartition, ...]
    dtype: Dtype = "float32"

    @property
    def tp_size(self) -> int:
        return len(self.partitions)

    def shard_path(self, rank: int) -> Path:
        return self.path / shard_name(rank, self.tp_size)


def read_manifest(folder: Path) -> CheckpointManifest:
    """Read a converted folder's manifest.

    Raises: `ModelFileMissing`, `ModelFileInvalid`.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=CheckpointManifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelFileMissing(path) from error
    except (msgspec.DecodeError, OSError) as error:
        raise ModelFileInvalid(path, str(error)) from error
    if manifest.format_version != FORMAT_VERSION:
        raise ModelFileInvalid(
            path, f"format version {manifest.format_version}, this build reads {FORMAT_VERSION}"
        )
    return manifest


def load_checkpoint(folder: Path) -> ConvertedCheckpoint:
    """Open a folder that `convert` made.

    Raises: `ModelFileMissing`, `ModelFileInvalid`.
    """
    manifest = read_manifest(folder)
    ranks = len(manifest.partitions)
    for name in (TOKENIZER_NAME, *(shard_name(rank, ranks) for rank in range(ranks))):
        if not (folder / name).is_file():
            raise ModelFileMissing(folder / name)
    return ConvertedCheckpoint(
        folder, manifest.config, manifest.source_digest, manifest.partitions, manifest.dtype
    )
