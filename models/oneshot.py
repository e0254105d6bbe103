"""Owns the cold recompute that audits cached K/V: same tokens, empty memory, one pass, compared row by row.

The scratch pool and buffers are made for the call and dropped with it, so the real pool is only read. Ranks
call it in lock step, because the forward pass inside makes collective calls.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from copyhold.kernels.batch import StepBatch
from copyhold.kernels.pool import KVPool

from .llama import LlamaShard


class KVAudit(msgspec.Struct, frozen=True):
    """What one rank measured; a row is one position of one layer, K and V of all its heads."""

    rows_compared: int
    max_abs_difference: float
    layers: tuple[int, ...]


def audit_kv(
    shard: LlamaShard,
    tokens: npt.NDArray[np.integer],
    block_ids: npt.NDArray[np.integer],
    sample_positions: npt.NDArray[np.integer],
    layers: tuple[int, ...] | None = None,
) -> KVAudit:
    """Compare the pool's rows of `tokens`, which lie in `block_ids`, with a cold one-shot recompute.

    `layers` None compares all of them. Only `max(sample_positions) + 1` tokens are recomputed; later ones
    cannot change earlier rows.

    Raises: what `LlamaShard.forward` raises; `ValueError` for a position outside the tokens or the blocks.
    """
    chosen = tuple(range(shard.config.num_layers)) if layers is None else layers
    positions = np.asarray(sample_positions, dtype=np.int64)
    if positions.size == 0:
        return KVAudit(0, 0.0, chosen)
    size = shard.pool.block_size
    blocks = np.asarray(block_ids, dtype=np.int64)
    if positions.min() < 0 or positions.max() >= min(len(tokens), len(blocks) * size):
        raise ValueError(
            f"sampled positions must lie in the {len(tokens)} tokens and {len(blocks)} blocks given"
        )
    needed = int(positions.max()) + 1
    cold = _recompute(shard, np.asarray(tokens[:needed], dtype=np.int64))
    largest = 0.0
    for layer in chosen:
        stored = shard.pool.read_rows(layer, blocks[positions // size], positions % size)
        fresh = cold.read_rows(layer, positions // size, positions % size)
        for mine, other in zip(stored, fresh, strict=True):
            difference = np.abs(mine - other).max()
            largest = max(largest, float("inf") if np.isnan(difference) else float(difference))
    return KVAudit(len(positions) * len(chosen), largest, chosen)


def _recompute(shard: LlamaShard, tokens: npt.NDArray[np.int64]) -> KVPool:
    count = len(tokens)
    real = shard.pool
    num_blocks = -(-count // real.block_size)
    cold = KVPool(real.num_layers, num_blocks, real.kv_heads, real.head_dim, real.block_size, real.kv_dtype)
    rows = np.arange(count, dtype=np.int64)
    batch = StepBatch(
        tokens=tokens,
        positions=rows,
        slots=rows,
        seq_starts=np.array([0, count], dtype=np.int32),
        context_lens=np.array([count], dtype=np.int32),
        block_tables=np.arange(num_blocks, dtype=np.int32)[None],
        logit_rows=np.empty(0, dtype=np.int64),
    )
    shard.hidden_states(batch, cold, shard.new_scratch(count))
    return cold
