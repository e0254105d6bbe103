"""Float64 reference of every kernel: plain, slow and obvious. Tests compare each backend with it.

It reads K/V through the block tables row by row, so it also pins down what a kernel may look at: nothing past
a sequence's context, no table cell past the last used one (K141, K142).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .batch import StepBatch
from .pool import KVPool

Floats = npt.NDArray[np.floating]
Float64 = npt.NDArray[np.float64]


def gather_context(
    pool: KVPool, layer: int, table: npt.NDArray[np.integer], length: int
) -> tuple[Float64, Float64]:
    """K and V rows `[length, kv_heads, head_dim]` of one sequence, in position order."""
    positions = np.arange(length)
    blocks = np.asarray(table)[positions // pool.block_size]
    k, v = pool.read_rows(layer, blocks, positions % pool.block_size)
    return k.astype(np.float64), v.astype(np.float64)


def paged_attention(
    q: npt.NDArray[np.floating], pool: KVPool, layer: int, batch: StepBatch, scale: float
) -> Float64:
    """Causal attention `[T, heads, head_dim]` of every row of the batch."""
    out = np.zeros(q.shape, dtype=np.float64)
    group = q.shape[1] // pool.kv_heads
    for seq in range(batch.num_seqs):
        first, last = int(batch.seq_starts[seq]), int(batch.seq_starts[seq + 1])
        k, v = gather_context(pool, layer, batch.block_tables[seq], int(batch.context_lens[seq]))
        for row in range(first, last):
            visible = int(batch.context_lens[seq]) - (last - row) + 1
            for head in range(q.shape[1]):
                scores = k[:visible, head // group] @ q[row, head].astype(np.float64) * scale
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[:visible, head // group] / weights.sum()
    return out


def rms_norm(x: npt.NDArray[np.floating], weight: npt.NDArray[np.floating], eps: float) -> Float64:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight


def silu_mul(gate_up: npt.NDArray[np.floating]) -> Float64:
    """`silu(gate) * up` of rows that hold gate, then up."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    return gate * np.exp(-np.logaddexp(0, -gate)) * up


def rotate(x: Floats, cos: Floats, sin: Floats) -> Float64:
    """Rotary embedding of `[T, heads, head_dim]` by per-row tables `[T, head_dim / 2]` (half-split order)."""
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    c, s = cos.astype(np.float64)[:, None], sin.astype(np.float64)[:, None]
    return np.concatenate([low * c - high * s, high * c + low * s], axis=-1)
