"""Refusals of address translation, one class a reason, in the order in which they are found.

Invariant: no byte was read or written; a refusal names nothing that a later check would have found out.
Source: contracts K031 to K040.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .contract_errors import ContractRefusal


@dataclass(eq=False)
class TokenOutsideContext(ContractRefusal):
    """The token is not one the request may see, whatever the block holds (K033, K034)."""

    token: int
    context_length: int
    reason: ClassVar[str] = "outside_request_context"


@dataclass(eq=False)
class LayerOutsideGroups(ContractRefusal):
    """No cache group covers the layer (K004)."""

    layer: int
    reason: ClassVar[str] = "layer_gap"


@dataclass(eq=False)
class StaleTableVersion(ContractRefusal):
    """The snapshot's tables were replaced by a published successor (K039, K075)."""

    table_version: int
    current_version: int
    reason: ClassVar[str] = "stale_table_version"


@dataclass(eq=False)
class OutsideBlockTable(ContractRefusal):
    """The group's table has no entry for the token's block (K033)."""

    group: str
    logical_block: int
    num_blocks: int
    reason: ClassVar[str] = "outside_block_table"


@dataclass(eq=False)
class UnknownPhysicalId(ContractRefusal):
    """No descriptor of the group names this block (K031)."""

    group: str
    block: int
    reason: ClassVar[str] = "unknown_physical_block"


@dataclass(eq=False)
class PoolRebuilt(ContractRefusal):
    """The snapshot was taken from another generation of the group's pool (K031, K077)."""

    group: str
    pool_generation: int
    current_generation: int
    reason: ClassVar[str] = "stale_pool_generation"


@dataclass(eq=False)
class GroupOfAnotherPool(ContractRefusal):
    """A physical block was named for one group and used in another (K031)."""

    group: str
    other: str
    reason: ClassVar[str] = "cache_group_mismatch"


@dataclass(eq=False)
class RowNotMaterialised(ContractRefusal):
    """The request may see the row, but the block has not committed it (K034)."""

    block: int
    token_offset: int
    valid_rows: int
    reason: ClassVar[str] = "row_not_materialised"


@dataclass(eq=False)
class HeadOutOfRange(ContractRefusal):
    """The head is not one of this rank's KV heads (K033)."""

    head: int
    kv_heads: int
    reason: ClassVar[str] = "head_out_of_range"


@dataclass(eq=False)
class LaneOutOfRange(ContractRefusal):
    """The lane is outside the head (K033)."""

    lane: int
    head_dim: int
    reason: ClassVar[str] = "lane_out_of_range"


@dataclass(eq=False)
class AddressOutsideTensor(ContractRefusal):
    """The computed coordinate or address leaves the tensor's own range (K033, K037)."""

    address: int
    begin: int
    end: int
    reason: ClassVar[str] = "address_outside_tensor"


@dataclass(eq=False)
class SlotIdUsedAsAddress(ContractRefusal):
    """A slot id was used where bytes or elements are meant (K035)."""

    left: str
    right: str
    reason: ClassVar[str] = "slot_id_used_as_address"


@dataclass(eq=False)
class TableLengthDrift(ContractRefusal):
    """A group's table does not have ceil(context / block_size) entries (K032)."""

    group: str
    context_length: int
    expected_blocks: int
    blocks: int
    reason: ClassVar[str] = "table_length_drift"


@dataclass(eq=False)
class CrossGroupBundleMismatch(ContractRefusal):
    """The groups of one snapshot were published under different versions, or one is missing (K032)."""

    groups: tuple[str, ...]
    versions: tuple[int, ...]
    reason: ClassVar[str] = "cross_group_bundle_mismatch"


@dataclass(eq=False)
class OverlappingTensorRanges(ContractRefusal):
    """Two tensors of the rank share bytes (K037). No manifest was built."""

    first: str
    second: str
    first_end: int
    second_begin: int
    reason: ClassVar[str] = "overlapping_tensor_ranges"


@dataclass(eq=False)
class SlotReuse(ContractRefusal):
    """Two blocks of one group name the same pool slot (K038). No descriptor table was built."""

    group: str
    slot: int
    blocks: tuple[int, ...]
    reason: ClassVar[str] = "slot_reuse"


@dataclass(eq=False)
class FrozenAddressChanged(ContractRefusal):
    """A successor maps a row that was addressable before to another place (K039)."""

    group: str
    logical_block: int
    before: int
    after: int
    reason: ClassVar[str] = "frozen_address_changed"


@dataclass(eq=False)
class AddressRangeOverflow(ContractRefusal):
    """A tensor's bytes or its end leave the 63 bits of an address (K037). No manifest was built."""

    tensor: str
    begin: int
    end: int
    reason: ClassVar[str] = "address_range_overflow"
