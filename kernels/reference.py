"""Float64 reference of every kernel: plain, slow and obvious. Tests compare each backend with it.

It reads K/V through the block tables row by row, so it also pins down what a kernel may look at: nothing past
a sequence's context, no table cell past the last used one (K141, K142).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .batch import StepBatch
from .interface import TILE, widen_rows
from .pool import KVPool

Floats = npt.NDArray[np.floating]
Float64 = npt.NDArray[np.float64]
Integers = npt.NDArray[np.integer]


def gather_layer(
    k_layer: npt.NDArray[np.generic], v_layer: npt.NDArray[np.generic], tiles: Integers, length: int
) -> tuple[Float64, Float64]:
    """K and V rows `[length, kv_heads, head_dim]` of one sequence through its tile table."""
    positions = np.arange(length)
    at, lanes = np.asarray(tiles, dtype=np.int64)[positions // TILE], positions % TILE
    k, v = k_layer[at, :, :, lanes], v_layer[at, :, lanes, :]
    return widen_rows(k).astype(np.float64), widen_rows(v).astype(np.float64)


def gather_context(
    pool: KVPool, layer: int, table: npt.NDArray[np.integer], length: int
) -> tuple[Float64, Float64]:
    """K and V rows `[length, kv_heads, head_dim]` of one sequence, in position order."""
    positions = np.arange(length)
    blocks = np.asarray(table)[positions // pool.block_size]
    k, v = pool.read_rows(layer, blocks, positions % pool.block_size)
    return k.astype(np.float64), v.astype(np.float64)


def paged_attention(
    q: Floats,
    pool: KVPool,
    layer: int,
    batch: StepBatch,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Float64:
    """Causal attention `[T, heads, head_dim]` of every row of the batch."""
    firsts = np.zeros_like(batch.context_lens)
    return paged_attention_states(
        q,
        pool,
        layer,
        batch.block_tables,
        batch.seq_starts,
        firsts,
        batch.context_lens,
        True,
        scale,
        window=window,
        soft_cap=soft_cap,
    )[0]


def paged_attention_states(
    q: Floats,
    pool: KVPool,
    layer: int,
    block_tables: Integers,
    seq_starts: Integers,
    first_rows: Integers,
    context_lens: Integers,
    causal: bool,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Float64, Float64]:
    """Attention over the K/V rows `[first_rows[s], context_lens[s])` only: out and natural log-sum-exp `[T, heads]`.

    With `causal`, the rows are the last of their context and see nothing after themselves, and no more than `window`
    tokens if it is not 0; otherwise all see the whole range. A row that sees nothing: zeros and minus infinity.
    """
    return _states(
        q,
        lambda seq, length: gather_context(pool, layer, block_tables[seq], length),
        pool.kv_heads,
        (seq_starts, first_rows, context_lens),
        (causal, window, soft_cap),
        scale,
    )


def layer_states(
    q: Floats,
    k_layer: npt.NDArray[np.generic],
    v_layer: npt.NDArray[np.generic],
    where: tuple[Integers, Integers, Integers, Integers],
    causal: bool,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> tuple[Float64, Float64]:
    """`paged_attention_states` of one layer's arrays; `where` is tile tables, seq_starts, first_rows, context_lens."""
    tile_tables, *ranges = where
    return _states(
        q,
        lambda seq, length: gather_layer(k_layer, v_layer, tile_tables[seq], length),
        k_layer.shape[1],
        (ranges[0], ranges[1], ranges[2]),
        (causal, window, soft_cap),
        scale,
    )


def _states(
    q: Floats,
    gather: Callable[[int, int], tuple[Float64, Float64]],
    kv_heads: int,
    ranges: tuple[Integers, Integers, Integers],
    rule: tuple[bool, int, float],
    scale: float,
) -> tuple[Float64, Float64]:
    """Row by row; `gather` gives a sequence's first so many K and V rows, `ranges` its seq_starts, first_rows, context_lens."""
    (seq_starts, first_rows, context_lens), (causal, window, soft_cap) = ranges, rule
    out = np.zeros(q.shape, dtype=np.float64)
    lse = np.full(q.shape[:2], -np.inf)
    group = q.shape[1] // kv_heads
    for seq in range(len(context_lens)):
        start, stop, context = int(seq_starts[seq]), int(seq_starts[seq + 1]), int(context_lens[seq])
        k, v = gather(seq, context)
        for row in range(start, stop):
            high = context - (stop - row) + 1 if causal else context
            low = max(int(first_rows[seq]), high - window if causal and window else 0)
            for head in range(q.shape[1] if low < high else 0):
                scores = k[low:high, head // group] @ q[row, head].astype(np.float64) * scale
                if soft_cap:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                out[row, head] = weights @ v[low:high, head // group] / weights.sum()
                lse[row, head] = scores.max() + np.log(weights.sum())
    return out, lse


def merge_states(out_a: Floats, lse_a: Floats, out_b: Floats, lse_b: Floats) -> tuple[Float64, Float64]:
    """The state over both sets of tokens, which must not overlap; a state without tokens is a neutral element (K150)."""
    a_empty, b_empty = np.isneginf(lse_a), np.isneginf(lse_b)
    both = ~a_empty & ~b_empty
    out = np.where(a_empty[..., None], out_b, out_a).astype(np.float64)
    lse = np.where(a_empty, lse_b, lse_a).astype(np.float64)
    lse[both] = np.logaddexp(lse_a[both], lse_b[both])
    for part, (rows, mass) in enumerate(((out_a, lse_a), (out_b, lse_b))):
        share = np.exp(mass[both] - lse[both])[:, None] * rows[both]
        out[both] = share if part == 0 else out[both] + share
    return out, lse


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
