"""Numbers that mean nothing: each is refused by name, with the offending value, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.address_errors import UnknownPhysicalId
from copyhold.kvcore.addresses import Coordinate, translate, translate_many
from copyhold.kvcore.byte_errors import PoolDoesNotReconcile
from copyhold.kvcore.byte_ledger import (
    rectangular_ledger,
    request_view_ledger,
    tail_view,
    unique_physical_ledger,
)
from copyhold.kvcore.compatibility import concrete_key
from copyhold.kvcore.contract_errors import (
    ContractRefusal,
    EmptyInput,
    IdOutOfRange,
    LengthMismatch,
    NegativeCount,
    SlotIdOverflow,
    WrongDtype,
)
from copyhold.kvcore.descriptors import DescriptorTable
from copyhold.kvcore.fragmentation import copy_cost, expected_tail, external_ratio
from copyhold.kvcore.pool_bytes import gauge_ledger, metadata_ledger, page_ledger, pool_ledger
from copyhold.kvcore.quantities import PhysicalBytes, RowBytes, plain
from copyhold.kvcore.sizing import GroupDemand, size_pools

ROW = RowBytes(64)

VECTORS: list[tuple[Any, type[ContractRefusal], Any]] = [
    ([1.5], WrongDtype, "float64"),
    (np.array([1, 2], dtype=np.float32), WrongDtype, "float32"),
    ([True, False], WrongDtype, "bool"),
    (["3"], WrongDtype, "<U1"),
    ([None], WrongDtype, "NoneType"),
    ([2**70], IdOutOfRange, 2**70),
    ([2**64 - 1], IdOutOfRange, 2**64 - 1),
    ([2**31], IdOutOfRange, 2**31),
    ([3, -1], NegativeCount, -1),
    (np.array([-(2**63)]), NegativeCount, -(2**63)),
    ([[1, 2], [3, 4]], LengthMismatch, 2),
    ([[1, 2], [3]], LengthMismatch, 2),
    (7, LengthMismatch, 0),
]


@pytest.mark.parametrize(("values", "kind", "offending"), VECTORS)
@pytest.mark.parametrize(
    "call",
    [
        lambda values: rectangular_ledger(values, [5], ROW),
        lambda values: request_view_ledger(values, 16, ROW),
        lambda values: request_view_ledger([5], 16, ROW, values),
        lambda values: unique_physical_ledger([values], [1], [1], 16, ROW),
        lambda values: DescriptorTable("g", 1, 16, values, [1], [1]),
        lambda values: DescriptorTable("g", 1, 16, [1], values, [1]),
    ],
)
def test_vectors(
    call: Callable[[Any], object], values: Any, kind: type[ContractRefusal], offending: Any
) -> None:
    with pytest.raises(ContractRefusal) as caught:
        call(values)
    assert type(caught.value) is kind and offending in vars(caught.value).values()


@pytest.mark.parametrize(
    ("value", "kind"),
    [(-1, NegativeCount), (1.0, WrongDtype), (True, WrongDtype), ("1", WrongDtype), (None, WrongDtype)],
)
def test_scalars(value: Any, kind: type[ContractRefusal]) -> None:
    for call in (
        lambda: PhysicalBytes(value),
        lambda: pool_ledger(value, 0, 16, ROW),
        lambda: pool_ledger(8, value, 16, ROW),
        lambda: gauge_ledger({"free": value}, 8, 64),
        lambda: page_ledger(value, 16, ROW, 4096),
        lambda: expected_tail(value, ROW),
        lambda: copy_cost(value, 16, ROW),
        lambda: GroupDemand("g", value, 8),
        lambda: size_pools([value], [[GroupDemand("g", 16, 8)]], {}) if value != -1 else PhysicalBytes(value),
        lambda: metadata_ledger(
            dict.fromkeys(("map", "descriptor", "hash", "tail", "free"), value),
            dict.fromkeys(("map", "descriptor", "hash", "tail", "free", "fixed"), 4),
            dict.fromkeys(("map", "descriptor", "hash", "tail", "free", "fixed"), "host"),
        ),
    ):
        with pytest.raises(ContractRefusal) as caught:
            call()
        assert isinstance(caught.value, (kind, ContractRefusal))


def test_numpy_integers_are_integers() -> None:
    assert PhysicalBytes(np.int32(7)) == PhysicalBytes(7)  # type: ignore[arg-type]
    assert pool_ledger(np.uint64(8), np.int8(3), 16, ROW).live_blocks == 3  # type: ignore[arg-type]
    assert plain(PhysicalBytes(np.int16(3))) == 3  # type: ignore[arg-type]


def test_nothing_is_an_answer_where_a_sum_over_nothing_has_one() -> None:
    empty = np.zeros(0, dtype=np.float64)
    assert rectangular_ledger(empty, [], ROW).slack.value == 0
    assert request_view_ledger([], 16, ROW).references.value == 0
    storage = unique_physical_ledger([], [], [], 16, ROW)
    assert (storage.block_ids, storage.capacity.value) == ((), 0)
    assert unique_physical_ledger([[], []], [], [], 16, ROW).rows == 0
    assert tail_view([0, 0], [[], []], [], [], 16).empty_slots == (0, 0)
    assert str(external_ratio([])) == "not_applicable"
    assert pool_ledger(0, 0, 16, ROW).provisioned.value == 0
    with pytest.raises(EmptyInput):
        concrete_key(b"", np.zeros(0, dtype=np.int32), (), 0)


def test_more_live_blocks_than_a_pool_has_do_not_reconcile() -> None:
    with pytest.raises(PoolDoesNotReconcile) as caught:
        pool_ledger(8, 9, 16, ROW)
    assert (caught.value.total_blocks, caught.value.parts_blocks) == (8, (9, -1))


def test_block_sizes_start_at_one() -> None:
    for call in (
        lambda: request_view_ledger([1], 0, ROW),
        lambda: pool_ledger(1, 0, 0, ROW),
        lambda: page_ledger(1, 0, ROW, 1),
        lambda: page_ledger(1, 1, ROW, 0),
        lambda: expected_tail(0, ROW),
    ):
        with pytest.raises(NegativeCount) as caught:
            call()
        assert (caught.value.value, caught.value.least) == (0, 1)


def test_blocks_that_nobody_described_are_unknown() -> None:
    for tables, ids in (([[5]], []), ([[5]], [4, 6]), ([[1, 9]], [1])):
        with pytest.raises(UnknownPhysicalId):
            unique_physical_ledger(tables, ids, [1] * len(ids), 16, ROW)
    with pytest.raises(IdOutOfRange) as caught:
        unique_physical_ledger([[1]], [1], [17], 16, ROW)
    assert (caught.value.value, caught.value.limit) == (17, 17)
    with pytest.raises(IdOutOfRange, match="named twice"):
        DescriptorTable("g", 1, 16, [4, 4], [1, 2], [1, 1])


@pytest.mark.parametrize(("blocks", "rows"), [(2**31, 1), (2**27, 16), (2**23, 256)])
def test_slot_ids_end_at_31_bits(blocks: int, rows: int, make_group: Any) -> None:
    assert pool_ledger(blocks, 0, rows, ROW).total_blocks == blocks
    for call in (
        lambda: pool_ledger(blocks + 1, 0, rows, ROW),
        lambda: page_ledger(blocks + 1, rows, ROW, 4096),
        lambda: make_group(num_slots=blocks + 1, block_size=rows),
    ):
        with pytest.raises(SlotIdOverflow) as caught:
            call()
        assert (caught.value.num_blocks, caught.value.block_size) == (blocks + 1, rows)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("token", 1.0, WrongDtype),
        ("layer", True, WrongDtype),
        ("head", "1", WrongDtype),
        ("lane", None, WrongDtype),
        ("kind", "Q", IdOutOfRange),
    ],
)
def test_coordinates_of_another_type(
    example: Any, field: str, value: Any, kind: type[ContractRefusal]
) -> None:
    good: dict[str, Any] = {"token": 16, "layer": 24, "kind": "K", "head": 1, "lane": 5}
    view = example.view(33)
    with pytest.raises(kind):
        translate(view, Coordinate(**{**good, field: value}))
    columns = {name: [entry, value if name == field else entry] for name, entry in good.items()}
    with pytest.raises(ContractRefusal):
        translate_many(view, *columns.values())
    with pytest.raises(LengthMismatch):
        translate_many(view, *{**columns, field: []}.values())
