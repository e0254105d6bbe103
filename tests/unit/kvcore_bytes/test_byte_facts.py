"""Worked figures of the byte chapters, computed by the ledgers; statuses mismatch and reconstructed are left out."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from copyhold.kvcore.byte_errors import ReferencesCountedAsBlocks, UndeclaredShardMultiplication
from copyhold.kvcore.byte_ledger import (
    GroupRow,
    RequestViewLedger,
    UniquePhysicalLedger,
    check_unique_blocks,
    identities,
    model_row_bytes,
    rank_row_bytes,
    rectangular_ledger,
    request_view_ledger,
    row_bytes,
    savings,
    tail_view,
    unique_physical_ledger,
)
from copyhold.kvcore.fragmentation import (
    arena,
    blocks_needed,
    copy_cost,
    expected_tail,
    external_ratio,
    largest_tail,
)
from copyhold.kvcore.pool_bytes import metadata_ledger, pool_ledger
from copyhold.kvcore.quantities import RowBytes

MIB = 2**20


def _row(fact: dict[str, Any]) -> GroupRow:
    given = fact["inputs"]
    heads, width = given["kv_heads_local"], given["head_dim"]
    return GroupRow("g", given["layers"], heads, width, given["k_scalar_bytes"], given["v_scalar_bytes"])


class Shared:
    """Requests A, B and C over blocks 100 to 102."""

    def __init__(self, fact: dict[str, Any]) -> None:
        given = fact["inputs"]
        self.rows = list(given["lengths"].values())
        self.reserved = list(given["reserved_max"].values())
        self.tables = list(given["block_tables"].values())
        self.blocks = [int(block) for block in given["valid_rows"]]
        self.valid = list(given["valid_rows"].values())
        self.page, self.row = given["P"], RowBytes(given["row_bytes"])

    def view(self) -> RequestViewLedger:
        return request_view_ledger(self.rows, self.page, self.row, [len(table) for table in self.tables])

    def storage(self) -> UniquePhysicalLedger:
        return unique_physical_ledger(self.tables, self.blocks, self.valid, self.page, self.row)


@pytest.mark.parametrize("name", ["F001", "F002"])
def test_row_of_a_group(facts: dict[str, Any], name: str) -> None:
    assert row_bytes(_row(facts[name])).value == facts[name]["expected"]["row_bytes"]


def test_f003_even_disjoint_shards_multiply_and_nothing_else_does(facts: dict[str, Any]) -> None:
    given, expected = facts["F003"]["inputs"], facts["F003"]["expected"]
    row = RowBytes(given["row_bytes_rank"])
    assert (
        model_row_bytes(row, "disjoint", [4] * given["disjoint_shards"]).value == expected["row_bytes_model"]
    )
    for kind, partition in [("replicated", [4, 4]), ("pipeline", [4, 4]), ("disjoint", [2, 1])]:
        with pytest.raises(UndeclaredShardMultiplication):
            model_row_bytes(row, kind, partition)


def test_f004_f005_groups_and_bundle(facts: dict[str, Any]) -> None:
    groups = [
        GroupRow(
            name,
            given["layers"][1] - given["layers"][0],
            given["kv_heads_local"],
            given["head_dim"],
            given["scalar_bytes"],
            given["scalar_bytes"],
        )
        for name, given in facts["F004"]["inputs"].items()
    ]
    expected, bundle = facts["F004"]["expected"], facts["F005"]["expected"]
    rows = [row_bytes(group) for group in groups]
    assert [row.value for row in rows] == [expected["g0_row_bytes"], expected["g1_row_bytes"]]
    assert sum(rows, RowBytes(0)) == rank_row_bytes(groups) == RowBytes(expected["row_bytes"])
    pools = [pool_ledger(1, 1, facts["F005"]["inputs"]["P"], row).live.value for row in rows]
    assert pools == [bundle["g0_block_bytes"], bundle["g1_block_bytes"]]
    assert sum(pools) == bundle["bundle_bytes"]


def test_f010_rectangular(facts: dict[str, Any]) -> None:
    given, expected = Shared(facts["F010"]), facts["F010"]["expected"]
    ledger = rectangular_ledger(given.rows, given.reserved, given.row)
    assert (ledger.logical_rows, ledger.reserved_rows, ledger.slack_rows) == (74, 144, 70)
    for name in ("logical", "reserved", "slack"):
        assert getattr(ledger, name).value == expected[f"{name}_bytes"]
        assert getattr(ledger, f"{name}_rows") == expected[f"{name}_rows"]


def test_f011_f019_request_view(facts: dict[str, Any]) -> None:
    view, expected = Shared(facts["F011"]).view(), facts["F011"]["expected"]
    assert view.references.value == expected["ref_blocks"] and view.slots == expected["ref_slots"]
    assert view.capacity.value == expected["ref_capacity_bytes"]
    assert (view.tail_slots, view.tail.value) == (expected["ref_tail_slots"], expected["ref_tail_bytes"])
    assert list(view.tail_slots_by_request) == list(facts["F019"]["expected"]["tail_slots"].values())


def test_f012_unique_storage(facts: dict[str, Any]) -> None:
    storage, expected = Shared(facts["F012"]).storage(), facts["F012"]["expected"]
    assert list(storage.block_ids) == expected["unique_ids"]
    assert storage.blocks.value == expected["unique_blocks"] and storage.rows == expected["unique_rows"]
    assert storage.materialised.value == expected["unique_materialized_bytes"]
    assert storage.capacity.value == expected["unique_capacity_bytes"]
    assert storage.slots == expected["unique_slots"]
    assert (storage.tail_slots, storage.tail.value) == (
        expected["unique_tail_slots"],
        expected["unique_tail_bytes"],
    )


def test_f013_f014_savings_and_identities(facts: dict[str, Any]) -> None:
    given, expected = Shared(facts["F013"]), facts["F013"]["expected"]
    view, storage = given.view(), given.storage()
    saved = savings(view, storage)
    assert saved.payload.value == expected["dedup_payload_bytes"]
    assert saved.capacity.value == expected["ref_capacity_avoided_bytes"]
    computed = identities(rectangular_ledger(given.rows, given.reserved, given.row), view, storage, saved)
    printed = facts["F014"]["expected"]["identities"]
    assert len(computed) == len(printed) == 5
    for (whole, *parts), identity in zip(computed.values(), printed, strict=True):
        assert whole == sum(parts) == identity["lhs_mib"] * MIB
        assert parts == [part * MIB for part in identity["rhs_mib"]]


def test_f015_pool(facts: dict[str, Any]) -> None:
    given, expected = facts["F015"]["inputs"], facts["F015"]["expected"]
    pool = pool_ledger(given["pool_blocks"], given["live_unique"], given["P"], RowBytes(given["row_bytes"]))
    assert pool.provisioned.value == expected["pool_bytes"] and pool.live.value == expected["live_bytes"]
    assert (pool.idle_blocks, pool.idle.value) == (expected["idle_blocks"], expected["idle_bytes"])


def test_f016_metadata(facts: dict[str, Any]) -> None:
    given, expected = facts["F016"]["inputs"], facts["F016"]["expected"]
    counts: dict[str, int] = dict(
        zip(("map", "descriptor", "hash", "tail", "free"), given["counts"].values(), strict=True)
    )
    sizes = given["record_bytes"]
    placed = dict.fromkeys(sizes, "host")
    ledger = metadata_ledger(counts, sizes, placed)
    assert {name: part.total.value for name, part in ledger.parts.items()} == expected["parts"]
    assert ledger.total.value == expected["total_bytes"]
    for name in counts:
        more = metadata_ledger({**counts, name: counts[name] + 1}, sizes, placed)
        assert more.total.value - ledger.total.value == sizes[name]


def test_f017_references_are_not_blocks(facts: dict[str, Any]) -> None:
    given, expected = Shared(facts["F011"]), facts["F017"]["expected"]
    storage, view = given.storage(), given.view()
    check_unique_blocks(expected["unique_blocks"], storage, view)
    with pytest.raises(ReferencesCountedAsBlocks):
        check_unique_blocks(expected["must_not_be"], storage, view)


def test_unseen_slots_are_hidden_rows_or_empty() -> None:
    """A sees 15 empty slots, B 7 valid rows of A, C nothing: 22 in all."""
    view = tail_view([33, 25, 16], [[100, 101, 102], [100, 101], [100]], [100, 101, 102], [16, 16, 1], 16)
    assert (view.hidden_valid_slots, view.empty_slots) == ((0, 7, 0), (15, 0, 0))


def test_f020_f021_holes_and_blocks(facts: dict[str, Any]) -> None:
    given, expected = facts["F020"]["inputs"], facts["F020"]["expected"]
    extents = [extent * MIB for extent in given["free_extents_mib"]]
    candidate = int(given["candidate_mib"] * MIB)
    found = arena(given["arena_mib"] * MIB, given["allocated_mib"] * MIB, extents, candidate)
    assert found.free_bytes == expected["total_free_mib"] * MIB
    assert found.largest_free_bytes == expected["largest_free_mib"] * MIB
    assert found.contiguous_fits is expected["contiguous_fits"] and str(found.ratio) == expected["ratio"]
    paged, answer = facts["F021"]["inputs"], facts["F021"]["expected"]
    needed = blocks_needed(int(paged["candidate_mib"] * MIB), paged["block_mib"] * MIB)
    assert needed == answer["blocks_needed"] and (needed <= paged["free_blocks"]) is answer["fits"]


def test_f022_f023_edges_of_the_ratio(facts: dict[str, Any]) -> None:
    assert str(external_ratio([])) == facts["F022"]["expected"]["ratio"] == str(external_ratio([0, 0]))
    single = [extent * MIB for extent in facts["F023"]["inputs"]["free_extents_mib"]]
    assert str(external_ratio(single)) == facts["F023"]["expected"]["ratio"]
    assert external_ratio(single).fraction == 0


def test_f024_f025_expected_tail(facts: dict[str, Any]) -> None:
    for page, slots in facts["F024"]["expected"]["expected_slots"].items():
        tail = expected_tail(int(page), RowBytes(1))
        mean = Fraction(sum(int(page) - rows for rows in range(1, int(page) + 1)), int(page))
        assert tail.slots.value == mean == Fraction(slots)
    given, expected = facts["F025"]["inputs"], facts["F025"]["expected"]
    tail = expected_tail(given["P"], RowBytes(given["row_bytes"]))
    assert tail.bytes.value == expected["bytes"] and tail.assumption == "uniform on 1..16"


def test_f026_f103_largest_tail(facts: dict[str, Any]) -> None:
    for name, row in (("F026", "row_bytes"), ("F103", "token_bytes")):
        given, expected = facts[name]["inputs"], facts[name]["expected"]
        slots, size = largest_tail(given["P"], RowBytes(given[row]))
        assert (slots, size.value) == (expected["slots"], expected["bytes"])


def test_f040_f041_copy_cost(facts: dict[str, Any]) -> None:
    given, expected = facts["F040"]["inputs"], facts["F040"]["expected"]
    row = RowBytes(given["bundle_row_bytes"])
    cost = copy_cost(given["valid_tail_rows"], given["P"], row)
    assert cost.payload.value == expected["copy_payload_bytes"]
    assert cost.read_and_write.value == expected["copy_read_write_bytes"]
    assert cost.append.value == expected["append_write_bytes"]
    assert cost.traffic.value == expected["traffic_bytes"]
    assert cost.destination.value == expected["new_capacity_bytes"]
    for rows, amplification in facts["F041"]["expected"]["amplification"].items():
        cost = copy_cost(int(rows), given["P"], row)
        assert cost.amplification == amplification == Fraction(cost.traffic.value, row.value)


def test_f084_copy_at_and_off_a_boundary(facts: dict[str, Any]) -> None:
    given, expected = facts["F084"]["inputs"], facts["F084"]["expected"]
    for page, figures in expected.items():
        cost = copy_cost(given["shared"] % int(page), int(page), RowBytes(given["row_bytes"]))
        assert cost.copied_rows == figures["valid_tail_rows"]
        assert cost.read_and_write.value == figures["copy_read_write_bytes"]
        assert cost.destination.value == figures["destination_capacity_bytes"]
        ratio = cost.capacity_amplification
        assert ("not_applicable" if ratio is None else str(ratio)) == figures["capacity_amplification"]


def test_f100_f104_blocks_and_tails_of_one_request(facts: dict[str, Any]) -> None:
    given, expected = facts["F100"]["inputs"], facts["F100"]["expected"]
    view = request_view_ledger([given["tokens"]], given["P"], RowBytes(1))
    assert (view.references.value, view.tail_slots) == (expected["blocks"], expected["tail"])
    given = facts["F104"]["inputs"]
    for page in given["P"]:
        expected = facts["F104"]["expected"][f"P{page}"]
        view = request_view_ledger([given["tokens"]], page, RowBytes(given["token_bytes"]))
        assert (view.references.value, view.tail_slots) == (expected["blocks"], expected["tail"])
        assert view.tail.value == expected["tail_mib"] * MIB


def test_f101_reservation_against_use(facts: dict[str, Any]) -> None:
    given, expected = facts["F101"]["inputs"], facts["F101"]["expected"]
    ledger = rectangular_ledger([given["used"]], [given["tokens"]], RowBytes(given["token_bytes"]))
    assert ledger.reserved.value == expected["reserved_gib"] * 2**30
    assert round(ledger.logical.value / 2**30, 6) == expected["used_gib"]
    assert round(ledger.slack.value / 2**30, 6) == expected["idle_gib"]
    assert ledger.reserved.value == expected["reserved_over_used"] * ledger.logical.value


def test_f106_samples_share_one_prompt(facts: dict[str, Any]) -> None:
    given, expected = facts["F106"]["inputs"], facts["F106"]["expected"]
    row, page = RowBytes(given["token_bytes"]), given["P"]
    table = list(range(expected["shared_blocks"]))
    valid = [page] * expected["full_blocks"] + [expected["partial_rows"]]
    view = request_view_ledger([given["tokens"]] * given["samples"], page, row)
    storage = unique_physical_ledger([table] * given["samples"], table, valid, page, row)
    assert view.payload.value == expected["unshared_bytes"]
    assert storage.materialised.value == expected["shared_mib"] * MIB
    assert storage.blocks.value == expected["shared_blocks"]
