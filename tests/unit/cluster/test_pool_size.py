"""Pools sized from memory: exact, the same each time, the least of the ranks, or refused with what is missing (B34 a)."""

from __future__ import annotations

import pytest
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.cluster.config import Config
from copyhold.cluster.errors import ConfigError, PoolRefused
from copyhold.cluster.pool_size import (
    MB,
    pool_figures,
    rank_demands,
    require_free,
    size_from_memory,
    sized_config,
)
from copyhold.kernels.pool import KVPool
from copyhold.models.convert import convert
from copyhold.models.manifest import ConvertedCheckpoint


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> ConvertedCheckpoint:
    """Three KV heads over two ranks, 2 + 1, as the bundled model has them."""
    folder = tmp_path_factory.mktemp("uneven")
    model = make_tiny_checkpoint(folder / "model", num_heads=6, num_kv_heads=3, head_dim=16, hidden_size=96)
    return convert(model, folder / "cache", 2)


def test_a_block_costs_what_the_pool_maps_for_it(uneven: ConvertedCheckpoint) -> None:
    config = uneven.config
    for rank, (demand,) in enumerate(rank_demands(uneven, 16)):
        pool = KVPool(config.num_layers, 3, len(uneven.partitions[rank].kv_heads), config.head_dim, 16)
        assert demand.block_size * demand.row_bytes == pool.block_bytes


def test_a_share_worth_64_blocks_gives_64_blocks_every_time(uneven: ConvertedCheckpoint) -> None:
    demands = rank_demands(uneven, 16)
    dear = 16 * demands[0][0].row_bytes
    for spare in (0, 1, dear - 1):
        figures = size_from_memory([64 * dear + spare] * 2, demands, 512)
        assert figures.num_blocks == 64
        assert figures.affordable_blocks[0] == 64 and figures.affordable_blocks[1] >= 128
        assert figures.used_bytes == (64 * dear, 32 * dear)
        budgets = zip(figures.used_bytes, figures.unused_bytes, strict=True)
        assert tuple(used + unused for used, unused in budgets) == figures.budget_bytes
    assert size_from_memory([64 * dear - 1] * 2, demands, 512).num_blocks == 63


def test_what_does_not_hold_the_longest_request_is_refused_with_the_missing_bytes(
    uneven: ConvertedCheckpoint,
) -> None:
    demands = rank_demands(uneven, 16)
    dear = 16 * demands[0][0].row_bytes
    with pytest.raises(PoolRefused, match=f"rank 0 31 blocks.*needs 32: {dear} bytes are missing"):
        size_from_memory([31 * dear] * 2, demands, 512)


def test_settings_become_those_of_the_pool_as_it_is(uneven: ConvertedCheckpoint) -> None:
    config = Config(pool_mb=2, tp=2, max_model_len=1024, pool_tokens=256)
    figures = pool_figures(config, uneven)
    assert figures.source == "pool_mb" and figures.num_blocks == 2 * MB // figures.block_bytes[0]
    sized = sized_config(config, figures)
    assert (sized.num_blocks, sized.pool_mb) == (figures.num_blocks, 0)
    shares = Config(pool_mb=2, tp=2, max_model_len=1024, tenant_blocks="acme=100000-200000")
    with pytest.raises(ConfigError, match="tenant_blocks"):
        sized_config(shares, pool_figures(shares, uneven))


def test_pool_tokens_hold_where_no_memory_is_given(uneven: ConvertedCheckpoint) -> None:
    config = Config(tp=2)
    figures = pool_figures(config, uneven)
    assert (figures.source, figures.num_blocks, figures.unused_bytes) == ("pool_tokens", 512, (0, 0))
    assert sized_config(config, figures) is config


def test_memory_that_is_not_free_refuses_and_never_shrinks(uneven: ConvertedCheckpoint) -> None:
    figures = pool_figures(Config(pool_mb=2, tp=2, max_model_len=1024), uneven)
    needed = 3 * sum(figures.used_bytes)
    require_free(figures, 3, needed)
    with pytest.raises(PoolRefused, match="1000 bytes are missing"):
        require_free(figures, 3, needed - 1000)
    require_free(figures, 1)
