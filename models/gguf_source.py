"""Owns the reading of a GGUF file of the Llama architecture: its configuration and dequantized tensors.

llama.cpp stores query and key rows in interleaved rotary order; they come out of here in half-split order. A
tensor this runtime would ignore (a bias, rotary factors) is refused by name, never dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize

from .config import ModelConfig, RopeScaling, checked, token_ids
from .errors import ModelFileInvalid, ModelFileMissing, UnsupportedModel
from .gguf_tokenizer import GgufFields, build_tokenizer
from .source import TokenizerSpec, tensor_shapes

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARSE_ERRORS = (ValueError, KeyError, IndexError, TypeError, OverflowError, AttributeError, OSError)
"""What the reader raises on bytes that are not what their header says."""


class GgufSource:
    """An opened file; tensors are read through a memory map.

    Raises: `ModelFileMissing`, `ModelFileInvalid`, `UnsupportedModel`.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelFileMissing(path)
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFileInvalid(path, "does not start with GGUF")
        try:
            reader = GGUFReader(path)
        except _PARSE_ERRORS as error:
            raise ModelFileInvalid(path, f"{type(error).__name__}: {error}") from error
        self._path = path
        self._fields = GgufFields(path, reader.fields)
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config()
        self._shapes = tensor_shapes(self.config)
        expected = {gguf_name(name) for name in self._shapes}
        for name in sorted(expected - self._tensors.keys()):
            raise ModelFileInvalid(path, f"no tensor {name}")
        for name in sorted(self._tensors.keys() - expected):
            raise UnsupportedModel(path, f"tensor {name} has no place in this model")

    def tokenizer(self) -> TokenizerSpec:
        """The byte-level BPE inside the file, as a `tokenizer.json`."""
        try:
            return build_tokenizer(self._fields)
        except _PARSE_ERRORS as error:
            raise ModelFileInvalid(self._path, f"tokenizer: {type(error).__name__}: {error}") from error

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor, dequantized."""
        stored = self._tensors[gguf_name(name)]
        kind = stored.tensor_type
        try:
            values = dequantize(stored.data, kind)
        except NotImplementedError as error:
            raise UnsupportedModel(self._path, f"tensor {stored.name} is {kind.name}") from error
        except _PARSE_ERRORS as error:
            raise ModelFileInvalid(self._path, f"tensor {stored.name}: {error}") from error
        if values.shape != self._shapes[name]:
            raise ModelFileInvalid(self._path, f"tensor {stored.name} is {values.shape}")
        if name.endswith("q_proj.weight"):
            values = half_split(values, self.config.num_heads)
        elif name.endswith("k_proj.weight"):
            values = half_split(values, self.config.num_kv_heads)
        return np.asarray(values, dtype=np.float32)

    def _read_config(self) -> ModelConfig:
        field = self._fields
        architecture = field("general.architecture")
        if architecture != "llama":
            raise UnsupportedModel(self._path, f"architecture {architecture!r}, only 'llama' is computed")
        if "token_embd.weight" not in self._tensors:
            raise ModelFileInvalid(self._path, "no tensor token_embd.weight")
        try:
            heads = int(field("llama.attention.head_count"))
            hidden = int(field("llama.embedding_length"))
            head_dim = int(field("llama.attention.key_length", hidden // max(heads, 1)))
            rotary = int(field("llama.rope.dimension_count", head_dim))
            if rotary != head_dim:
                raise UnsupportedModel(self._path, f"rotary dim {rotary} of head dim {head_dim}")
            config = ModelConfig(
                num_layers=int(field("llama.block_count")),
                hidden_size=hidden,
                intermediate_size=int(field("llama.feed_forward_length")),
                num_heads=heads,
                num_kv_heads=int(field("llama.attention.head_count_kv", heads)),
                head_dim=head_dim,
                vocab_size=int(self._tensors["token_embd.weight"].shape[1]),
                max_positions=int(field("llama.context_length")),
                rms_eps=float(field("llama.attention.layer_norm_rms_epsilon")),
                rope_theta=float(field("llama.rope.freq_base", 10000.0)),
                tied_embeddings="output.weight" not in self._tensors,
                rope_scaling=self._scaling(),
                bos_token_id=field("tokenizer.ggml.bos_token_id", None),
                eos_token_ids=token_ids(field("tokenizer.ggml.eos_token_id", None)),
            )
        except _PARSE_ERRORS as error:
            raise ModelFileInvalid(self._path, f"{type(error).__name__}: {error}") from error
        return checked(config, self._path)

    def _scaling(self) -> RopeScaling | None:
        kind = self._fields("llama.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling("linear", float(self._fields("llama.rope.scaling.factor")))
        raise UnsupportedModel(self._path, f"rotary scaling {kind!r}")


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor known by its Hugging Face name."""
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def half_split(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's interleaving of each head's rotary pairs; rows `[heads * head_dim, in]`."""
    paired = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows.shape))
