"""Address translation: from a logical K/V coordinate to slot id, element offset and byte address.

Owns the rejection order: what the request may see, its table's version and bounds, the block's identity and
pool generation, what the block has committed, head and lane, and last the tensor's own range. The first failure
decides the reason, so a refusal tells nothing of what lies behind it. Invariant: scalar and vectorised forms
agree in every number and every refusal. Nothing is read or written here.
Source: contracts K031 to K040; 0x03.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .address_errors import (
    AddressOutsideTensor,
    HeadOutOfRange,
    LaneOutOfRange,
    OutsideBlockTable,
    PoolRebuilt,
    RowNotMaterialised,
    SlotIdUsedAsAddress,
    StaleTableVersion,
    TokenOutsideContext,
    UnknownPhysicalId,
)
from .axes import KV_AXIS
from .checked import Array, checked_array, checked_int, same_length
from .contract_errors import IdOutOfRange
from .descriptors import DescriptorTable
from .placement import AddressManifest, GroupPlacement, TensorRange
from .quantities import ByteAddress, ByteOffset, ElementOffset, SlotId
from .snapshots import RequestSnapshot

KINDS = ("K", "V")


class Coordinate(msgspec.Struct, frozen=True):
    """One scalar, as a model names it. `kind` is "K" or "V"; `head` and `lane` are local to the rank."""

    token: int
    layer: int
    kind: str
    head: int
    lane: int


class Address(msgspec.Struct, frozen=True):
    """Where that scalar is, and every step on the way there."""

    group: str
    layer_local: int
    logical_block: int
    token_offset: int
    block: int
    slot: int
    slot_id: SlotId
    coordinate: tuple[int, ...]
    element_offset: ElementOffset
    byte_offset: ByteOffset
    byte_address: ByteAddress


class AddressVector(msgspec.Struct, frozen=True):
    """Addresses of many scalars, int64 arrays [coordinates]; `groups` indexes the manifest's groups."""

    groups: Array
    blocks: Array
    slot_ids: Array
    element_offsets: Array
    byte_addresses: Array


class View(msgspec.Struct, frozen=True):
    """What translation reads: layout and bases, descriptors by group, one request and its current version."""

    manifest: AddressManifest
    descriptors: tuple[DescriptorTable, ...]
    snapshot: RequestSnapshot
    current_version: int


def translate(view: View, at: Coordinate) -> Address:
    """Raises, in this order: TokenOutsideContext, LayerOutsideGroups, StaleTableVersion, OutsideBlockTable,
    UnknownPhysicalId, PoolRebuilt, RowNotMaterialised, HeadOutOfRange, LaneOutOfRange, AddressOutsideTensor.
    """
    kind = _kind_index(at.kind)
    token = checked_int("token", at.token, least=-(2**62))
    if not 0 <= token < view.snapshot.context_length:
        raise TokenOutsideContext(token, view.snapshot.context_length)
    index, layer_local = view.manifest.group_of(checked_int("layer", at.layer, least=-(2**62)))
    placement, descriptors = view.manifest.groups[index], view.descriptors[index]
    layout = placement.layout
    block, logical, offset = _physical_block(view, index, placement, token)
    slot, valid = _described(view, index, descriptors, block)
    if offset >= valid:
        raise RowNotMaterialised(block, offset, valid)
    head, lane = checked_int("head", at.head, least=-(2**62)), checked_int("lane", at.lane, least=-(2**62))
    if not 0 <= head < layout.kv_heads:
        raise HeadOutOfRange(head, layout.kv_heads)
    if not 0 <= lane < layout.head_dim:
        raise LaneOutOfRange(lane, layout.head_dim)
    tensor = placement.tensor(at.kind)
    position = {
        "layer": layer_local,
        "slot": slot,
        "token": offset,
        "kv_head": head,
        "lane": lane,
        KV_AXIS: kind,
    }
    elements = tensor.layout.offset(position)
    address = tensor.begin + elements * tensor.layout.scalar_bytes
    if slot >= layout.num_slots or not tensor.begin <= address <= tensor.end - tensor.layout.scalar_bytes:
        raise AddressOutsideTensor(address, tensor.begin, tensor.end)
    return Address(
        group=layout.name,
        layer_local=layer_local,
        logical_block=logical,
        token_offset=offset,
        block=block,
        slot=slot,
        slot_id=SlotId(slot * layout.block_size + offset),
        coordinate=tensor.layout.coordinate(position),
        element_offset=ElementOffset(elements),
        byte_offset=ByteOffset(elements * tensor.layout.scalar_bytes),
        byte_address=ByteAddress(address),
    )


def translate_many(
    view: View,
    tokens: Sequence[int] | Array,
    layers: Sequence[int] | Array,
    kinds: Sequence[str],
    heads: Sequence[int] | Array,
    lanes: Sequence[int] | Array,
) -> AddressVector:
    """`translate` of each entry [coordinates]; empty vectors give empty ones.

    Raises: what `translate` raises for the first entry that it refuses; bad input before any entry.
    """
    columns = {
        name: checked_array(name, values, least=-(2**62))
        for name, values in (("tokens", tokens), ("layers", layers), ("heads", heads), ("lanes", lanes))
    }
    count = len(columns["tokens"])
    for name, values in (*columns.items(), ("kinds", kinds)):
        same_length(name, count, values)
    kind = np.array([_kind_index(name) for name in kinds], dtype=np.int64)
    found = _many(view, columns, kind)
    if found.first_refused is not None:
        at = found.first_refused
        token, layer, head, lane = (int(columns[name][at]) for name in ("tokens", "layers", "heads", "lanes"))
        translate(view, Coordinate(token, layer, kinds[at], head, lane))
        raise AssertionError(f"scalar form accepts entry {at}, vectorised form refuses it")
    return AddressVector(found.groups, found.blocks, found.slot_ids, found.elements, found.addresses)


def require_address(tensor: TensorRange, address: ByteAddress) -> int:
    """The plain number for a load or store. Raises: SlotIdUsedAsAddress, AddressOutsideTensor."""
    if type(address) is not ByteAddress:
        raise SlotIdUsedAsAddress(repr(address), "ByteAddress")
    if not tensor.begin <= address.value <= tensor.end - tensor.layout.scalar_bytes:
        raise AddressOutsideTensor(address.value, tensor.begin, tensor.end)
    return address.value


class _Found:
    """Columns of a vectorised translation, filled group by group."""

    def __init__(self, count: int) -> None:
        self.groups, self.blocks, self.slot_ids, self.elements, self.addresses = (
            np.zeros(count, dtype=np.int64) for _ in range(5)
        )
        self.refused = np.zeros(count, dtype=bool)

    @property
    def first_refused(self) -> int | None:
        places = np.flatnonzero(self.refused)
        return int(places[0]) if len(places) else None


def _many(view: View, columns: dict[str, Array], kind: Array) -> _Found:
    found = _Found(len(kind))
    tokens = columns["tokens"]
    visible = (tokens >= 0) & (tokens < view.snapshot.context_length)
    groups, local = view.manifest.groups_of(columns["layers"])
    stale = view.snapshot.table_version != view.current_version
    found.refused = ~visible | (groups < 0) | stale
    found.groups = groups
    for index in range(len(view.manifest.groups)):
        at = np.flatnonzero((groups == index) & ~found.refused)
        if len(at):
            _many_of_group(view, index, at, columns, kind, local, found)
    return found


def _many_of_group(
    view: View, index: int, at: Array, columns: dict[str, Array], kind: Array, local: Array, found: _Found
) -> None:
    """Entries `at`, all of one group."""
    placement, descriptors = view.manifest.groups[index], view.descriptors[index]
    layout, table = placement.layout, view.snapshot.tables[index]
    if descriptors.pool_generation != view.snapshot.pool_generations[index]:
        found.refused[at] = True
        return
    logical, offset = np.divmod(columns["tokens"][at], layout.block_size)
    inside = logical < len(table)
    found.refused[at[~inside]] = True
    at, logical, offset = at[inside], logical[inside], offset[inside]
    blocks = table[logical]
    slot, valid, known = descriptors.lookup(blocks)
    heads, lanes = columns["heads"][at], columns["lanes"][at]
    bad = ~known | (offset >= valid) | (slot >= layout.num_slots)
    bad |= (heads < 0) | (heads >= layout.kv_heads) | (lanes < 0) | (lanes >= layout.head_dim)
    found.blocks[at], found.slot_ids[at] = blocks, slot * layout.block_size + offset
    position = {"layer": local[at], "slot": slot, "token": offset, "kv_head": heads, "lane": lanes}
    position[KV_AXIS] = kind[at]
    for number, name in enumerate(KINDS):
        tensor, mine = placement.tensor(name), kind[at] == number
        elements = tensor.layout.offsets({axis: values[mine] for axis, values in position.items()})
        addresses = tensor.begin + elements * tensor.layout.scalar_bytes
        found.elements[at[mine]], found.addresses[at[mine]] = elements, addresses
        outside = (addresses < tensor.begin) | (addresses > tensor.end - tensor.layout.scalar_bytes)
        bad[mine] |= outside
    found.refused[at[bad]] = True


def _physical_block(view: View, index: int, placement: GroupPlacement, token: int) -> tuple[int, int, int]:
    """Block id, logical block and token offset."""
    snapshot = view.snapshot
    if snapshot.table_version != view.current_version:
        raise StaleTableVersion(snapshot.table_version, view.current_version)
    logical, offset = divmod(token, placement.layout.block_size)
    table = snapshot.tables[index]
    if logical >= len(table):
        raise OutsideBlockTable(placement.layout.name, logical, len(table))
    return int(table[logical]), logical, offset


def _described(view: View, index: int, descriptors: DescriptorTable, block: int) -> tuple[int, int]:
    """Slot and valid rows of a block of the pool's current generation."""
    name, generation = view.manifest.groups[index].layout.name, view.snapshot.pool_generations[index]
    slots, rows, known = descriptors.lookup(np.array([block]))
    if not known[0]:
        raise UnknownPhysicalId(name, block)
    if generation != descriptors.pool_generation:
        raise PoolRebuilt(name, generation, descriptors.pool_generation)
    return int(slots[0]), int(rows[0])


def _kind_index(kind: str) -> int:
    if kind not in KINDS:
        raise IdOutOfRange(f"kind {kind!r}", len(KINDS), len(KINDS))
    return KINDS.index(kind)
