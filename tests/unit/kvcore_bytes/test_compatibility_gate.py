"""The gate between producer and consumer: one factor at a time, the rows that remain, keys and witnesses."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.kvcore.compatibility import (
    FIELD_REASONS,
    Candidate,
    Compatibility,
    Provenance,
    compatibility_faults,
    concrete_key,
    require_compatible,
    reusable_rows,
    side_input,
    validate,
)
from copyhold.kvcore.manifest_errors import HashCollisionWitness, ManifestMismatch, PositionContractMismatch

replace = msgspec.structs.replace


def _ids(values: Any) -> bytes:
    return np.asarray(values, dtype="<i4").tobytes()


IMAGE = side_input("image", b"digest", 100, 64)
BASE = Compatibility(
    cache_abi=b"abi",
    layout=b"layout",
    model_generation=1,
    adapter=b"",
    weight_transform="none",
    position_contract="rope.1e5",
    tokens=_ids(range(512)),
    side_inputs=(IMAGE,),
    namespace="a",
    namespace_generation=3,
    salt=b"salt",
    publication_generation=1,
)
OTHERS: dict[str, Any] = {
    "cache_abi": b"other",
    "layout": b"other",
    "model_generation": 2,
    "adapter": b"lora",
    "weight_transform": "hadamard",
    "position_contract": "rope.1e6",
    "tokens": _ids([*range(511), 9]),
    "side_inputs": (side_input("image", b"other", 100, 64),),
    "namespace": "b",
    "namespace_generation": 4,
    "salt": b"other",
    "publication_generation": 2,
}


@pytest.mark.parametrize("field", FIELD_REASONS)
def test_each_field_alone_refuses_with_its_reason(field: str) -> None:
    assert set(OTHERS) == set(FIELD_REASONS) == set(BASE.__struct_fields__)
    with pytest.raises(ManifestMismatch) as caught:
        require_compatible(BASE, replace(BASE, **{field: OTHERS[field]}))
    assert caught.value.reason == FIELD_REASONS[field]
    require_compatible(BASE, replace(BASE))


def test_two_faults_report_the_earlier_field_first() -> None:
    order = list(FIELD_REASONS)
    for i, earlier in enumerate(order):
        for later in order[i + 1 :]:
            other = replace(BASE, **{later: OTHERS[later], earlier: OTHERS[earlier]})
            assert [fault.field for fault in compatibility_faults(BASE, other)] == [earlier, later]


def test_f0c0_rejected_factors_and_accepted_labels(facts: dict[str, Any]) -> None:
    changes = {
        "adapter": {"adapter": b"lora"},
        "position_contract": {"position_contract": "rope.1e6"},
        "tp_rank_or_cache_group": {"layout": b"rank 1"},
        "storage_dtype_or_quantisation": {"layout": b"int8"},
        "multimodal_feature": {"side_inputs": (side_input("image", b"other", 100, 64),)},
        "prompt_embedding": {"side_inputs": (IMAGE, side_input("embedding", b"e", 0, 8))},
    }
    for factor, answer in facts["F0C0"]["expected"].items():
        if answer == "reject":
            with pytest.raises(ManifestMismatch):
                require_compatible(BASE, replace(BASE, **changes[factor]))
    labels = {"request_id", "sampling", "stop", "tokenizer", "chat_template"}
    assert labels == set(Provenance.__struct_fields__)
    assert not labels & set(Compatibility.__struct_fields__)


def test_f10f_f110_rows_left_by_one_changed_factor(facts: dict[str, Any]) -> None:
    given, expected = facts["F10F"]["inputs"], facts["F10F"]["expected"]
    tail = reusable_rows(BASE, replace(BASE, tokens=OTHERS["tokens"]), given["P"])
    assert (tail.rows, tail.full_block_rows) == (expected["semantic_prefix"], expected["full_block_prefix"])
    assert tail.reason == "token_mismatch"
    answers = facts["F110"]["expected"]
    for factor, field in (
        ("adapter", "adapter"),
        ("position_scheme", "position_contract"),
        ("model_version", "model_generation"),
        ("tenant", "namespace"),
    ):
        left = reusable_rows(BASE, replace(BASE, **{field: OTHERS[field]}), 16)
        assert left.rows == left.full_block_rows == answers[factor] and left.reason == FIELD_REASONS[field]
    assert reusable_rows(BASE, replace(BASE, layout=b"other"), 16).rows == 0
    assert reusable_rows(BASE, replace(BASE, side_inputs=OTHERS["side_inputs"]), 16).rows == IMAGE.start
    for k in (0, 1, 15, 16, 17, 300):
        changed = [*range(k), 9999, *range(k + 1, 512)]
        left = reusable_rows(BASE, replace(BASE, tokens=_ids(changed)), 16)
        assert (left.rows, left.full_block_rows) == (k, k // 16 * 16)
    assert reusable_rows(BASE, BASE, 16).rows == 512 and reusable_rows(BASE, BASE, 16).reason == ""


def test_a_shifted_image_is_another_input_from_its_earlier_place_on() -> None:
    shifted = replace(BASE, side_inputs=(replace(IMAGE, start=101),))
    left = reusable_rows(BASE, shifted, 16)
    assert (left.rows, left.full_block_rows, left.reason) == (100, 96, "side_input_mismatch")


def test_publication_generation_names_a_world_of_publication() -> None:
    """Published at event 5, consumed at event 9: events are no field, so the two agree."""
    assert "publication_event" not in Compatibility.__struct_fields__
    require_compatible(BASE, replace(BASE))


def test_an_equal_key_does_not_prove_an_equal_position_contract() -> None:
    tokens = np.arange(16)
    key = concrete_key(b"parent", tokens, ("salt", b"x", 3), 0)
    assert key == concrete_key(b"parent", tokens, ("salt", b"x", 3), 0)
    narrower = [
        concrete_key(b"other", tokens, ("salt", b"x", 3), 0),
        concrete_key(b"parent", tokens + 1, ("salt", b"x", 3), 0),
        concrete_key(b"parent", tokens, ("salt",), 0),
        concrete_key(b"parent", tokens, ("salt", b"x", 3), 1),
    ]
    assert len({key, *narrower}) == 5
    short = replace(BASE, tokens=_ids(tokens), side_inputs=())
    candidate = Candidate(key, 0, _ids(tokens), short)
    assert validate(candidate, short, tokens) is candidate
    with pytest.raises(PositionContractMismatch):
        validate(candidate, replace(short, position_contract="rope.1e6"), tokens)


@pytest.mark.parametrize("other", [[0, 1, 9, 3], [0, 1, 2], [0, 1, 2, 3, 4]])
def test_a_forced_collision_is_found_by_the_witness(other: list[int]) -> None:
    def constant(content: bytes) -> bytes:
        return b"same"

    tokens, asked = np.arange(4), np.array(other)
    assert concrete_key(b"", tokens, (), 0, constant) == concrete_key(b"", asked, (), 0, constant)
    with pytest.raises(HashCollisionWitness):
        validate(Candidate(b"same", 0, _ids(tokens), BASE), BASE, asked)
