"""The worked example of the byte and address chapters: facts by id, a two-group rank, its placement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.addresses import View
from copyhold.kvcore.axes import tensor_layout
from copyhold.kvcore.descriptors import DescriptorTable
from copyhold.kvcore.manifests import CacheGroupManifest, GroupLayout, RankLayout, WorldManifest, world_digest
from copyhold.kvcore.placement import AddressManifest, place
from copyhold.kvcore.snapshots import snapshot

AXES = ("layer", "slot", "token", "kv_head", "lane")
_FACTS = json.loads((Path(__file__).parents[2] / "data" / "fixtures.json").read_text("utf-8"))["fixtures"]


def group_layout(
    name: str = "g1",
    layers: tuple[int, ...] = tuple(range(24, 32)),
    block_size: int = 16,
    num_slots: int = 8,
    kv_heads: int = 4,
    head_dim: int = 128,
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16"),
    axes: tuple[tuple[str, ...], tuple[str, ...]] = (AXES, AXES),
) -> GroupLayout:
    dims = {
        "layer": len(layers),
        "slot": num_slots,
        "token": block_size,
        "kv_head": kv_heads,
        "lane": head_dim,
    }
    keys, values = (tensor_layout(dtype, order, dims) for dtype, order in zip(dtypes, axes, strict=True))
    return GroupLayout(name, layers, block_size, num_slots, kv_heads, head_dim, keys, values)


class Example:
    """Two groups of one rank: g0 layers [0, 24), g1 layers [24, 32); pool generation 7; blocks of request A."""

    k_base = 4311744512

    def __init__(self) -> None:
        self.g0 = group_layout("g0", tuple(range(24)))
        self.g1 = group_layout()
        behind = self.k_base + self.g1.keys.total_bytes
        v_end = behind + self.g1.values.total_bytes
        self.bases = [(v_end, v_end + self.g0.keys.total_bytes), (self.k_base, behind)]
        self.manifest: AddressManifest = place([self.g0, self.g1], self.bases)

    def descriptors(self, rows: int = 16) -> tuple[DescriptorTable, DescriptorTable]:
        return (
            DescriptorTable("g0", 7, 16, [1000, 1001, 1002, 1003], [2, 3, 1, 0], [16, rows, 1, 16]),
            DescriptorTable("g1", 7, 16, [2000, 2001, 2002, 2003], [5, 6, 2, 4], [16, rows, 1, 16]),
        )

    def view(self, context: int, rows: int = 16, version: int = 5, current: int = 5) -> View:
        count = -(-context // 16)
        tables = [[1000, 1001, 1002][:count], [2000, 2001, 2002][:count]]
        held = snapshot(self.manifest, context, tables, [version, version], [7, 7])
        return View(self.manifest, self.descriptors(rows), held, current)


def worlds() -> tuple[WorldManifest, RankLayout]:
    """A world of 32 layers over two ranks, and rank 0 of it."""
    groups = (
        CacheGroupManifest("g0", tuple(range(24)), 16, 8, 128, 0),
        CacheGroupManifest("g1", tuple(range(24, 32)), 16, 8, 128, 4096),
    )
    world = WorldManifest(
        model_digest=b"m" * 32,
        model_revision="r1",
        adapter_digest=b"",
        cache_abi="llama.v1",
        groups=groups,
        position_contract="rope.1e5",
        quantization="bfloat16",
        tp_degree=2,
        kv_head_partition=(4, 4),
        num_layers=32,
    )
    layouts = (group_layout("g0", tuple(range(24))), group_layout())
    return world, RankLayout(world_digest(world), 0, 2, layouts, "paged_blocks", 16, 16, "r1")


@pytest.fixture(scope="session")
def facts() -> dict[str, Any]:
    """Worked figures by id."""
    return {fact["id"]: fact for fact in _FACTS}


@pytest.fixture
def example() -> Example:
    return Example()


@pytest.fixture
def make_group() -> Any:
    return group_layout


@pytest.fixture
def world() -> WorldManifest:
    return worlds()[0]


@pytest.fixture
def layout() -> RankLayout:
    return worlds()[1]


@pytest.fixture
def seeded() -> np.random.Generator:
    return np.random.default_rng(20)
