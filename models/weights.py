"""Owns one rank's weights: read from its shard file, checked against the partition, packed for products.

Packing copies: the file is mapped while it is read and unmapped afterwards, except for the embedding table, of which
only the rows that are looked up become resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .deterministic import HEAD_ROWS, FixedRowsLinear, LinearMaker
from .errors import ModelFileInvalid, ModelFileMissing
from .layout import Dtype, shard_tensors
from .linear import Linear
from .partition import RankPartition


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; norms as float32 arrays, because kernels read them."""

    attn_norm: npt.NDArray[np.float32]
    qkv: Linear | FixedRowsLinear
    o: Linear | FixedRowsLinear
    ffn_norm: npt.NDArray[np.float32]
    gate_up: Linear | FixedRowsLinear
    down: Linear | FixedRowsLinear


@dataclass(frozen=True, slots=True)
class ShardWeights:
    """`embedding` is `[local_vocab, hidden]`, mapped."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: npt.NDArray[np.float32]
    head: Linear | FixedRowsLinear


def load_weights(
    path: Path, config: ModelConfig, part: RankPartition, dtype: Dtype, deterministic: bool = False
) -> ShardWeights:
    """Read and pack a shard file; `deterministic` keeps every product to row counts checked on this machine.

    Raises: `ModelFileMissing`, `ModelFileInvalid` (also for a shard of another partition or dtype),
    `DeterminismUnavailable`.
    """
    expected = shard_tensors(config, part, dtype)
    linear = LinearMaker(deterministic)

    def read(file: safe_open, name: str) -> torch.Tensor:
        try:
            tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ModelFileInvalid(path, f"tensor {name}: {error}") from error
        spec = expected[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != getattr(torch, spec.dtype):
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ModelFileInvalid(path, f"tensor {name} should be {spec.shape} {spec.dtype}, is {found}")
        return tensor

    def layer(file: safe_open, at: str) -> LayerWeights:
        return LayerWeights(
            attn_norm=read(file, at + "attn_norm").numpy().copy(),
            qkv=linear(read(file, at + "qkv")),
            o=linear(read(file, at + "o")),
            ffn_norm=read(file, at + "ffn_norm").numpy().copy(),
            gate_up=linear(read(file, at + "gate_up")),
            down=linear(read(file, at + "down")),
        )

    try:
        with safe_open(path, framework="pt") as file:
            layers = tuple(layer(file, f"layers.{i}.") for i in range(config.num_layers))
            norm, head = read(file, "norm").numpy().copy(), linear(read(file, "head"), HEAD_ROWS)
        with safe_open(path, framework="pt") as file:
            return ShardWeights(read(file, "embed" if "embed" in expected else "head"), layers, norm, head)
    except FileNotFoundError as error:
        raise ModelFileMissing(path) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileInvalid(path, str(error)) from error
