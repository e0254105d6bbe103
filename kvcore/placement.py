"""Placement: where a rank's K and V tensors begin, checked once when it is built.

Owns the ranges of all tensors of one rank and the map from layers to groups. Invariant: the ranges are
disjoint, each is exactly as long as its tensor, and every end fits 63 bits; an interleaved group has one range.
Source: contracts K004, K036, K037.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from .address_errors import (
    AddressRangeOverflow,
    GroupOfAnotherPool,
    LayerOutsideGroups,
    OverlappingTensorRanges,
)
from .axes import TensorLayout
from .checked import Array, checked_int, same_length
from .manifests import GroupLayout, check_layer_coverage

_ADDRESS_LIMIT = 2**63


class TensorRange(msgspec.Struct, frozen=True):
    """Bytes [begin, end) of one tensor."""

    name: str
    begin: int
    end: int
    layout: TensorLayout


class GroupPlacement(msgspec.Struct, frozen=True):
    """A group's layout and the ranges of its tensors; equal ones where K and V are interleaved."""

    layout: GroupLayout
    keys: TensorRange
    values: TensorRange

    def tensor(self, kind: str) -> TensorRange:
        """`kind` is "K" or "V"."""
        return self.keys if kind == "K" else self.values


class AddressManifest(msgspec.Struct, frozen=True):
    """All groups of one rank with their ranges; made by `place`."""

    groups: tuple[GroupPlacement, ...]

    def group_of(self, layer: int) -> tuple[int, int]:
        """Group index and local layer. Raises: LayerOutsideGroups."""
        for index, group in enumerate(self.groups):
            if layer in group.layout.layers:
                return index, group.layout.layers.index(layer)
        raise LayerOutsideGroups(layer)

    def groups_of(self, layers: Array) -> tuple[Array, Array]:
        """`group_of` of each entry, int64 [layers]; group -1 marks a layer that no group covers."""
        known = sorted(
            (layer, index, local)
            for index, group in enumerate(self.groups)
            for local, layer in enumerate(group.layout.layers)
        )
        table = np.array(known, dtype=np.int64)
        at = np.minimum(np.searchsorted(table[:, 0], layers), len(table) - 1)
        covered = table[at, 0] == layers
        return np.where(covered, table[at, 1], -1), table[at, 2]

    def require_group(self, name: str, group: int) -> GroupPlacement:
        """The placement of a block named for `group`. Raises: GroupOfAnotherPool, IdOutOfRange."""
        placement = self.groups[checked_int("group", group, limit=len(self.groups))]
        if placement.layout.name != name:
            raise GroupOfAnotherPool(name, placement.layout.name)
        return placement


def place(layouts: Sequence[GroupLayout], bases: Sequence[tuple[int, int]]) -> AddressManifest:
    """Puts every group's tensors at `bases` (K, V); an interleaved group gives its one base twice.

    Raises: OverlappingTensorRanges, AddressRangeOverflow, LengthMismatch, coverage refusals.
    """
    check_layer_coverage(layouts, sum(len(layout.layers) for layout in layouts))
    same_length("bases", len(layouts), bases)
    groups = tuple(
        GroupPlacement(
            layout,
            _range(f"{layout.name}.keys", layout.keys, k_base),
            _range(f"{layout.name}.values", layout.values, v_base),
        )
        for layout, (k_base, v_base) in zip(layouts, bases, strict=True)
    )
    _check_disjoint(groups)
    return AddressManifest(groups)


def _range(name: str, layout: TensorLayout, base: int) -> TensorRange:
    begin = checked_int("base", base)
    end = begin + layout.total_bytes
    if end >= _ADDRESS_LIMIT:
        raise AddressRangeOverflow(name, begin, end)
    return TensorRange(name, begin, end, layout)


def _check_disjoint(groups: tuple[GroupPlacement, ...]) -> None:
    ranges: list[TensorRange] = []
    for group in groups:
        if group.layout.interleaved and group.keys.begin == group.values.begin:
            ranges.append(group.keys)
        else:
            ranges += [group.keys, group.values]
    ranges.sort(key=lambda tensor: (tensor.begin, tensor.end))
    for first, second in pairwise(ranges):
        if second.begin < first.end:
            raise OverlappingTensorRanges(first.name, second.name, first.end, second.begin)
