"""The reference backend: everything `KernelBackend` asks for, computed in float64 by `reference.py`, plain and slow.

Owns the rounding at the borders: results become what the interface says an array holds. For checks of a whole model against
another backend, never for serving: `auto` does not choose it.
"""

from __future__ import annotations

import numpy as np

from . import reference
from .choices import KVDtype
from .errors import PartitionNotWholeTiles
from .interface import (
    TILE,
    Activations,
    Floats,
    Int32s,
    Int64s,
    KernelRequest,
    KVRows,
    Refusal,
    as_stored,
    tile_refusal,
    widen_rows,
)

NAME = "reference"


def refusal(request: KernelRequest) -> Refusal | None:
    """Only what the layout refuses."""
    return tile_refusal(request)


def write_rows(k_layer: KVRows, v_layer: KVRows, k_rows: Floats, v_rows: Floats, slots: Int64s) -> None:
    """Store rows `[T, kv_heads, head_dim]` at `slots[T]`, in order."""
    for row, slot in enumerate(slots):
        tile, lane = divmod(int(slot), TILE)
        k_layer[tile, :, :, lane] = as_stored(k_rows[row], k_layer.dtype)
        v_layer[tile, :, lane] = as_stored(v_rows[row], v_layer.dtype)


def rotate_and_write(
    qkv: Activations,
    cos: Floats,
    sin: Floats,
    positions: Int64s,
    slots: Int64s,
    k_layer: KVRows,
    v_layer: KVRows,
    q_out: Floats,
) -> None:
    """Split, rotate, store; writes q_out and rows of k_layer and v_layer."""
    kv_heads, head_dim = k_layer.shape[1], k_layer.shape[2]
    heads = q_out.shape[1]
    split = widen_rows(qkv).reshape(len(qkv), heads + 2 * kv_heads, head_dim)
    turned = reference.rotate(split[:, : heads + kv_heads], cos[positions], sin[positions])
    q_out[:] = turned[:, :heads]
    write_rows(k_layer, v_layer, turned[:, heads:].astype(np.float32), split[:, heads + kv_heads :], slots)


def paged_attention(
    q: Floats,
    k_layer: KVRows,
    v_layer: KVRows,
    tile_tables: Int32s,
    seq_starts: Int32s,
    context_lens: Int32s,
    scale: np.float32,
    out: Activations,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Causal attention; writes out."""
    where = (tile_tables, seq_starts, np.zeros_like(context_lens), context_lens)
    found, _ = reference.layer_states(
        q, k_layer, v_layer, where, True, float(scale), window=window, soft_cap=soft_cap
    )
    out[:] = as_stored(found.astype(np.float32), out.dtype)


def paged_attention_split(
    q: Floats,
    k_layer: KVRows,
    v_layer: KVRows,
    tile_tables: Int32s,
    seq_starts: Int32s,
    context_lens: Int32s,
    partition: int,
    scale: np.float32,
    out: Floats,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """The same numbers as `paged_attention`: in float64 no cut is worth its rounding. Raises: `PartitionNotWholeTiles`."""
    if partition <= 0 or partition % TILE:
        raise PartitionNotWholeTiles(partition, TILE)
    where = (tile_tables, seq_starts, context_lens, scale, out)
    paged_attention(q, k_layer, v_layer, *where, window=window, soft_cap=soft_cap)


def paged_attention_states(
    q: Floats,
    k_layer: KVRows,
    v_layer: KVRows,
    tile_tables: Int32s,
    seq_starts: Int32s,
    first_rows: Int32s,
    context_lens: Int32s,
    causal: bool,
    scale: np.float32,
    out: Floats,
    lse: Floats,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Attention over a range of K/V rows; writes out and lse."""
    where = (tile_tables, seq_starts, first_rows, context_lens)
    out[:], lse[:] = reference.layer_states(
        q, k_layer, v_layer, where, causal, float(scale), window=window, soft_cap=soft_cap
    )


def merge_states(out_a: Floats, lse_a: Floats, out_b: Floats, lse_b: Floats) -> None:
    """State b into state a; writes out_a, lse_a."""
    out_a[:], lse_a[:] = reference.merge_states(out_a, lse_a, out_b, lse_b)


def merge_rows(out_a: Floats, lse_a: Floats, rows: Int64s, out_b: Floats, lse_b: Floats) -> None:
    """Row i of state b into row `rows[i]` of state a, in that order; writes out_a, lse_a."""
    for i, row in enumerate(rows):
        merge_states(out_a[row : row + 1], lse_a[row : row + 1], out_b[i : i + 1], lse_b[i : i + 1])


def narrow_rows(rows: Floats, out: Activations) -> None:
    """Rows `[T, heads, head_dim]` in the type of out; writes out."""
    out[:] = as_stored(rows, out.dtype)


def add_rms_norm(x: Floats, delta: Activations, weight: Floats, eps: np.float32, out: Activations) -> None:
    """`x += delta`, then the norm; writes x, out."""
    x += widen_rows(delta)
    out[:] = as_stored(reference.rms_norm(x, weight, float(eps)).astype(np.float32), out.dtype)


def silu_mul(gate_up: Activations, out: Activations) -> None:
    """`silu(gate) * up`; writes out."""
    out[:] = as_stored(reference.silu_mul(widen_rows(gate_up)).astype(np.float32), out.dtype)


def warm_up(kv_dtype: KVDtype = "float32") -> None:
    """Nothing is compiled."""


def compile_counts() -> dict[str, tuple[int, int]]:
    """Nothing is compiled."""
    return {}
