"""World and rank identities, keyed prefix chains."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore.axes import tensor_layout
from copyhold.kvcore.identity import (
    CacheGroupManifest,
    GroupLayout,
    RankLayout,
    WorldManifest,
    chain_digests,
    rank_layout_digest,
    world_digest,
)

GROUP = CacheGroupManifest("full", tuple(range(4)), 16, 3, 64, 0)
WORLD = WorldManifest(
    model_digest=b"m" * 32,
    model_revision="r1",
    adapter_digest=b"",
    cache_abi="llama.v1",
    groups=(GROUP,),
    position_contract="rope.1e5",
    quantization="none.f32",
    tp_degree=2,
    kv_head_partition=(2, 1),
    num_layers=4,
)
DIMS = {"layer": 4, "slot": 8, "token": 16, "kv_head": 2, "lane": 64}
AXES = ("layer", "slot", "token", "kv_head", "lane")


def _layout(axes: tuple[str, ...] = AXES) -> RankLayout:
    tensor = tensor_layout("float32", axes, DIMS)
    group = GroupLayout("full", tuple(range(4)), 16, 8, 2, 64, tensor, tensor)
    return RankLayout(world_digest(WORLD), 0, 2, (group,), "paged_blocks", 16, 16, "r1")


LAYOUT = _layout()

# F0C0: the factors that this build's manifests cover; media and prompt embeddings are not accepted yet.
REJECTED: dict[str, dict[str, Any]] = {
    "adapter": {"adapter_digest": b"a" * 32},
    "position_contract": {"position_contract": "rope.1e6"},
    "tp_rank_or_cache_group": {"groups": (msgspec.structs.replace(GROUP, block_size=32),)},
    "storage_dtype_or_quantisation": {"quantization": "int8"},
}


@pytest.mark.parametrize("factor", sorted(REJECTED))
def test_one_changed_factor_is_another_world(factor: str) -> None:
    changed = msgspec.structs.replace(WORLD, **REJECTED[factor])
    assert world_digest(changed) != world_digest(WORLD)


def test_provenance_is_no_part_of_a_world() -> None:
    labels = {"request_id", "sampling_policy", "stop_strings", "tokenizer_label", "chat_template_label"}
    assert not labels & set(WorldManifest.__struct_fields__)


def _mutations(value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name in value.__struct_fields__:
        old = getattr(value, name)
        if isinstance(old, bytes):
            changed[name] = old + b"x"
        elif isinstance(old, str):
            changed[name] = old + "x"
        elif isinstance(old, int):
            changed[name] = old + 1
    return changed


@pytest.mark.parametrize("field", sorted(set(_mutations(WORLD)) - {"tp_degree", "num_layers"}))
def test_every_world_field_changes_the_digest(field: str) -> None:
    changed = msgspec.structs.replace(WORLD, **{field: _mutations(WORLD)[field]})
    assert world_digest(changed) != world_digest(WORLD) == world_digest(msgspec.structs.replace(WORLD))


@pytest.mark.parametrize("field", sorted(set(_mutations(GROUP)) - {"kv_heads"}))
def test_every_group_field_changes_the_digest(field: str) -> None:
    group = msgspec.structs.replace(GROUP, **{field: _mutations(GROUP)[field]})
    assert world_digest(msgspec.structs.replace(WORLD, groups=(group,))) != world_digest(WORLD)


def test_partition_of_heads_and_degree_are_part_of_the_world() -> None:
    digests = {
        world_digest(msgspec.structs.replace(WORLD, tp_degree=len(parts), kv_head_partition=parts))
        for parts in [(2, 1), (1, 2), (3,), (1, 1, 1)]
    }
    assert len(digests) == 4


@pytest.mark.parametrize("field", sorted(_mutations(LAYOUT)))
def test_every_layout_field_changes_the_digest(field: str) -> None:
    changed = msgspec.structs.replace(LAYOUT, **{field: _mutations(LAYOUT)[field]})
    assert rank_layout_digest(changed) != rank_layout_digest(LAYOUT)


def test_axis_order_and_strides_change_the_layout_digest() -> None:
    orders = (AXES, ("slot", "layer", "token", "kv_head", "lane"), (*AXES[:2], "kv_head", "lane", "token"))
    assert len({rank_layout_digest(_layout(axes)) for axes in orders}) == 3


def test_fields_cannot_borrow_bytes_from_each_other() -> None:
    one = msgspec.structs.replace(WORLD, model_revision="ab", cache_abi="c")
    two = msgspec.structs.replace(WORLD, model_revision="a", cache_abi="bc")
    assert world_digest(one) != world_digest(two)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp_degree": 3}, "tp_rank_mismatch"),
        ({"model_digest": b""}, "missing_logical_abi"),
        ({"groups": (GROUP, msgspec.structs.replace(GROUP, name="again"))}, "layer_in_two_groups"),
        ({"groups": (msgspec.structs.replace(GROUP, layers=(0, 2)),)}, "layer_gap"),
    ],
)
def test_contradicting_worlds_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        world_digest(msgspec.structs.replace(WORLD, **changes))


def test_doubled_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="duplicate_axis"):
        _layout((*AXES, "lane"))


def test_frozen_manifest_cannot_be_edited() -> None:
    with pytest.raises(AttributeError):
        WORLD.model_revision = "r2"  # type: ignore[misc]


def test_chain_changes_from_the_changed_page_on() -> None:
    tokens = np.arange(48, dtype=np.int32)
    changed = tokens.copy()
    changed[37] = 999
    base, other = chain_digests(b"key", tokens, 16), chain_digests(b"key", changed, 16)
    assert [a == b for a, b in zip(base, other, strict=True)] == [True, True, False]
    assert len(base[0]) == 32


def test_another_key_changes_every_link() -> None:
    tokens = np.arange(48, dtype=np.int32)
    base, other = chain_digests(b"key", tokens, 16), chain_digests(b"other", tokens, 16)
    assert not set(base) & set(other)


def test_short_tail_has_no_digest_and_a_key_is_required() -> None:
    assert len(chain_digests(b"key", np.arange(50, dtype=np.int32), 16)) == 3
    assert chain_digests(b"key", np.arange(255, dtype=np.int32)) == ()
    with pytest.raises(ValueError, match="weak_salt"):
        chain_digests(b"", np.arange(50, dtype=np.int32))
    with pytest.raises(ValueError, match="every"):
        chain_digests(b"key", np.arange(50, dtype=np.int32), 0)


def test_chains_of_different_spacing_never_meet() -> None:
    tokens = np.arange(64, dtype=np.int32)
    assert not set(chain_digests(b"key", tokens, 16)) & set(chain_digests(b"key", tokens, 32))
