"""Owns the one description of a Llama-family model that every rank, the converter and the tokenizer share.

Torch-free. Invariant: a `ModelConfig` that exists is one the forward pass computes; what it cannot compute
was refused while reading (`UnsupportedModel`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from .errors import ModelFileInvalid, UnsupportedModel


class RopeScaling(msgspec.Struct, frozen=True):
    """Stretching of the rotary frequencies; the last three fields are read for `llama3` only."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


class ModelConfig(msgspec.Struct, frozen=True):
    """Geometry and constants of a decoder-only Llama."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


def checked(config: ModelConfig, path: Path) -> ModelConfig:
    """The config itself, if the forward pass can compute it.

    Raises: `ModelFileInvalid` for numbers that fit no model, `UnsupportedModel` for a geometry we do not
    compute.
    """
    for field in config.__struct_fields__[:8]:
        if getattr(config, field) <= 0:
            raise ModelFileInvalid(path, f"{field} must be positive, is {getattr(config, field)}")
    if config.num_heads % config.num_kv_heads:
        raise ModelFileInvalid(
            path, f"{config.num_heads} query heads do not divide into {config.num_kv_heads} KV heads"
        )
    if config.head_dim % 8:
        raise UnsupportedModel(path, f"head dim {config.head_dim} is not a multiple of 8")
    if not all(0 <= token < config.vocab_size for token in config.eos_token_ids):
        raise ModelFileInvalid(path, f"an end token of {config.eos_token_ids} is outside the vocabulary")
    return config


def config_from_hf(raw: dict[str, Any], path: Path) -> ModelConfig:
    """Read the fields of a Hugging Face `config.json`.

    Raises: `ModelFileInvalid`, `UnsupportedModel`.
    """
    if raw.get("model_type") != "llama":
        raise UnsupportedModel(path, f"architecture {raw.get('model_type')!r}, only 'llama' is computed")
    for field, allowed in _ONLY.items():
        if raw.get(field, allowed) not in (allowed, None):
            raise UnsupportedModel(path, f"{field} = {raw[field]!r}")
    try:
        heads = _integer(raw, "num_attention_heads")
        hidden = _integer(raw, "hidden_size")
        if heads <= 0:
            raise ValueError(f"num_attention_heads must be positive, is {heads}")
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        config = ModelConfig(
            num_layers=_integer(raw, "num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=_integer(raw, "num_key_value_heads", heads),
            head_dim=_integer(raw, "head_dim", hidden // heads),
            vocab_size=_integer(raw, "vocab_size"),
            max_positions=_integer(raw, "max_position_embeddings", 2048),
            rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope_scaling=_scaling(rope, path),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=token_ids(raw.get("eos_token_id")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFileInvalid(path, f"{type(error).__name__}: {error}") from error
    return checked(config, path)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, a list of ids or nothing, as a sorted tuple."""
    if value is None:
        return ()
    return tuple(sorted(set(value))) if isinstance(value, list) else (value,)


_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "sliding_window": None,
}
"""Fields whose other values change the computation: anything else is refused by name."""


def _integer(raw: dict[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if type(value) is not int:
        raise ValueError(f"{field} must be an integer, is {value!r}")
    return value


def _scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(path, f"rotary scaling {kind!r}")
