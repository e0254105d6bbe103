"""Refusals of manifests and of the compatibility gate, one class a reason.

Invariant: no manifest was built and nothing was reused. A `ManifestMismatch` carries every differing field in
the contracted order; its class is the first one's. Source: contracts K002 to K011.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec

from .contract_errors import ContractRefusal


class Fault(msgspec.Struct, frozen=True):
    """One differing field: its path, the reason it stands for, and both values as text."""

    field: str
    reason: str
    expected: str
    found: str


@dataclass(eq=False)
class LayerGap(ContractRefusal):
    """Layers that no cache group covers, or a layer the model does not have (K004)."""

    num_layers: int
    missing: tuple[int, ...]
    foreign: tuple[int, ...]
    reason: ClassVar[str] = "layer_gap"


@dataclass(eq=False)
class LayerInTwoGroups(ContractRefusal):
    """A layer is covered twice (K004)."""

    layer: int
    groups: tuple[str, ...]
    reason: ClassVar[str] = "layer_in_two_groups"


@dataclass(eq=False)
class DuplicateGroup(ContractRefusal):
    """Two cache groups have one name (K004)."""

    name: str
    reason: ClassVar[str] = "duplicate_group"


@dataclass(eq=False)
class DuplicateAxis(ContractRefusal):
    """An axis, or a part of a tiled one, is named twice (K004, K036)."""

    axis: str
    axis_order: tuple[str, ...]
    reason: ClassVar[str] = "duplicate_axis"


@dataclass(eq=False)
class MissingAxis(ContractRefusal):
    """An axis, or a part of a tiled one, is not named (K036)."""

    axis: str
    axis_order: tuple[str, ...]
    reason: ClassVar[str] = "missing_axis"


@dataclass(eq=False)
class UnknownAxis(ContractRefusal):
    """An axis has no meaning, or its tile does not divide it (K036)."""

    axis: str
    axis_order: tuple[str, ...]
    reason: ClassVar[str] = "unknown_axis"


@dataclass(eq=False)
class UnknownDtype(ContractRefusal):
    """A stored type whose width is not declared (K003)."""

    dtype: str
    known: tuple[str, ...]
    reason: ClassVar[str] = "unknown_dtype"


@dataclass(eq=False)
class StridesDoNotFollowAxes(ContractRefusal):
    """Declared shape or strides are not those of the declared axis order (K036)."""

    tensor: str
    declared: tuple[int, ...]
    derived: tuple[int, ...]
    reason: ClassVar[str] = "stride_layout_mismatch"


@dataclass(eq=False)
class MissingLogicalAbi(ContractRefusal):
    """A manifest lacks the digest or the name that the model's side provides (K005)."""

    field: str
    reason: ClassVar[str] = "missing_logical_abi"


@dataclass(eq=False)
class PartitionContradiction(ContractRefusal):
    """The KV-head partition is not that of the declared degree and heads, or leaves a rank without (K019)."""

    tp_degree: int
    kv_heads: int
    partition: tuple[int, ...]
    reason: ClassVar[str] = "tp_rank_mismatch"


@dataclass(eq=False)
class ManifestUnchanged(ContractRefusal):
    """A successor without a change, or of a field that only the successor itself may set (K002)."""

    fields: tuple[str, ...]
    reason: ClassVar[str] = "manifest_unchanged"


@dataclass(eq=False)
class BlockReinterpreted(ContractRefusal):
    """A block written under one world would be read under another (K002, K011)."""

    written_under: str
    read_under: str
    reason: ClassVar[str] = "block_reinterpreted"


@dataclass(eq=False)
class HashCollisionWitness(ContractRefusal):
    """Equal keys over different tokens (K010); None is a position beyond the end."""

    position: int
    expected: int | None
    found: int | None
    reason: ClassVar[str] = "hash_collision_witness_mismatch"


@dataclass(eq=False)
class ManifestMismatch(ContractRefusal):
    """Two sides differ; `faults` lists all fields in the contracted order, the first names the reason."""

    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        first = self.faults[0]
        more = f" (and {', '.join(fault.field for fault in self.faults[1:])})" if len(self.faults) > 1 else ""
        return f"{self.reason}: {first.field} expected {first.expected}, found {first.found}{more}"


class CacheAbiMismatch(ManifestMismatch):
    """What a K/V row is differs (K005, K006)."""

    reason: ClassVar[str] = "cache_abi_mismatch"


class LayoutMismatch(ManifestMismatch):
    """The physical layout differs: schema, mode, scheduling or hashing unit, allocator revision (K003, K006)."""

    reason: ClassVar[str] = "layout_mismatch"


class CacheGroupsMismatch(ManifestMismatch):
    """Coverage or geometry of a cache group differs (K003)."""

    reason: ClassVar[str] = "cache_group_mismatch"


class TpRankMismatch(ManifestMismatch):
    """Another rank, degree or KV-head partition (K003)."""

    reason: ClassVar[str] = "tp_rank_mismatch"


class StorageRepresentationMismatch(ManifestMismatch):
    """Stored type or quantization differs (K003)."""

    reason: ClassVar[str] = "storage_representation_mismatch"


class StrideLayoutMismatch(ManifestMismatch):
    """Axis order, shape or strides differ (K003, K036)."""

    reason: ClassVar[str] = "stride_layout_mismatch"


class ModelGenerationMismatch(ManifestMismatch):
    """Other weights, another revision or another generation of the model (K006)."""

    reason: ClassVar[str] = "model_generation_mismatch"


class AdapterMismatch(ManifestMismatch):
    """Another adapter's content (K006)."""

    reason: ClassVar[str] = "adapter_mismatch"


class WeightTransformMismatch(ManifestMismatch):
    """The weights were transformed otherwise (K006)."""

    reason: ClassVar[str] = "weight_transform_mismatch"


class PositionContractMismatch(ManifestMismatch):
    """Positions enter the keys in another way (K006, K009)."""

    reason: ClassVar[str] = "position_contract_mismatch"


class TokenMismatch(ManifestMismatch):
    """The covered token ids differ (K006)."""

    reason: ClassVar[str] = "token_mismatch"


class SideInputMismatch(ManifestMismatch):
    """Images, embeddings or their offsets differ (K006, K008)."""

    reason: ClassVar[str] = "side_input_mismatch"


class NamespaceMismatch(ManifestMismatch):
    """Another isolation namespace (K006)."""

    reason: ClassVar[str] = "namespace_mismatch"


class NamespaceGenerationDiffers(ManifestMismatch):
    """Another generation of the namespace (K006)."""

    reason: ClassVar[str] = "namespace_generation_mismatch"


class SaltMismatch(ManifestMismatch):
    """Another salt (K006)."""

    reason: ClassVar[str] = "salt_mismatch"


class PublicationGenerationMismatch(ManifestMismatch):
    """Another publication world: never merely another publish event (K006, K239)."""

    reason: ClassVar[str] = "publication_generation_mismatch"


_BY_REASON: dict[str, type[ManifestMismatch]] = {
    kind.reason: kind for kind in ManifestMismatch.__subclasses__()
}


def mismatch(faults: tuple[Fault, ...]) -> ManifestMismatch:
    """The refusal that the first of these faults names."""
    return _BY_REASON[faults[0].reason](faults)
