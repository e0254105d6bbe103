"""Owns the names, shapes and order of the tensors in one rank's shard file.

Torch-free. Linears are stored as `[out, in]`, contiguous, query/key/value and gate/up fused: the order in which matrix
libraries pack them and in which bfloat16 is fastest unpacked. A tied model keeps one `[vocab, hidden]` matrix for both
ends. Norms are float32 whatever the dtype of the rest.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .config import ModelConfig
from .partition import RankPartition

FORMAT_VERSION = 2
"""Raised whenever names, shapes or meaning of shard tensors change; part of the cache key."""


Dtype = Literal["float32", "bfloat16"]
"""Of weights and of the activations that meet them; residual stream, norms and K/V are float32 in either."""

CollectiveChoice = Literal["auto", "shm", "gloo"]
"""How ranks of a replica add: by shared memory where all of them can map it, by that alone, or by sockets."""


class ShardTensor(msgspec.Struct, frozen=True):
    """Shape and dtype of one tensor of a shard file."""

    shape: tuple[int, ...]
    dtype: Dtype


def shard_name(rank: int, tp_size: int) -> str:
    """File name of one rank's shard."""
    return f"rank-{rank}-of-{tp_size}.safetensors"


def shard_tensors(config: ModelConfig, part: RankPartition, dtype: Dtype) -> dict[str, ShardTensor]:
    """Tensors of one rank's shard, in file order."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q = len(part.q_heads) * head_dim
    kv = len(part.kv_heads) * head_dim
    ffn, vocab = len(part.ffn), len(part.vocab)
    tensors: dict[str, ShardTensor] = {}
    if not config.tied_embeddings:
        tensors["embed"] = ShardTensor((vocab, hidden), dtype)
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        tensors[at + "attn_norm"] = ShardTensor((hidden,), "float32")
        tensors[at + "qkv"] = ShardTensor((q + 2 * kv, hidden), dtype)
        tensors[at + "o"] = ShardTensor((hidden, q), dtype)
        tensors[at + "ffn_norm"] = ShardTensor((hidden,), "float32")
        tensors[at + "gate_up"] = ShardTensor((2 * ffn, hidden), dtype)
        tensors[at + "down"] = ShardTensor((hidden, ffn), dtype)
    tensors["norm"] = ShardTensor((hidden,), "float32")
    tensors["head"] = ShardTensor((vocab, hidden), dtype)
    return tensors
