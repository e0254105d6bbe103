"""Manifests: every field has one reason, faults come in one order, successors are new identities."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from copyhold.kvcore.manifest_errors import (
    BlockReinterpreted,
    LayerGap,
    LayerInTwoGroups,
    ManifestMismatch,
    ManifestUnchanged,
    PartitionContradiction,
)
from copyhold.kvcore.manifests import (
    LAYOUT_REASONS,
    WORLD_REASONS,
    RankLayout,
    WorldManifest,
    check_layer_coverage,
    check_rank_layout,
    layout_faults,
    rank_layout_digest,
    require_same_layout,
    require_same_reading,
    require_same_world,
    successor,
    world_digest,
    world_faults,
)

replace = msgspec.structs.replace


def _other_worlds(world: WorldManifest) -> dict[str, dict[str, Any]]:
    """A change of each field alone, or with what must change beside it to stay consistent."""
    first, second = world.groups
    return {
        "schema_version": {"schema_version": 9},
        "cache_abi": {"cache_abi": "other"},
        "model_digest": {"model_digest": b"n" * 32},
        "model_revision": {"model_revision": "r2"},
        "model_generation": {"model_generation": 1},
        "adapter_digest": {"adapter_digest": b"a"},
        "weight_transform": {"weight_transform": "hadamard"},
        "position_contract": {"position_contract": "rope.1e6"},
        "num_layers": {"num_layers": 33, "groups": (first, replace(second, layers=tuple(range(24, 33))))},
        "groups": {"groups": (first, replace(second, window=1024))},
        "quantization": {"quantization": "int8"},
        "tp_degree": {"tp_degree": 4, "kv_head_partition": (2, 2, 2, 2)},
        "kv_head_partition": {"kv_head_partition": (5, 3)},
    }


def test_every_field_of_a_world_has_a_reason_and_a_change(world: WorldManifest) -> None:
    assert set(WORLD_REASONS) == set(world.__struct_fields__) == set(_other_worlds(world))


@pytest.mark.parametrize("field", WORLD_REASONS)
def test_a_changed_world_field_gives_its_reason_and_another_digest(world: WorldManifest, field: str) -> None:
    changes = _other_worlds(world)[field]
    other = replace(world, **changes)
    assert world_digest(other) != world_digest(world)
    with pytest.raises(ManifestMismatch) as caught:
        require_same_world(world, other)
    assert caught.value.reason == WORLD_REASONS[field] == caught.value.faults[0].reason
    assert {fault.field for fault in caught.value.faults} == set(changes)
    require_same_world(world, replace(world))


def test_two_faults_are_reported_in_the_contracted_order(world: WorldManifest) -> None:
    changes = _other_worlds(world)
    fields = [field for field in WORLD_REASONS if len(changes[field]) == 1]
    for i, earlier in enumerate(fields):
        for later in fields[i + 1 :]:
            other = replace(world, **changes[later], **changes[earlier])
            faults = world_faults(world, other)
            assert [fault.field for fault in faults] == [earlier, later]
            assert [fault.reason for fault in faults] == [WORLD_REASONS[earlier], WORLD_REASONS[later]]


def _other_layouts(layout: RankLayout, make_group: Any) -> dict[str, tuple[RankLayout, str]]:
    g0 = layout.groups[0]

    def second(**changes: Any) -> RankLayout:
        return replace(layout, groups=(g0, make_group(**changes)))

    swapped = ("slot", "layer", "token", "kv_head", "lane")
    tiled = ("layer", "slot", "token/8", "kv_head", "lane", "token%8")
    axes = ("layer", "slot", "token", "kv_head", "lane")
    simple = {
        "schema_version": 9,
        "world": b"other",
        "rank": 1,
        "tp_degree": 3,
        "physical_mode": "rectangular",
        "scheduler_block_size": 32,
        "hash_block_size": 32,
        "allocator_revision": "r2",
    }
    changed = {
        field: (replace(layout, **{field: value}), LAYOUT_REASONS[field]) for field, value in simple.items()
    }
    return {
        **changed,
        "groups": (replace(layout, groups=(g0,)), "cache_group_mismatch"),
        "name": (second(name="g2"), "cache_group_mismatch"),
        "layers": (second(layers=tuple(range(24, 31))), "cache_group_mismatch"),
        "block_size": (second(block_size=32), "cache_group_mismatch"),
        "kv_heads": (second(kv_heads=2), "cache_group_mismatch"),
        "head_dim": (second(head_dim=64), "cache_group_mismatch"),
        "num_slots": (second(num_slots=9), "stride_layout_mismatch"),
        "keys.dtype": (second(dtypes=("float16", "bfloat16")), "storage_representation_mismatch"),
        "values.dtype": (second(dtypes=("bfloat16", "int8")), "storage_representation_mismatch"),
        "keys.axis_order": (second(axes=(swapped, axes)), "stride_layout_mismatch"),
        "values.axis_order": (second(axes=(axes, tiled)), "stride_layout_mismatch"),
    }


def test_a_changed_layout_gives_its_reason_and_another_digest(layout: RankLayout, make_group: Any) -> None:
    others = _other_layouts(layout, make_group)
    assert set(layout.__struct_fields__) <= set(others)
    for name, (other, reason) in others.items():
        assert rank_layout_digest(other) != rank_layout_digest(layout), name
        with pytest.raises(ManifestMismatch) as caught:
            require_same_layout(layout, other)
        assert caught.value.reason == reason, name
        assert name in caught.value.faults[0].field
    assert layout_faults(layout, replace(layout)) == ()


def test_a_rank_attaches_with_the_projection_of_its_world_alone(
    world: WorldManifest, layout: RankLayout, make_group: Any
) -> None:
    check_rank_layout(layout, world)
    global_heads = replace(layout, groups=(layout.groups[0], make_group(kv_heads=8)))
    for other, reason in (
        (replace(layout, world=b"other"), "cache_abi_mismatch"),
        (replace(layout, tp_degree=3), "tp_rank_mismatch"),
        (global_heads, "tp_rank_mismatch"),
        (replace(layout, groups=(layout.groups[0], make_group(name="g2"))), "cache_group_mismatch"),
        (replace(layout, groups=(layout.groups[0], make_group(block_size=8))), "cache_group_mismatch"),
    ):
        with pytest.raises(ManifestMismatch) as caught:
            check_rank_layout(other, world)
        assert caught.value.reason == reason


def test_layers_are_a_partition(world: WorldManifest) -> None:
    first, second = world.groups
    for layers, kind in (
        (tuple(range(25, 32)), LayerGap),
        (tuple(range(24, 31)), LayerGap),
        (tuple(range(24, 33)), LayerGap),
        ((*range(23, 32),), LayerInTwoGroups),
        ((*range(24, 32), 31), LayerInTwoGroups),
    ):
        with pytest.raises(kind):
            replace(world, groups=(first, replace(second, layers=layers)))
    with pytest.raises(LayerGap) as caught:
        check_layer_coverage((first, replace(second, layers=(*range(24, 31), 99))), 32)
    assert (caught.value.missing, caught.value.foreign) == ((31,), (99,))


@pytest.mark.parametrize("partition", [(8, 0), (4, 3), (4,), ()])
def test_a_partition_that_contradicts_the_heads_is_refused(world: WorldManifest, partition: Any) -> None:
    with pytest.raises(PartitionContradiction):
        replace(world, kv_head_partition=partition)


def test_a_successor_is_another_world_even_on_the_way_back(world: WorldManifest) -> None:
    there = successor(world, model_digest=b"n" * 32)
    assert there.changed == ("model_digest",) and there.predecessor == world_digest(world)
    back = successor(there.manifest, model_digest=world.model_digest)
    digests = {world_digest(world), there.digest, back.digest}
    assert len(digests) == 3 and back.manifest.model_generation == 2
    require_same_reading(there.digest, world_digest(there.manifest))
    with pytest.raises(BlockReinterpreted):
        require_same_reading(there.predecessor, there.digest)


def test_a_successor_needs_a_change_and_sets_the_generation_itself(world: WorldManifest) -> None:
    for changes in ({}, {"cache_abi": world.cache_abi}, {"model_generation": 7, "cache_abi": "x"}):
        with pytest.raises(ManifestUnchanged):
            successor(world, **changes)
    with pytest.raises(LayerGap):
        successor(world, num_layers=40)


def test_digests_are_stable_across_versions_of_the_code(world: WorldManifest, layout: RankLayout) -> None:
    assert world_digest(world).hex()[:16] == "30b8b1f16458240e"
    assert rank_layout_digest(layout).hex()[:16] == "094281628dd7243c"


def test_a_manifest_read_back_from_its_file_is_the_same(world: WorldManifest, layout: RankLayout) -> None:
    for value in (world, layout):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
    broken = msgspec.json.encode(world).replace(b'"num_layers":32', b'"num_layers":31')
    with pytest.raises(msgspec.ValidationError, match="layer_gap"):
        msgspec.json.decode(broken, type=WorldManifest)
