"""The layout of a rank's pool: what it is to be, and what the memory that was mapped really is.

Owns the check made once when a rank attaches. Invariant: what is compared with the declared layout is read from the
arrays that kernels use (shapes, strides, dtype), never from the arguments the pool was made with.
Source: LEDGER "Two identities" (RankLayoutDigest); contracts K003, K006, K036, K143.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from copyhold.kernels.choices import KVDtype
from copyhold.kvcore.axes import TensorLayout, tensor_layout
from copyhold.kvcore.manifests import (
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
    world: WorldManifest, rank: int, num_blocks: int, kv_dtype: KVDtype = "float32"
) -> RankLayout:
    """What the rank's pool must be in this world."""
    (group,) = world.groups
    dims = {
        "layer": len(group.layers),
        "slot": num_blocks,
        "token": group.block_size,
        "kv_head": world.kv_head_partition[rank],
        "lane": group.head_dim,
    }
    tensors = tensor_layout(kv_dtype, KEY_AXES, dims), tensor_layout(kv_dtype, VALUE_AXES, dims)
    return _layout(world, world_digest(world), rank, num_blocks, dims["kv_head"], group.head_dim, tensors)


def mapped_layout(world: WorldManifest, served: bytes, rank: int, pool: KVPool) -> RankLayout:
    """What the pool is. ``served``: digest of the world that the replica serves. Raises: StridesDoNotFollowAxes."""
    tensors = (
        _tensor(pool.k, pool.tiles_per_block, KEY_AXES),
        _tensor(pool.v, pool.tiles_per_block, VALUE_AXES),
    )
    num_blocks = pool.k.shape[1] // pool.tiles_per_block
    return _layout(world, served, rank, num_blocks, pool.k.shape[2], pool.k.shape[3], tensors)


def attach(world: WorldManifest, served: bytes, rank: int, num_blocks: int, pool: KVPool) -> str:
    """Check a rank's pool; the RankLayoutDigest in hexadecimal.

    Raises: ManifestMismatch, named after the first field that differs; StridesDoNotFollowAxes.
    """
    mapped = mapped_layout(world, served, rank, pool)
    check_rank_layout(mapped, world)
    require_same_layout(declared_layout(world, rank, num_blocks, pool.kv_dtype), mapped)
    return rank_layout_digest(mapped).hex()


def _layout(
    world: WorldManifest,
    served: bytes,
    rank: int,
    num_blocks: int,
    kv_heads: int,
    head_dim: int,
    tensors: tuple[TensorLayout, TensorLayout],
) -> RankLayout:
    (group,) = world.groups
    keys, values = tensors
    return RankLayout(
        world=served,
        rank=rank,
        tp_degree=world.tp_degree,
        groups=(
            GroupLayout(
                group.name, group.layers, group.block_size, num_blocks, kv_heads, head_dim, keys, values
            ),
        ),
        physical_mode=_MODE,
        scheduler_block_size=group.block_size,
        hash_block_size=group.block_size,
        allocator_revision=_ALLOCATOR,
    )


def _tensor(array: np.ndarray, tiles_per_block: int, axes: tuple[str, ...]) -> TensorLayout:
    """An array [layers, blocks * tiles, ...] as [layers, blocks, tiles, ...]."""
    layers, tiles, *inner = array.shape
    elements = tuple(stride // array.itemsize for stride in array.strides)
    shape = (layers, tiles // tiles_per_block, tiles_per_block, *inner)
    strides = (elements[0], elements[1] * tiles_per_block, *elements[1:])
    return TensorLayout(_STORED.get(array.dtype.name, array.dtype.name), axes, shape, strides)
