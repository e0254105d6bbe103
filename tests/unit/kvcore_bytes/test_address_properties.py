"""Permuted and tiled axes against numpy, scalar against vectorised, and which of two faults is told."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore.address_errors import (
    AddressRangeOverflow,
    CrossGroupBundleMismatch,
    OverlappingTensorRanges,
    TableLengthDrift,
)
from copyhold.kvcore.addresses import Coordinate, View, translate, translate_many
from copyhold.kvcore.axes import BASE_AXES, tensor_layout
from copyhold.kvcore.contract_errors import ContractRefusal
from copyhold.kvcore.descriptors import DescriptorTable
from copyhold.kvcore.manifest_errors import (
    DuplicateAxis,
    MissingAxis,
    StrideLayoutMismatch,
    StridesDoNotFollowAxes,
    UnknownAxis,
)
from copyhold.kvcore.placement import place
from copyhold.kvcore.snapshots import RequestSnapshot, snapshot

DIMS = {"layer": 2, "slot": 3, "token": 16, "kv_head": 3, "lane": 8}
TILED = (
    ("layer", "slot", "token/8", "kv_head", "lane", "token%8"),
    ("slot", "kv_head", "lane/4", "token", "layer", "lane%4"),
    ("token%4", "layer", "lane%2", "slot", "lane/2", "kv_head", "token/4"),
)
INTERLEAVED = (
    ("layer", "kv", "slot", "token", "kv_head", "lane"),
    ("slot", "layer", "token", "kv_head", "lane", "kv"),
)


def _positions(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    found = {axis: rng.integers(0, size, count) for axis, size in DIMS.items()}
    return {**found, "kv": rng.integers(0, 2, count)}


@pytest.mark.parametrize("order", list(permutations(BASE_AXES)))
def test_strides_of_permuted_axes_are_numpys(order: tuple[str, ...]) -> None:
    layout = tensor_layout("float32", order, DIMS)
    array = np.empty(layout.shape, dtype=np.float32)
    assert tuple(stride // 4 for stride in array.strides) == layout.strides
    assert layout.total_bytes == array.nbytes


@pytest.mark.parametrize("order", [*TILED, *INTERLEAVED, BASE_AXES])
def test_every_scalar_has_a_place_of_its_own(order: tuple[str, ...], seeded: np.random.Generator) -> None:
    layout = tensor_layout("float32", order, DIMS)
    axes = [*BASE_AXES, *(["kv"] if layout.interleaved else [])]
    sizes = [{**DIMS, "kv": 2}[axis] for axis in axes]
    grid = np.indices(sizes).reshape(len(axes), -1)
    offsets = layout.offsets(dict(zip(axes, grid, strict=True)))
    assert np.array_equal(np.sort(offsets), np.arange(layout.total_bytes // 4))
    positions = _positions(seeded, 50)
    scalar = [layout.offset({axis: int(values[i]) for axis, values in positions.items()}) for i in range(50)]
    assert layout.offsets(positions).tolist() == scalar
    memory = np.arange(layout.total_bytes // 4).reshape(layout.shape)
    for i in range(50):
        at = layout.coordinate({axis: int(values[i]) for axis, values in positions.items()})
        assert memory[at] == scalar[i]


def test_tiled_keys_lie_as_the_kernels_pool_keeps_them(seeded: np.random.Generator) -> None:
    """K [layers, tiles, kv_heads, head_dim, 16], where block a is the tiles [2a, 2a + 2)."""
    dims = {**DIMS, "token": 32}
    layout = tensor_layout("float32", ("layer", "slot", "token/16", "kv_head", "lane", "token%16"), dims)
    pool = np.arange(layout.total_bytes // 4).reshape(2, 3 * 2, 3, 8, 16)
    for layer, slot, token, head, lane in seeded.integers(0, [2, 3, 32, 3, 8], (40, 5)).tolist():
        position = {"layer": layer, "slot": slot, "token": token, "kv_head": head, "lane": lane}
        assert pool[layer, 2 * slot + token // 16, head, lane, token % 16] == layout.offset(position)


@pytest.mark.parametrize(
    ("order", "kind"),
    [
        ((*BASE_AXES, "lane"), DuplicateAxis),
        ((*BASE_AXES, "lane%4"), DuplicateAxis),
        (BASE_AXES[:-1], MissingAxis),
        ((*BASE_AXES[:-1], "lane/4"), MissingAxis),
        ((*BASE_AXES[:-1], "lane%4"), MissingAxis),
        ((*BASE_AXES[:-1], "lane/4", "lane%2"), UnknownAxis),
        ((*BASE_AXES[:-1], "lane/3", "lane%3"), UnknownAxis),
        ((*BASE_AXES[:-1], "lane/x", "lane%x"), UnknownAxis),
        ((*BASE_AXES, "page"), UnknownAxis),
        ((*BASE_AXES, "kv", "kv"), DuplicateAxis),
        ((*BASE_AXES, "kv/2"), UnknownAxis),
        ((), MissingAxis),
    ],
)
def test_axis_orders_that_mean_nothing_are_refused(order: tuple[str, ...], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        tensor_layout("float32", order, DIMS)


def test_declared_shapes_and_strides_must_follow_the_axes(make_group: Any) -> None:
    group = make_group()
    for field in ("shape", "strides"):
        declared = getattr(group.keys, field)
        for wrong in ((*declared[:-1], 7), declared[:-1]):
            with pytest.raises(StridesDoNotFollowAxes):
                keys = msgspec.structs.replace(group.keys, **{field: wrong})
                msgspec.structs.replace(group, keys=keys)
    axes = INTERLEAVED[0]
    with pytest.raises(StrideLayoutMismatch):
        make_group(axes=(axes, BASE_AXES))


class Two:
    """Groups of block sizes 16 and 32 with different axes; K and V of the second share one tensor."""

    def __init__(self, make_group: Any, seeded: np.random.Generator) -> None:
        one = make_group("g0", (0, 2), 16, 9, 2, 8, axes=(TILED[0], BASE_AXES))
        two = make_group("g1", (1, 3, 4), 32, 5, 3, 16, axes=(INTERLEAVED[0], INTERLEAVED[0]))
        middle = 4096 + one.keys.total_bytes
        end = middle + one.values.total_bytes
        self.manifest = place([one, two], [(middle, 4096), (end, end)])
        blocks = [seeded.choice(1000, size, replace=False) for size in (9, 5)]
        slots = [seeded.permutation(size) for size in (9, 5)]
        full = [np.full(9, 16), np.full(5, 32)]
        self.context = 70
        self.tables = [blocks[0][:5], blocks[1][:3]]
        full[1][2] = 70 - 64
        full[0][4] = 70 - 64
        self.descriptors = tuple(
            DescriptorTable(name, 3, size, *columns)
            for name, size, *columns in zip(("g0", "g1"), (16, 32), blocks, slots, full, strict=True)
        )
        held = snapshot(self.manifest, self.context, self.tables, [1, 1], [3, 3])
        self.view = View(self.manifest, self.descriptors, held, 1)


def test_vectorised_equals_scalar_over_groups_of_different_block_size(
    make_group: Any, seeded: np.random.Generator
) -> None:
    two = Two(make_group, seeded)
    count = 300
    tokens, layers = seeded.integers(0, two.context, count), seeded.integers(0, 5, count)
    kinds = ["KV"[kind] for kind in seeded.integers(0, 2, count)]
    heads, lanes = seeded.integers(0, 2, count), seeded.integers(0, 8, count)
    many = translate_many(two.view, tokens, layers, kinds, heads, lanes)
    for i in range(count):
        one = translate(
            two.view, Coordinate(int(tokens[i]), int(layers[i]), kinds[i], int(heads[i]), int(lanes[i]))
        )
        assert two.manifest.groups[many.groups[i]].layout.name == one.group
        assert (many.blocks[i], many.slot_ids[i]) == (one.block, one.slot_id.value)
        assert many.element_offsets[i] == one.element_offset.value
        assert many.byte_addresses[i] == one.byte_address.value
    nothing = translate_many(two.view, [], [], [], [], [])
    assert len(nothing.byte_addresses) == 0


def test_no_two_scalars_of_the_rank_share_a_byte(make_group: Any, seeded: np.random.Generator) -> None:
    two = Two(make_group, seeded)
    scalars = [
        (token, layer, kind, head, lane)
        for layer, heads, width in ((0, 2, 8), (1, 3, 16))
        for kind in "KV"
        for token in range(two.context)
        for head in range(heads)
        for lane in range(width)
    ]
    columns = list(zip(*scalars, strict=True))
    found = translate_many(two.view, *columns).byte_addresses
    assert len(np.unique(found)) == len(scalars) and not (found % 2).any()


FAULTS: tuple[tuple[str, str], ...] = (
    ("token", "outside_request_context"),
    ("layer", "layer_gap"),
    ("version", "stale_table_version"),
    ("table", "outside_block_table"),
    ("block", "unknown_physical_block"),
    ("pool", "stale_pool_generation"),
    ("rows", "row_not_materialised"),
    ("head", "head_out_of_range"),
    ("lane", "lane_out_of_range"),
    ("slot", "address_outside_tensor"),
)


def _attempt(make_group: Any, faults: set[str]) -> tuple[View, Coordinate]:
    group = make_group("g", (0, 1), 16, 4, 2, 8)
    manifest = place([group], [(0, group.keys.total_bytes)])
    slot, rows = 4 if "slot" in faults else 2, 5 if "rows" in faults else 16
    ids = [50] if "block" in faults else [51]
    descriptors = (DescriptorTable("g", 3, 16, ids, [slot], [rows]),)
    table = np.array([] if "table" in faults else [51], dtype=np.int64)
    held = RequestSnapshot(16, 1, (table,), (2 if "pool" in faults else 3,))
    view = View(manifest, descriptors, held, 2 if "version" in faults else 1)
    token, layer = 16 if "token" in faults else 5, 7 if "layer" in faults else 0
    return view, Coordinate(token, layer, "K", 2 if "head" in faults else 1, -1 if "lane" in faults else 7)


def test_of_two_faults_the_earlier_is_told_by_both_forms(make_group: Any) -> None:
    view, at = _attempt(make_group, set())
    translate(view, at)
    for i, (first, reason) in enumerate(FAULTS):
        for second, _ in FAULTS[i:]:
            view, at = _attempt(make_group, {first, second})
            with pytest.raises(ContractRefusal) as one:
                translate(view, at)
            good_then_bad = ([at.token], [at.layer], [at.kind], [at.head], [at.lane])
            with pytest.raises(ContractRefusal) as many:
                translate_many(view, *good_then_bad)
            assert one.value.reason == many.value.reason == reason, (first, second)
            assert str(one.value) == str(many.value)


def test_the_first_refused_entry_names_the_reason(make_group: Any) -> None:
    view, at = _attempt(make_group, set())
    tokens, heads = [5, 5, 99, 5], [1, 9, 1, 9]
    with pytest.raises(ContractRefusal) as caught:
        translate_many(view, tokens, [0] * 4, ["K", "V"] * 2, heads, [at.lane] * 4)
    assert (caught.value.reason, vars(caught.value)["head"]) == ("head_out_of_range", 9)


def test_overlapping_and_endless_tensors_are_refused_when_they_are_placed(example: Any) -> None:
    layouts = [example.g0, example.g1]
    (k0, v0), (k1, v1) = example.bases
    place(layouts, [(k0, v0), (k1, v1)])
    inside = example.g1.keys.total_bytes - 1
    for bases in (
        [(k0, v0), (k1, k1)],
        [(k0, v0), (k1, k1 + inside)],
        [(k0, k0 + 1), (k1, v1)],
        [(k1 + 8, v0), (k1, v1)],
    ):
        with pytest.raises(OverlappingTensorRanges):
            place(layouts, bases)
    with pytest.raises(AddressRangeOverflow):
        place(layouts, [(k0, v0), (2**63 - 8, v1)])


def test_tables_must_be_as_long_as_the_context_of_one_version(example: Any) -> None:
    manifest = example.manifest
    for tables in ([[1000], [2000, 2001]], [[1000, 1001], [2000, 2001, 2002]]):
        with pytest.raises(TableLengthDrift):
            snapshot(manifest, 25, tables, [5, 5], [7, 7])
    good = [[1000, 1001], [2000, 2001]]
    for tables, versions in ((good, [5, 6]), (good[:1], [5, 5]), (good, [5])):
        with pytest.raises(CrossGroupBundleMismatch):
            snapshot(manifest, 25, tables, versions, [7, 7])
