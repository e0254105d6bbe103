"""A rank's pool is compared with the declared layout as its memory lies, and refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.actors.rank_layout import attach, declared_layout, mapped_layout
from copyhold.actors.world import grouped_world, world_manifest, world_of
from copyhold.kernels.cache_pools import CachePools
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.contract_errors import LengthMismatch
from copyhold.kvcore.identity import world_digest
from copyhold.kvcore.manifest_errors import (
    CacheAbiMismatch,
    ManifestMismatch,
    StridesDoNotFollowAxes,
)
from copyhold.kvcore.manifests import rank_layout_digest
from copyhold.models.convert import convert
from copyhold.models.layer_groups import divided
from copyhold.models.manifest import ConvertedCheckpoint

BLOCKS = 6


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> ConvertedCheckpoint:
    """Three KV heads over two ranks: 2 + 1."""
    folder = tmp_path_factory.mktemp("uneven")
    model = make_tiny_checkpoint(folder / "model", num_heads=6, num_kv_heads=3, head_dim=16, hidden_size=96)
    return convert(model, folder / "cache", 2)


def _pool(checkpoint: ConvertedCheckpoint, rank: int, block_size: int = 32, blocks: int = BLOCKS) -> KVPool:
    heads = len(checkpoint.partitions[rank].kv_heads)
    return KVPool(checkpoint.config.num_layers, blocks, heads, checkpoint.config.head_dim, block_size)


def test_each_rank_attaches_with_a_layout_of_its_own(uneven: ConvertedCheckpoint) -> None:
    world, served = world_manifest(uneven, 32), world_of(uneven, 32)
    digests = [attach(world, served, rank, BLOCKS, _pool(uneven, rank)) for rank in (0, 1)]
    assert digests == [rank_layout_digest(declared_layout(world, rank, BLOCKS)).hex() for rank in (0, 1)]
    assert digests[0] != digests[1], "2 + 1 KV heads"


def test_a_pool_of_another_rank_is_refused_by_name(uneven: ConvertedCheckpoint) -> None:
    world, served = world_manifest(uneven, 32), world_of(uneven, 32)
    with pytest.raises(ManifestMismatch) as heads:
        attach(world, served, 1, BLOCKS, _pool(uneven, 0))
    assert heads.value.reason == "tp_rank_mismatch"
    with pytest.raises(ManifestMismatch) as slots:
        attach(world, served, 0, BLOCKS, _pool(uneven, 0, blocks=BLOCKS + 1))
    assert slots.value.reason == "stride_layout_mismatch" and "num_slots" in str(slots.value)


def test_a_rank_of_another_world_is_refused_by_name(uneven: ConvertedCheckpoint) -> None:
    with pytest.raises(CacheAbiMismatch) as other:
        attach(world_manifest(uneven, 32), world_of(uneven, 64), 0, BLOCKS, _pool(uneven, 0))
    assert other.value.faults[0].field == "world"


def _two_pools(checkpoint: ConvertedCheckpoint, rank: int, blocks: tuple[int, int]) -> CachePools:
    heads, dim = len(checkpoint.partitions[rank].kv_heads), checkpoint.config.head_dim
    sizes = zip(blocks, (16, 32), strict=True)
    return CachePools([KVPool(1, count, heads, dim, size) for count, size in sizes], [(0,), (1,)])


def test_two_cache_groups_attach_with_a_pool_each(uneven: ConvertedCheckpoint) -> None:
    world = grouped_world(uneven, divided(2, (16, 32)))
    served = world_digest(world)
    assert served != world_of(uneven, 16), "another division of the layers is another world"
    digests = [attach(world, served, rank, (9, 7), _two_pools(uneven, rank, (9, 7))) for rank in (0, 1)]
    assert digests[1] == rank_layout_digest(declared_layout(world, 1, (9, 7))).hex()
    layout = mapped_layout(world, served, 0, _two_pools(uneven, 0, (9, 7)))
    assert (layout.scheduler_block_size, layout.hash_block_size) == (16, 32)
    with pytest.raises(ManifestMismatch) as slots:
        attach(world, served, 0, (9, 7), _two_pools(uneven, 0, (9, 8)))
    assert "num_slots" in str(slots.value)
    with pytest.raises(ManifestMismatch) as other:
        attach(world, served, 0, (9, 7), CachePools(_two_pools(uneven, 0, (9, 7)).pools, [(1,), (0,)]))
    assert other.value.reason == "cache_group_mismatch" and "layers" in str(other.value)
    with pytest.raises(LengthMismatch):
        attach(world, served, 0, (9, 7), _pool(uneven, 0))


def test_memory_that_lies_otherwise_is_refused(uneven: ConvertedCheckpoint) -> None:
    world, served = world_manifest(uneven, 32), world_of(uneven, 32)
    pool = _pool(uneven, 0)
    pool.k = np.asfortranarray(pool.k)
    with pytest.raises(StridesDoNotFollowAxes):
        attach(world, served, 0, BLOCKS, pool)
    pool = _pool(uneven, 0)
    pool.v = pool.v.astype(np.float16)
    with pytest.raises(ManifestMismatch) as stored:
        attach(world, served, 0, BLOCKS, pool)
    assert stored.value.reason == "storage_representation_mismatch"
