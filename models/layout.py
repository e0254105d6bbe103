"""Owns the names, shapes and order of the tensors in one rank's shard file.

Torch-free. Linears are stored as `[in, out]`, contiguous, query/key/value and gate/up fused, so that a rank
maps the file and multiplies without copying. A tied model keeps one `[hidden, vocab]` matrix for both ends.
"""

from __future__ import annotations

from .config import ModelConfig
from .partition import RankPartition

FORMAT_VERSION = 1
"""Raised whenever names, shapes or meaning of shard tensors change; part of the cache key."""


def shard_name(rank: int, tp_size: int) -> str:
    """File name of one rank's shard."""
    return f"rank-{rank}-of-{tp_size}.safetensors"


def shard_shapes(config: ModelConfig, part: RankPartition) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of one rank's shard, in file order; all are float32."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q = len(part.q_heads) * head_dim
    kv = len(part.kv_heads) * head_dim
    ffn, vocab = len(part.ffn), len(part.vocab)
    shapes: dict[str, tuple[int, ...]] = {} if config.tied_embeddings else {"embed": (vocab, hidden)}
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        shapes[at + "attn_norm"] = (hidden,)
        shapes[at + "qkv"] = (hidden, q + 2 * kv)
        shapes[at + "o"] = (q, hidden)
        shapes[at + "ffn_norm"] = (hidden,)
        shapes[at + "gate_up"] = (hidden, 2 * ffn)
        shapes[at + "down"] = (ffn, hidden)
    shapes["norm"] = (hidden,)
    shapes["head"] = (hidden, vocab)
    return shapes
