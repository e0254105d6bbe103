"""Owns one rank's weights: mapped from its shard file, checked against the partition, never copied."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .config import ModelConfig
from .errors import ModelFileInvalid, ModelFileMissing
from .layout import shard_shapes
from .partition import RankPartition


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Linears `[in, out]` float32; norms as arrays, because kernels read them."""

    attn_norm: npt.NDArray[np.float32]
    qkv: torch.Tensor
    o: torch.Tensor
    ffn_norm: npt.NDArray[np.float32]
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class ShardWeights:
    """`head` is `[hidden, local_vocab]`; `embed` is `[local_vocab, hidden]`, None where the two are tied."""

    embed: torch.Tensor | None
    layers: tuple[LayerWeights, ...]
    norm: npt.NDArray[np.float32]
    head: torch.Tensor

    def embedding(self, local_ids: torch.Tensor) -> torch.Tensor:
        """Rows `[T, hidden]` of ids within this rank's vocabulary range."""
        if self.embed is not None:
            return self.embed.index_select(0, local_ids)
        return self.head.index_select(1, local_ids).t()


def load_weights(path: Path, config: ModelConfig, part: RankPartition) -> ShardWeights:
    """Map a shard file.

    Raises: `ModelFileMissing`, `ModelFileInvalid` (also for a shard of another partition).
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise ModelFileMissing(path) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileInvalid(path, str(error)) from error
    expected = shard_shapes(config, part)
    for name, shape in expected.items():
        found = tensors.get(name)
        if found is None or tuple(found.shape) != shape or found.dtype != torch.float32:
            described = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise ModelFileInvalid(path, f"tensor {name} should be {shape} float32, is {described}")
    layers = tuple(
        LayerWeights(
            attn_norm=tensors[f"layers.{i}.attn_norm"].numpy(),
            qkv=tensors[f"layers.{i}.qkv"],
            o=tensors[f"layers.{i}.o"],
            ffn_norm=tensors[f"layers.{i}.ffn_norm"].numpy(),
            gate_up=tensors[f"layers.{i}.gate_up"],
            down=tensors[f"layers.{i}.down"],
        )
        for i in range(config.num_layers)
    )
    return ShardWeights(tensors.get("embed"), layers, tensors["norm"].numpy(), tensors["head"])
