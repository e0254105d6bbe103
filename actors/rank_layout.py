"""The layout of a rank's pool: what it is to be, and what the memory that was mapped really is.

Owns the check made once when a rank attaches. Invariant: what is compared with the declared layout is read from the
arrays that kernels use (shapes, strides, dtype), never from the arguments the pool was made with.
A rank has one pool a cache group, in the order of its world.
Source: LEDGER "Two identities" (RankLayoutDigest); contracts K003, K006, K036, K143.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING

from copyhold.kernels.cache_pools import CachePools, as_pools
from copyhold.kernels.choices import KVDtype
from copyhold.kvcore.axes import TensorLayout, tensor_layout
from copyhold.kvcore.contract_errors import LengthMismatch
from copyhold.kvcore.manifests import (
    CacheGroupManifest,
    GroupLayout,
    RankLayout,
    WorldManifest,
    check_rank_layout,
    rank_layout_digest,
    require_same_layout,
    world_digest,
)

if TYPE_CHECKING:
    import numpy as np

    from copyhold.kernels.pool import KVPool

KEY_AXES = ("layer", "slot", "token/16", "kv_head", "lane", "token%16")
VALUE_AXES = ("layer", "slot", "token/16", "kv_head", "token%16", "lane")
_STORED = {"uint16": "bfloat16", "int16": "float16"}
"""What 16-bit arrays hold: see `KV_STORAGE` of kernels/interface.py."""
_MODE = "paged_blocks"
_ALLOCATOR = "copyhold.pool.v1"


def declared_layout(
    world: WorldManifest, rank: int, num_blocks: int | Sequence[int], kv_dtype: KVDtype = "float32"
) -> RankLayout:
    """What the rank's pools must be in this world; ``num_blocks`` of each group."""
    counts = [num_blocks] if isinstance(num_blocks, int) else num_blocks
    groups = [
        _declared_group(group, world.kv_head_partition[rank], count, kv_dtype)
        for group, count in zip(world.groups, counts, strict=True)
    ]
    return _layout(world, world_digest(world), rank, groups)


def mapped_layout(world: WorldManifest, served: bytes, rank: int, pool: KVPool | CachePools) -> RankLayout:
    """What the pools are. ``served``: digest of the world that the replica serves.

    Raises: StridesDoNotFollowAxes, LengthMismatch for another number of pools than the world has groups.
    """
    pools = as_pools(pool)
    if len(pools) != len(world.groups):
        raise LengthMismatch("groups", len(world.groups), len(pools))
    groups = [
        _mapped_group(group.name, layers, one)
        for group, layers, one in zip(world.groups, pools.layers, pools.pools, strict=True)
    ]
    return _layout(world, served, rank, groups)


def attach(
    world: WorldManifest,
    served: bytes,
    rank: int,
    num_blocks: int | Sequence[int],
    pool: KVPool | CachePools,
) -> str:
    """Check a rank's pools; the RankLayoutDigest in hexadecimal.

    Raises: ManifestMismatch, named after the first field that differs; StridesDoNotFollowAxes, LengthMismatch.
    """
    pool = as_pools(pool)
    mapped = mapped_layout(world, served, rank, pool)
    check_rank_layout(mapped, world)
    require_same_layout(declared_layout(world, rank, num_blocks, pool.first.kv_dtype), mapped)
    return rank_layout_digest(mapped).hex()


def _declared_group(
    group: CacheGroupManifest, kv_heads: int, num_blocks: int, kv_dtype: KVDtype
) -> GroupLayout:
    dims = {
        "layer": len(group.layers),
        "slot": num_blocks,
        "token": group.block_size,
        "kv_head": kv_heads,
        "lane": group.head_dim,
    }
    return GroupLayout(
        name=group.name,
        layers=group.layers,
        block_size=group.block_size,
        num_slots=num_blocks,
        kv_heads=kv_heads,
        head_dim=group.head_dim,
        keys=tensor_layout(kv_dtype, KEY_AXES, dims),
        values=tensor_layout(kv_dtype, VALUE_AXES, dims),
    )


def _mapped_group(name: str, layers: tuple[int, ...], pool: KVPool) -> GroupLayout:
    return GroupLayout(
        name=name,
        layers=layers,
        block_size=pool.block_size,
        num_slots=pool.k.shape[1] // pool.tiles_per_block,
        kv_heads=pool.k.shape[2],
        head_dim=pool.k.shape[3],
        keys=_tensor(pool.k, pool.tiles_per_block, KEY_AXES),
        values=_tensor(pool.v, pool.tiles_per_block, VALUE_AXES),
    )


def _layout(world: WorldManifest, served: bytes, rank: int, groups: Sequence[GroupLayout]) -> RankLayout:
    return RankLayout(
        world=served,
        rank=rank,
        tp_degree=world.tp_degree,
        groups=tuple(groups),
        physical_mode=_MODE,
        scheduler_block_size=world.groups[0].block_size,
        hash_block_size=lcm(*[group.block_size for group in world.groups]),
        allocator_revision=_ALLOCATOR,
    )


def _tensor(array: np.ndarray, tiles_per_block: int, axes: tuple[str, ...]) -> TensorLayout:
    """An array [layers, blocks * tiles, ...] as [layers, blocks, tiles, ...]."""
    layers, tiles, *inner = array.shape
    elements = tuple(stride // array.itemsize for stride in array.strides)
    shape = (layers, tiles // tiles_per_block, tiles_per_block, *inner)
    strides = (elements[0], elements[1] * tiles_per_block, *elements[1:])
    return TensorLayout(_STORED.get(array.dtype.name, array.dtype.name), axes, shape, strides)
