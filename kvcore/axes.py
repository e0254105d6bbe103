"""Axis orders of one K or V tensor: names, inner tiles, shapes and strides.

Owns the notation. An axis order lists the base axes layer, slot, token, kv_head and lane, each once, from the
slowest to the fastest; "token/16" and "token%16" together stand for a token axis tiled by 16 (outer and inner
part); "kv" (K before V) makes one tensor of both. Invariant: strides are the products of the sizes to the
right, in elements, and a declared shape or stride that differs is refused.
Source: contracts K036, K232; LEDGER "Two identities" (axis order, strides, inner tile).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from .checked import Array
from .manifest_errors import DuplicateAxis, MissingAxis, StridesDoNotFollowAxes, UnknownAxis, UnknownDtype

BASE_AXES = ("layer", "slot", "token", "kv_head", "lane")
KV_AXIS = "kv"
SCALAR_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3": 1, "float8_e5m2": 1}
"""Bytes of one stored scalar."""


class TensorLayout(msgspec.Struct, frozen=True):
    """Stored type, axes, sizes and strides (in elements) of one tensor; see `tensor_layout`."""

    dtype: str
    axis_order: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def scalar_bytes(self) -> int:
        return SCALAR_BYTES[self.dtype]

    @property
    def total_bytes(self) -> int:
        return math.prod(self.shape) * self.scalar_bytes

    @property
    def interleaved(self) -> bool:
        """Whether the tensor holds K and V."""
        return KV_AXIS in self.axis_order

    def check(self, name: str, dims: dict[str, int]) -> None:
        """Raises: what `tensor_layout` raises, StridesDoNotFollowAxes."""
        derived = tensor_layout(self.dtype, self.axis_order, dims)
        if self.shape != derived.shape:
            raise StridesDoNotFollowAxes(f"{name}.shape", self.shape, derived.shape)
        if self.strides != derived.strides:
            raise StridesDoNotFollowAxes(f"{name}.strides", self.strides, derived.strides)

    def coordinate(self, position: dict[str, int]) -> tuple[int, ...]:
        """`position` (by base axis, and "kv" where there is one) in the order of the axes."""
        return tuple(_part(axis, position) for axis in self.axis_order)

    def offset(self, position: dict[str, int]) -> int:
        """Elements from the tensor's first one."""
        return sum(at * stride for at, stride in zip(self.coordinate(position), self.strides, strict=True))

    def offsets(self, position: dict[str, Array]) -> Array:
        """`offset` of every entry; int64 arrays of one length."""
        total = np.zeros(len(next(iter(position.values()))), dtype=np.int64)
        for axis, stride in zip(self.axis_order, self.strides, strict=True):
            total += _part(axis, position) * np.int64(stride)
        return total


def tensor_layout(dtype: str, axis_order: tuple[str, ...], dims: dict[str, int]) -> TensorLayout:
    """The row-major layout of these axes; `dims` gives the size of each base axis.

    Raises: UnknownDtype, UnknownAxis, DuplicateAxis, MissingAxis.
    """
    if dtype not in SCALAR_BYTES:
        raise UnknownDtype(dtype, tuple(SCALAR_BYTES))
    _check_axes(axis_order, dims)
    shape = tuple(_size(axis, dims) for axis in axis_order)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorLayout(dtype, axis_order, shape, strides)


def _split(axis: str) -> tuple[str, str, int]:
    """Base axis, part ("" for all of it, "/" outer, "%" inner), tile."""
    for part in "/%":
        base, found, tile = axis.partition(part)
        if found:
            return base, part, int(tile) if tile.isdecimal() else 0
    return axis, "", 0


def _check_axes(axis_order: tuple[str, ...], dims: dict[str, int]) -> None:
    tiles: dict[str, set[int]] = {}
    parts: dict[str, list[str]] = {}
    for axis in axis_order:
        base, part, tile = _split(axis)
        if (base not in BASE_AXES and axis != KV_AXIS) or (part and (tile < 1 or dims[base] % tile)):
            raise UnknownAxis(axis, axis_order)
        if part in parts.setdefault(base, []) or (parts[base] and "" in (part, *parts[base])):
            raise DuplicateAxis(axis, axis_order)
        parts[base].append(part)
        tiles.setdefault(base, set()).add(tile)
    for base in BASE_AXES:
        found = parts.get(base, [])
        if found not in ([""], ["/", "%"], ["%", "/"]):
            raise MissingAxis(base + {"/": "%", "%": "/"}.get("".join(found), ""), axis_order)
        if len(tiles[base]) > 1:
            raise UnknownAxis(base, axis_order)


def _size(axis: str, dims: dict[str, int]) -> int:
    base, part, tile = _split(axis)
    if axis == KV_AXIS:
        return 2
    return {"": dims[base], "/": dims[base] // max(tile, 1), "%": tile}[part]


def _part(axis: str, position: dict[str, Any]) -> Any:
    base, part, tile = _split(axis)
    at = position[base]
    if part == "/":
        return at // tile
    return at % tile if part else at
