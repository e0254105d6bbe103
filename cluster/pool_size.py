"""How large each replica's pool is: from ``pool_tokens``, or from the memory that ``pool_mb`` gives to each rank.

Owns the step from settings to blocks and the figures that the status shows. Invariant: the number of blocks depends on
settings and model alone, and is the least that any rank affords; what is free at the moment can only refuse a start,
never change the number, so a neighbour that takes or returns memory changes nothing.
Source: contracts K018, K019, K220; LEDGER "Two identities" (minimum over the ranks).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec
import psutil

from copyhold.actors.pool_figures import PoolFigures
from copyhold.kernels.choices import KVDtype
from copyhold.kvcore.axes import SCALAR_BYTES
from copyhold.kvcore.byte_errors import PoolBelowMinimum
from copyhold.kvcore.sizing import GroupDemand, size_pools
from copyhold.models.manifest import ConvertedCheckpoint

from .config import Config
from .errors import PoolRefused

MB = 10**6
_GROUP = "full"


def rank_demands(
    checkpoint: ConvertedCheckpoint, block_size: int, kv_dtype: KVDtype = "float32"
) -> list[list[GroupDemand]]:
    """By rank: bytes of one K and V row over all layers, for the KV heads that the rank holds."""
    config = checkpoint.config
    return [
        [
            GroupDemand(
                _GROUP,
                block_size,
                2 * config.num_layers * len(part.kv_heads) * config.head_dim * SCALAR_BYTES[kv_dtype],
            )
        ]
        for part in checkpoint.partitions
    ]


def size_from_memory(
    budgets_bytes: Sequence[int], demands: Sequence[Sequence[GroupDemand]], required_rows: int
) -> PoolFigures:
    """Blocks that every rank affords, with the figures behind them. Raises: PoolRefused with the missing bytes."""
    try:
        sizing = size_pools(budgets_bytes, demands, {_GROUP: Fraction(1)}, required_rows)
    except PoolBelowMinimum as error:
        raise PoolRefused(
            f"pool_mb gives rank {error.rank} {error.affordable_blocks} blocks, the longest request "
            f"(max_model_len) needs {error.required_blocks}: {error.shortfall_bytes} bytes are missing"
        ) from error
    (group,) = sizing.groups
    return PoolFigures(
        source="pool_mb",
        num_blocks=group.num_blocks,
        block_size=group.block_size,
        block_bytes=group.block_bytes,
        affordable_blocks=group.affordable_blocks,
        budget_bytes=sizing.budget_bytes,
        used_bytes=sizing.used_bytes,
        unused_bytes=sizing.unused_bytes,
    )


def pool_figures(config: Config, checkpoint: ConvertedCheckpoint) -> PoolFigures:
    """The pool of each replica. Raises: PoolRefused with the missing bytes."""
    demands = rank_demands(checkpoint, config.block_size, config.kv_storage)
    if config.pool_mb:
        longest = min(config.max_model_len, checkpoint.config.max_positions)
        return size_from_memory([config.pool_mb * MB] * len(demands), demands, longest)
    blocks = config.pool_tokens // config.block_size
    block_bytes = tuple(config.block_size * rank[0].row_bytes for rank in demands)
    used = tuple(blocks * cost for cost in block_bytes)
    return PoolFigures(
        "pool_tokens",
        blocks,
        config.block_size,
        block_bytes,
        (blocks,) * len(demands),
        used,
        used,
        (0,) * len(demands),
    )


def sized_config(config: Config, figures: PoolFigures) -> Config:
    """The settings with the pool as it is, checked again. Raises: ConfigError for shares that exceed it."""
    if not config.pool_mb:
        return config
    return msgspec.structs.replace(config, pool_mb=0, pool_tokens=figures.num_blocks * figures.block_size)


def require_free(figures: PoolFigures, replicas: int, free_bytes: int | None = None) -> None:
    """Whether the pools of all replicas fit into what is free on this host now. Raises: PoolRefused.

    ``free_bytes``: of the host, measured where it is not given.
    """
    needed = replicas * sum(figures.used_bytes)
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    if needed > free:
        raise PoolRefused(
            f"the pools need {needed} bytes, {free} are free on this host: {needed - free} bytes are missing"
        )
