"""Owns the border between checkpoint formats and the converter: what any source must be able to tell.

Tensors are asked for by their Hugging Face names and come back as float32 `[out, in]` in half-split rotary
order, one at a time, so that nobody holds a whole model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from .config import ModelConfig
from .errors import ModelFileMissing


class TokenizerSpec(msgspec.Struct, frozen=True):
    """Everything text needs: a `tokenizer.json`, the chat template and the tokens it may name."""

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


class CheckpointSource(Protocol):
    """An opened checkpoint; opening it refused what cannot be converted."""

    config: ModelConfig

    def tokenizer(self) -> TokenizerSpec:
        """Raises: `ModelFileInvalid`, `UnsupportedModel`."""
        ...

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """Raises: `ModelFileInvalid` for a tensor that is missing or has another shape."""
        ...


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of all tensors the forward pass needs."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "self_attn.q_proj.weight"] = (q, hidden)
        shapes[at + "self_attn.k_proj.weight"] = (kv, hidden)
        shapes[at + "self_attn.v_proj.weight"] = (kv, hidden)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "mlp.gate_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.up_proj.weight"] = (ffn, hidden)
        shapes[at + "mlp.down_proj.weight"] = (hidden, ffn)
    return shapes


def required(folder: Path, name: str) -> Path:
    """The path of a file that must exist.

    Raises: `ModelFileMissing`.
    """
    path = folder / name
    if not path.is_file():
        raise ModelFileMissing(path)
    return path
