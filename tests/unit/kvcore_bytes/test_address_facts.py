"""Worked addresses: strides, one full translation, sharing, growth over a block boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.address_errors import (
    FrozenAddressChanged,
    RowNotMaterialised,
    SlotIdUsedAsAddress,
    StaleTableVersion,
    TokenOutsideContext,
)
from copyhold.kvcore.addresses import Coordinate, View, require_address, translate
from copyhold.kvcore.axes import tensor_layout
from copyhold.kvcore.byte_ledger import group_row, row_bytes
from copyhold.kvcore.descriptors import DescriptorTable
from copyhold.kvcore.quantities import ByteAddress, ElementOffset, SlotId
from copyhold.kvcore.snapshots import check_growth, snapshot

AXES = ("layer", "slot", "token", "kv_head", "lane")


def test_f030_strides(facts: dict[str, Any]) -> None:
    given = facts["F030"]["inputs"]
    dims: dict[str, int] = dict(zip(AXES, given["shape"], strict=True))
    layout = tensor_layout("bfloat16", AXES, dims)
    assert list(layout.strides) == facts["F030"]["expected"]["strides"]
    assert list(layout.shape) == given["shape"]


def test_f031_f032_one_complete_address(facts: dict[str, Any], example: Any) -> None:
    given, expected = facts["F031"]["inputs"], facts["F031"]["expected"]
    at = Coordinate(given["token"], given["layer"], given["kind"], given["head"], given["lane"])
    found = translate(example.view(33), at)
    assert example.g1.keys.shape == tuple(given["shape"]) and example.k_base == given["k_base"]
    assert (found.group, found.layer_local) == (expected["group"], expected["layer_local"])
    assert (found.logical_block, found.token_offset) == (expected["logical_block"], expected["token_offset"])
    assert (found.block, found.slot) == (expected["physical_block"], given["descriptor"]["physical_slot"])
    assert found.slot_id == SlotId(expected["slot_id"])
    assert list(found.coordinate) == expected["coordinate"]
    assert found.element_offset == ElementOffset(expected["element_offset"])
    assert found.byte_offset.value == expected["byte_offset"]
    assert found.byte_address == ByteAddress(expected["byte_address"])
    tensor = example.manifest.groups[1].keys
    assert require_address(tensor, found.byte_address) == facts["F032"]["expected"]["byte_address"]
    with pytest.raises(SlotIdUsedAsAddress):
        require_address(tensor, found.slot_id)  # type: ignore[arg-type]
    assert (found.slot_id == found.byte_address) is facts["F032"]["expected"]["equal"]


def test_f033_f034_ranges(facts: dict[str, Any], example: Any) -> None:
    expected, tensor = facts["F033"]["expected"], example.manifest.groups[1].keys
    assert (tensor.begin, tensor.end) == (expected["begin"], expected["end"])
    assert tensor.end - tensor.layout.scalar_bytes == expected["last_scalar_address"]
    row = row_bytes(group_row(example.g1)).value
    assert row == facts["F034"]["inputs"]["g1_row_bytes"]
    both = example.g1.keys.total_bytes + example.g1.values.total_bytes
    assert both == facts["F034"]["expected"]["bytes"] == example.g1.num_slots * example.g1.block_size * row


def test_f035_f036_a_shorter_sharer_sees_less_than_the_block_holds(
    facts: dict[str, Any], example: Any
) -> None:
    expected = facts["F036"]["expected"]
    view = example.view(facts["F035"]["inputs"]["context_length"])
    found = translate(view, Coordinate(24, 24, "K", 1, 5))
    assert (found.logical_block, found.token_offset) == (1, 8)
    assert found.slot_id.value == expected["slot_id"]
    assert found.element_offset.value == expected["element_offset"]
    assert found.byte_address.value == expected["byte_address"]
    with pytest.raises(TokenOutsideContext):
        translate(view, Coordinate(25, 24, "K", 1, 5))


def test_f037_a_visible_row_that_is_not_committed(facts: dict[str, Any], example: Any) -> None:
    given = facts["F037"]["inputs"]
    view = example.view(given["context_length"], rows=given["valid_rows"])
    with pytest.raises(RowNotMaterialised):
        translate(view, Coordinate(given["token"], 24, "K", 1, 5))


def test_f038_a_new_block_is_reached_through_the_successor_alone(facts: dict[str, Any], example: Any) -> None:
    given, expected = facts["F038"]["inputs"], facts["F038"]["expected"]
    old_version, new_version = given["table_version_before"], expected["table_version_after"]
    manifest, descriptors = example.manifest, example.descriptors()
    before = snapshot(manifest, 16, [[1000], [2000]], [old_version] * 2, [7, 7])
    after = snapshot(manifest, 17, [[1000, 1003], [2000, 2003]], [new_version] * 2, [7, 7])
    check_growth(manifest, (before, descriptors), (after, descriptors))
    token, at = given["token"], Coordinate(given["token"], 24, "K", 0, 0)
    with pytest.raises(TokenOutsideContext):
        translate(View(manifest, descriptors, before, new_version), at)
    with pytest.raises(StaleTableVersion):
        translate(View(manifest, descriptors, before, new_version), Coordinate(3, 24, "K", 0, 0))
    current = View(manifest, descriptors, after, new_version)
    for layer, group in ((0, "g0"), (24, "g1")):
        found = translate(current, Coordinate(token, layer, "K", 0, 0))
        assert found.slot_id.value == expected["slot_id"][group]
        assert (found.logical_block, found.token_offset) == (1, 0)
        early = Coordinate(3, layer, "V", 2, 7)
        earlier = translate(View(manifest, descriptors, before, old_version), early)
        assert translate(current, early) == earlier


def test_growth_that_moves_a_row_or_does_not_rise_is_refused(example: Any) -> None:
    manifest, descriptors = example.manifest, example.descriptors()
    before = snapshot(manifest, 16, [[1000], [2000]], [2, 2], [7, 7])
    moved = snapshot(manifest, 17, [[1000, 1003], [2003, 2001]], [3, 3], [7, 7])
    with pytest.raises(FrozenAddressChanged) as caught:
        check_growth(manifest, (before, descriptors), (moved, descriptors))
    assert (caught.value.group, caught.value.before, caught.value.after) == ("g1", 5, 4)
    with pytest.raises(StaleTableVersion):
        check_growth(manifest, (before, descriptors), (before, descriptors))
    last = [DescriptorTable("g0", 7, 16, [1003], [2], [16]), descriptors[1]]
    with pytest.raises(FrozenAddressChanged):
        grown = snapshot(manifest, 17, [[1000, 1003], [2000, 2003]], [3, 3], [7, 7])
        check_growth(manifest, (before, descriptors), (grown, last))
    shorter = snapshot(manifest, 15, [[1000], [2000]], [3, 3], [7, 7])
    with pytest.raises(TokenOutsideContext):
        check_growth(manifest, (before, descriptors), (shorter, descriptors))


def test_one_number_names_different_bytes_in_two_groups(make_group: Any) -> None:
    from copyhold.kvcore.placement import place

    one, two = make_group("g0", (0,)), make_group("g1", (1,))
    size = one.keys.total_bytes
    manifest = place([one, two], [(0, size), (2 * size, 3 * size)])
    descriptors = tuple(DescriptorTable(name, 1, 16, [5], [5], [16]) for name in ("g0", "g1"))
    view = View(manifest, descriptors, snapshot(manifest, 1, [[5], [5]], [1, 1], [1, 1]), 1)
    first, second = (translate(view, Coordinate(0, layer, "K", 0, 0)) for layer in (0, 1))
    assert first.block == second.block and first.slot_id == second.slot_id
    assert first.byte_address != second.byte_address


def test_order_of_physical_blocks_does_not_change_the_order_of_rows(example: Any) -> None:
    """Rows written through any permutation of blocks are read back in logical order."""
    memory = np.zeros(example.manifest.groups[1].keys.end - example.k_base, dtype=np.uint8)
    for blocks in ([2000, 2001, 2003], [2003, 2000, 2001], [2001, 2003, 2000]):
        tables = [[1000, 1001, 1003], blocks]
        view = View(
            example.manifest,
            example.descriptors(),
            snapshot(example.manifest, 48, tables, [5, 5], [7, 7]),
            5,
        )
        places = [
            translate(view, Coordinate(token, 30, "K", 3, 9)).byte_address.value - example.k_base
            for token in range(48)
        ]
        memory[places] = np.arange(48)
        assert memory[places].tolist() == list(range(48))
