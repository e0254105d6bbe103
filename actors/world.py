"""The world of a replica: everything that must be equal on all ranks for K/V to be exchangeable.

Owns the projection from a converted checkpoint to the ledger's ``WorldManifest`` (LEDGER, "Two identities"). The digest of
the result keys every prefix root and names no rank's own layout.
"""

from __future__ import annotations

from collections.abc import Sequence

from copyhold.kernels.choices import KVDtype
from copyhold.kvcore.identity import CacheGroupManifest, WorldManifest, world_digest
from copyhold.models.layer_groups import LayerGroup, one_group
from copyhold.models.manifest import ConvertedCheckpoint

CACHE_ABI = "copyhold.llama.rope-on-keys.v1"
"""Names what a K/V row is: keys after rotary embedding, values as projected."""

FULL_ATTENTION = "full"


def world_of(checkpoint: ConvertedCheckpoint, block_size: int, kv_dtype: KVDtype = "float32") -> bytes:
    """SHA-256 of the world this checkpoint serves under, split as its partitions say."""
    return world_digest(world_manifest(checkpoint, block_size, kv_dtype))


def world_manifest(
    checkpoint: ConvertedCheckpoint, block_size: int, kv_dtype: KVDtype = "float32"
) -> WorldManifest:
    """The world itself. Rows of another storage type are other content: they are another world."""
    groups = one_group(checkpoint.config.num_layers, block_size, FULL_ATTENTION)
    return grouped_world(checkpoint, groups, kv_dtype)


def grouped_world(
    checkpoint: ConvertedCheckpoint, groups: Sequence[LayerGroup], kv_dtype: KVDtype = "float32"
) -> WorldManifest:
    """The world whose layers are divided so. Raises: LayerGap, LayerInTwoGroups, DuplicateGroup."""
    config = checkpoint.config
    scaling = config.rope_scaling
    manifests = tuple(
        CacheGroupManifest(
            name=group.name,
            layers=group.layers,
            block_size=group.block_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            window=0,
        )
        for group in groups
    )
    return WorldManifest(
        model_digest=bytes.fromhex(checkpoint.digest),
        model_revision=checkpoint.digest,
        adapter_digest=b"",
        cache_abi=CACHE_ABI,
        groups=manifests,
        position_contract=f"rope theta={config.rope_theta!r} scaling={scaling!r} from 0, contiguous",
        quantization=checkpoint.dtype if kv_dtype == "float32" else f"{checkpoint.dtype}, K/V {kv_dtype}",
        tp_degree=checkpoint.tp_size,
        kv_head_partition=tuple(len(part.kv_heads) for part in checkpoint.partitions),
        num_layers=config.num_layers,
    )
