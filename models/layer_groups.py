"""Owns the division of a model's layers among cache groups: which layers share a table, in blocks of which size.

Invariant: every layer of the model is in exactly one group (checked where pools are made, K004). A group here is full
attention over all its rows; no model here has layers with a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers that are read through one block table."""

    name: str
    layers: tuple[int, ...]
    block_size: int


def one_group(num_layers: int, block_size: int, name: str = "full") -> tuple[LayerGroup, ...]:
    """All layers through one table."""
    return (LayerGroup(name, tuple(range(num_layers)), block_size),)


def divided(num_layers: int, block_sizes: Sequence[int]) -> tuple[LayerGroup, ...]:
    """Runs of layers, as equal as can be, one a block size; the first is named as a single group is, the others after
    their size."""
    ends = [num_layers * (number + 1) // len(block_sizes) for number in range(len(block_sizes))]
    starts = [0, *ends[:-1]]
    names = ["full", *(f"full-{size}-{number}" for number, size in enumerate(block_sizes[1:], start=1))]
    return tuple(
        LayerGroup(name, tuple(range(start, end)), size)
        for name, start, end, size in zip(names, starts, ends, block_sizes, strict=True)
    )
