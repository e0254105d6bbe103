"""Manifests: what must be equal for K/V to be exchangeable, and how one rank's K/V lies in memory.

Owns WorldManifest (equal on every rank, keys the prefix roots), RankLayout (checked once when a rank
attaches), their SHA-256 digests, their comparison field by field and the successor of a world. Invariant: a
manifest that exists is consistent in itself; any change of a field changes the digest, and labels such as a
tokenizer's name are no fields. Encoding: domain, then each field as name, type tag and length-prefixed bytes,
in declared order, so that no two manifests share an encoding.
Source: LEDGER "Two identities"; contracts K002 to K006, K011.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from .axes import TensorLayout
from .checked import checked_int, checked_slots
from .contract_errors import EmptyInput, LengthMismatch
from .manifest_errors import (
    BlockReinterpreted,
    DuplicateGroup,
    Fault,
    LayerGap,
    LayerInTwoGroups,
    ManifestUnchanged,
    MissingLogicalAbi,
    PartitionContradiction,
    mismatch,
)

_WORLD_DOMAIN = b"copyhold.world.v2"
_LAYOUT_DOMAIN = b"copyhold.rank-layout.v2"


class CacheGroupManifest(msgspec.Struct, frozen=True):
    """One cache group over all ranks: the layers it covers and what one of their rows is."""

    name: str
    layers: tuple[int, ...]
    block_size: int
    kv_heads: int
    head_dim: int
    window: int

    def __post_init__(self) -> None:
        if not self.name:
            raise EmptyInput("group name")
        checked_int("window", self.window)
        for field in ("block_size", "kv_heads", "head_dim"):
            checked_int(field, getattr(self, field), least=1)


class WorldManifest(msgspec.Struct, frozen=True):
    """Everything that decides K/V values and their logical shape. `kv_head_partition` counts heads of each
    rank.
    """

    model_digest: bytes
    model_revision: str
    adapter_digest: bytes
    cache_abi: str
    groups: tuple[CacheGroupManifest, ...]
    position_contract: str
    quantization: str
    tp_degree: int
    kv_head_partition: tuple[int, ...]
    num_layers: int
    weight_transform: str = "none"
    model_generation: int = 0
    schema_version: int = 2

    def __post_init__(self) -> None:
        for field in ("model_digest", "cache_abi"):
            if not getattr(self, field):
                raise MissingLogicalAbi(field)
        check_layer_coverage(self.groups, self.num_layers)
        checked_int("model_generation", self.model_generation)
        heads = tuple(checked_int("kv_head_partition", count) for count in self.kv_head_partition)
        for group in self.groups:
            if len(heads) != self.tp_degree or sum(heads) != group.kv_heads or 0 in heads:
                raise PartitionContradiction(self.tp_degree, group.kv_heads, heads)


class GroupLayout(msgspec.Struct, frozen=True):
    """One cache group on one rank: local heads, pool slots, and how K and V lie.

    K and V are two tensors, or one when both layouts name the axis "kv".
    """

    name: str
    layers: tuple[int, ...]
    block_size: int
    num_slots: int
    kv_heads: int
    head_dim: int
    keys: TensorLayout
    values: TensorLayout

    def __post_init__(self) -> None:
        for field in ("num_slots", "kv_heads", "head_dim"):
            checked_int(field, getattr(self, field), least=1)
        checked_slots(self.num_slots, self.block_size)
        if not self.layers:
            raise EmptyInput(f"layers of group {self.name}")
        dims = self.dims
        self.keys.check(f"{self.name}.keys", dims)
        self.values.check(f"{self.name}.values", dims)
        if self.keys.interleaved != self.values.interleaved or (
            self.keys.interleaved and self.keys != self.values
        ):
            raise mismatch(_differences("", self.keys, self.values, _TENSOR_REASONS))

    @property
    def dims(self) -> dict[str, int]:
        """Size of each base axis."""
        return {
            "layer": len(self.layers),
            "slot": self.num_slots,
            "token": self.block_size,
            "kv_head": self.kv_heads,
            "lane": self.head_dim,
        }

    @property
    def interleaved(self) -> bool:
        """Whether K and V share one tensor."""
        return self.keys.interleaved


class RankLayout(msgspec.Struct, frozen=True):
    """How one rank's K/V bytes lie in memory, under one world."""

    world: bytes
    rank: int
    tp_degree: int
    groups: tuple[GroupLayout, ...]
    physical_mode: str
    scheduler_block_size: int
    hash_block_size: int
    allocator_revision: str
    schema_version: int = 2

    def __post_init__(self) -> None:
        if not self.world:
            raise MissingLogicalAbi("world")
        if not self.groups:
            raise EmptyInput("groups")
        checked_int("rank", self.rank, limit=checked_int("tp_degree", self.tp_degree, least=1))
        for field in ("scheduler_block_size", "hash_block_size"):
            checked_int(field, getattr(self, field), least=1)
        check_layer_coverage(self.groups, sum(len(group.layers) for group in self.groups))


class Successor(msgspec.Struct, frozen=True):
    """A world that follows another: the old digest stays with the old blocks."""

    manifest: WorldManifest
    digest: bytes
    predecessor: bytes
    changed: tuple[str, ...]


def check_layer_coverage(groups: Sequence[CacheGroupManifest | GroupLayout], num_layers: int) -> None:
    """Every layer in exactly one group. Raises: EmptyInput, DuplicateGroup, LayerInTwoGroups, LayerGap."""
    if not groups:
        raise EmptyInput("groups")
    owners: dict[int, str] = {}
    names: set[str] = set()
    for group in groups:
        if group.name in names:
            raise DuplicateGroup(group.name)
        names.add(group.name)
        for layer in group.layers:
            if layer in owners:
                raise LayerInTwoGroups(layer, (owners[layer], group.name))
            owners[layer] = group.name
    known = range(checked_int("num_layers", num_layers, least=1))
    missing = tuple(layer for layer in known if layer not in owners)
    foreign = tuple(sorted(layer for layer in owners if layer not in known))
    if missing or foreign:
        raise LayerGap(num_layers, missing, foreign)


def world_digest(manifest: WorldManifest) -> bytes:
    """32 bytes that name the world."""
    return hashlib.sha256(_WORLD_DOMAIN + canonical(manifest)).digest()


def rank_layout_digest(layout: RankLayout) -> bytes:
    """32 bytes that name the rank's layout."""
    return hashlib.sha256(_LAYOUT_DOMAIN + canonical(layout)).digest()


def check_rank_layout(layout: RankLayout, world: WorldManifest) -> None:
    """A rank attaches: its layout must be the projection of this world on it.

    Raises: ManifestMismatch with every differing field, LengthMismatch for another number of groups.
    """
    if len(layout.groups) != len(world.groups):
        raise LengthMismatch("groups", len(world.groups), len(layout.groups))
    rank = checked_int("rank", layout.rank, limit=world.tp_degree)
    pairs: list[tuple[str, str, Any, Any]] = [
        ("world", "cache_abi_mismatch", world_digest(world).hex(), layout.world.hex()),
        ("tp_degree", "tp_rank_mismatch", world.tp_degree, layout.tp_degree),
    ]
    for ours, theirs in zip(world.groups, layout.groups, strict=True):
        for field in ("name", "layers", "block_size", "head_dim"):
            path = f"groups.{ours.name}.{field}"
            pairs.append((path, "cache_group_mismatch", getattr(ours, field), getattr(theirs, field)))
        heads = world.kv_head_partition[rank]
        pairs.append((f"groups.{ours.name}.kv_heads", "tp_rank_mismatch", heads, theirs.kv_heads))
    faults = tuple(
        Fault(path, reason, repr(ours), repr(theirs))
        for path, reason, ours, theirs in pairs
        if ours != theirs
    )
    if faults:
        raise mismatch(faults)


def world_faults(expected: WorldManifest, found: WorldManifest) -> tuple[Fault, ...]:
    """Every differing field, in the order of `WORLD_REASONS`."""
    return _differences("", expected, found, WORLD_REASONS)


def require_same_world(expected: WorldManifest, found: WorldManifest) -> None:
    """Raises: ManifestMismatch, of the class that the first differing field names."""
    faults = world_faults(expected, found)
    if faults:
        raise mismatch(faults)


def layout_faults(expected: RankLayout, found: RankLayout) -> tuple[Fault, ...]:
    """Every differing field, in the order of `LAYOUT_REASONS`, then group by group."""
    faults = [*_differences("", expected, found, LAYOUT_REASONS)]
    if len(expected.groups) != len(found.groups):
        counts = repr(len(expected.groups)), repr(len(found.groups))
        return (*faults, Fault("groups", "cache_group_mismatch", *counts))
    for ours, theirs in zip(expected.groups, found.groups, strict=True):
        path = f"groups.{ours.name}."
        faults += _differences(path, ours, theirs, _GROUP_REASONS)
        faults += _differences(f"{path}keys.", ours.keys, theirs.keys, _TENSOR_REASONS)
        faults += _differences(f"{path}values.", ours.values, theirs.values, _TENSOR_REASONS)
    return tuple(faults)


def require_same_layout(expected: RankLayout, found: RankLayout) -> None:
    """Raises: ManifestMismatch, of the class that the first differing field names."""
    faults = layout_faults(expected, found)
    if faults:
        raise mismatch(faults)


def require_same_reading(written_under: bytes, read_under: bytes) -> None:
    """A block keeps the world it was written under (K002, K011). Raises: BlockReinterpreted."""
    if written_under != read_under:
        raise BlockReinterpreted(written_under.hex(), read_under.hex())


def successor(manifest: WorldManifest, **changes: Any) -> Successor:
    """The world after a change of weights, adapter, transform, positions, representation or shards.

    Its generation is one higher, so that going back to earlier values is still a new world (K011).
    Raises: ManifestUnchanged; TypeError for a field that worlds do not have; what construction raises.
    """
    changed = tuple(
        name
        for name in manifest.__struct_fields__
        if name in changes and changes[name] != getattr(manifest, name)
    )
    if not changed or "model_generation" in changes:
        raise ManifestUnchanged(tuple(changes))
    following = msgspec.structs.replace(manifest, **changes, model_generation=manifest.model_generation + 1)
    return Successor(following, world_digest(following), world_digest(manifest), changed)


def canonical(value: Any) -> bytes:
    """Self-delimiting bytes of a manifest: type tag, length, content."""
    if isinstance(value, msgspec.Struct):
        fields = [(name, getattr(value, name)) for name in value.__struct_fields__]
        content = b"".join(canonical(name) + canonical(item) for name, item in fields)
        return _framed(b"S", content)
    if isinstance(value, tuple):
        return _framed(b"T", b"".join(canonical(item) for item in value))
    if isinstance(value, str):
        return _framed(b"s", value.encode())
    if isinstance(value, bytes):
        return _framed(b"b", value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _framed(b"i", str(value).encode())
    raise TypeError(f"no canonical form for {type(value).__name__}")


WORLD_REASONS: dict[str, str] = {
    "schema_version": "layout_mismatch",
    "cache_abi": "cache_abi_mismatch",
    "model_digest": "model_generation_mismatch",
    "model_revision": "model_generation_mismatch",
    "model_generation": "model_generation_mismatch",
    "adapter_digest": "adapter_mismatch",
    "weight_transform": "weight_transform_mismatch",
    "position_contract": "position_contract_mismatch",
    "num_layers": "cache_group_mismatch",
    "groups": "cache_group_mismatch",
    "quantization": "storage_representation_mismatch",
    "tp_degree": "tp_rank_mismatch",
    "kv_head_partition": "tp_rank_mismatch",
}
"""Reason of each differing field of a world, in the order in which they are reported."""

LAYOUT_REASONS: dict[str, str] = {
    "schema_version": "layout_mismatch",
    "world": "cache_abi_mismatch",
    "rank": "tp_rank_mismatch",
    "tp_degree": "tp_rank_mismatch",
    "physical_mode": "layout_mismatch",
    "scheduler_block_size": "layout_mismatch",
    "hash_block_size": "layout_mismatch",
    "allocator_revision": "layout_mismatch",
}
"""The same for a rank's layout; its groups follow."""

_GROUP_REASONS: dict[str, str] = {
    "name": "cache_group_mismatch",
    "layers": "cache_group_mismatch",
    "block_size": "cache_group_mismatch",
    "kv_heads": "cache_group_mismatch",
    "head_dim": "cache_group_mismatch",
    "num_slots": "stride_layout_mismatch",
}
_TENSOR_REASONS = {
    "dtype": "storage_representation_mismatch",
    "axis_order": "stride_layout_mismatch",
    "shape": "stride_layout_mismatch",
    "strides": "stride_layout_mismatch",
}


def _differences(path: str, ours: Any, theirs: Any, reasons: dict[str, str]) -> tuple[Fault, ...]:
    return tuple(
        Fault(path + field, reason, repr(getattr(ours, field)), repr(getattr(theirs, field)))
        for field, reason in reasons.items()
        if getattr(ours, field) != getattr(theirs, field)
    )


def _framed(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content
