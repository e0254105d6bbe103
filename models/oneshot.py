"""Owns the cold recompute that audits cached K/V: same tokens, empty memory, one pass, compared row by row.

The scratch pools and buffers are made for the call and dropped with it, so the real ones are only read. Ranks
call it in lock step, because the forward pass inside makes collective calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from copyhold.kernels.batch import GroupRows, StepBatch
from copyhold.kernels.cache_pools import CachePools
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
    other_blocks: Sequence[npt.NDArray[np.integer]] = (),
) -> KVAudit:
    """Compare the pools' rows of `tokens`, which lie in `block_ids`, with a cold one-shot recompute.

    `block_ids` are those of cache group 0, `other_blocks` those of the groups after it; a layer's rows are looked for in
    the blocks of its own group. `layers` None compares all of them. Only `max(sample_positions) + 1` tokens are
    recomputed; later ones cannot change earlier rows.

    Raises: what `LlamaShard.forward` raises; `ValueError` for a position outside the tokens or the blocks.
    """
    chosen = tuple(range(shard.config.num_layers)) if layers is None else layers
    positions = np.asarray(sample_positions, dtype=np.int64)
    if positions.size == 0:
        return KVAudit(0, 0.0, chosen)
    pools = shard.pools
    blocks = [np.asarray(part, dtype=np.int64) for part in (block_ids, *other_blocks)]
    sizes = [pool.block_size for pool in pools.pools]
    held = min(len(part) * size for part, size in zip(blocks, sizes, strict=True))
    if positions.min() < 0 or positions.max() >= min(len(tokens), held):
        raise ValueError(
            f"sampled positions must lie in the {len(tokens)} tokens and the blocks of {held} rows given"
        )
    needed = int(positions.max()) + 1
    cold = _recompute(shard, np.asarray(tokens[:needed], dtype=np.int64))
    largest = 0.0
    for layer in chosen:
        group, at = pools.places[layer]
        size = sizes[group]
        stored = pools.pools[group].read_rows(at, blocks[group][positions // size], positions % size)
        fresh = cold.pools[group].read_rows(at, positions // size, positions % size)
        for mine, other in zip(stored, fresh, strict=True):
            difference = np.abs(mine - other).max()
            largest = max(largest, float("inf") if np.isnan(difference) else float(difference))
    return KVAudit(len(positions) * len(chosen), largest, chosen)


def _recompute(shard: LlamaShard, tokens: npt.NDArray[np.int64]) -> CachePools:
    count = len(tokens)
    pools = [_empty_like(pool, count) for pool in shard.pools.pools]
    cold = CachePools(pools, shard.pools.layers)
    rows = np.arange(count, dtype=np.int64)
    tables = [np.arange(pool.num_blocks, dtype=np.int32)[None] for pool in pools]
    batch = StepBatch(
        tokens=tokens,
        positions=rows,
        slots=rows,
        seq_starts=np.array([0, count], dtype=np.int32),
        context_lens=np.array([count], dtype=np.int32),
        block_tables=tables[0],
        logit_rows=np.empty(0, dtype=np.int64),
        others=tuple(GroupRows(rows, table) for table in tables[1:]),
    )
    shard.hidden_states(batch, cold, shard.new_scratch(count))
    return cold


def _empty_like(real: KVPool, rows: int) -> KVPool:
    """A pool of the same geometry with room for `rows` rows."""
    blocks = -(-rows // real.block_size)
    return KVPool(real.num_layers, blocks, real.kv_heads, real.head_dim, real.block_size, real.kv_dtype)
