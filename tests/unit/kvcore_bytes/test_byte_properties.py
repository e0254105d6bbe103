"""Vectorised ledgers against loops over every request and row, on random tables with sharing."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.kvcore.byte_errors import SharedRowsCountedAsTail
from copyhold.kvcore.byte_ledger import (
    check_tail_claim,
    identities,
    rectangular_ledger,
    request_view_ledger,
    savings,
    tail_view,
    unique_physical_ledger,
)
from copyhold.kvcore.fragmentation import external_ratio
from copyhold.kvcore.pool_bytes import gauge_ledger, page_ledger, pool_ledger
from copyhold.kvcore.quantities import RowBytes

ROW = RowBytes(48)


@st.composite
def shared_requests(draw: st.DrawFn) -> tuple[int, list[int], list[list[int]], dict[int, int]]:
    """Block size, rows, tables and valid rows: each request shares leading blocks of an earlier one."""
    page = draw(st.integers(1, 8))
    rows: list[int] = []
    tables: list[list[int]] = []
    valid: dict[int, int] = {}
    fresh = iter(draw(st.permutations(range(100, 160))))
    for _ in range(draw(st.integers(0, 5))):
        held = draw(st.integers(0, 4 * page))
        count = -(-held // page)
        earlier = draw(st.sampled_from(tables)) if tables else []
        shared = draw(st.integers(0, min(len(earlier), count)))
        table = earlier[:shared] + [next(fresh) for _ in range(count - shared)]
        for index, block in enumerate(table):
            valid[block] = max(valid.get(block, 0), min(page, held - index * page))
        rows.append(held)
        tables.append(table)
    return page, rows, tables, valid


@settings(max_examples=60, deadline=None)
@given(shared_requests(), st.data())
def test_ledgers_equal_loops(
    case: tuple[int, list[int], list[list[int]], dict[int, int]], data: st.DataObject
) -> None:
    page, rows, tables, valid = case
    extra = [data.draw(st.integers(0, 9)) for _ in rows]
    reserved = [held + more for held, more in zip(rows, extra, strict=True)]
    rectangle = rectangular_ledger(np.array(rows, dtype=np.int32), np.array(reserved, dtype=np.uint16), ROW)
    assert rectangle.slack.value == sum(extra) * ROW.value
    view = request_view_ledger(rows, page, ROW, [len(table) for table in tables])
    storage = unique_physical_ledger(tables, list(valid), list(valid.values()), page, ROW)
    named = {block for table in tables for block in table}
    assert storage.block_ids == tuple(sorted(named))
    assert storage.materialised.value == sum(valid[block] for block in named) * ROW.value
    assert view.references.value == sum(len(table) for table in tables)
    hidden, empty = [], []
    for held, table in zip(rows, tables, strict=True):
        slots = [
            (block, offset, index * page + offset < held)
            for index, block in enumerate(table)
            for offset in range(page)
        ]
        hidden.append(sum(not seen and offset < valid[block] for block, offset, seen in slots))
        empty.append(sum(offset >= valid[block] for block, offset, _ in slots))
    tails = tail_view(rows, tables, list(valid), list(valid.values()), page)
    assert (tails.hidden_valid_slots, tails.empty_slots) == (tuple(hidden), tuple(empty))
    assert sum(hidden) + sum(empty) == view.tail_slots
    for whole, *parts in identities(rectangle, view, storage, savings(view, storage)).values():
        assert whole == sum(parts)
    check_tail_claim(storage.tail_slots, storage, tails)
    if view.tail_slots != storage.tail_slots:
        with pytest.raises(SharedRowsCountedAsTail):
            check_tail_claim(view.tail_slots, storage, tails)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=6))
def test_external_ratio_is_exact(extents: list[int]) -> None:
    ratio = external_ratio(extents)
    if sum(extents):
        assert ratio.fraction == 1 - Fraction(max(extents), sum(extents)) and 0 <= ratio.fraction < 1
    else:
        assert str(ratio) == "not_applicable"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**20), st.data(), st.integers(1, 256), st.integers(1, 2**20))
def test_parts_of_pools_and_pages_sum_to_the_whole(
    total: int, data: st.DataObject, page: int, row: int
) -> None:
    live = data.draw(st.integers(0, total))
    pool = pool_ledger(total, live, page, RowBytes(row))
    assert pool.provisioned == pool.live + pool.idle and pool.held.value == pool.provisioned.value
    gauge = gauge_ledger({"live": live, "free": total - live}, total, page * row)
    assert sum(gauge.bytes.values()) == gauge.total == pool.provisioned
    pages = page_ledger(live, page, RowBytes(row), 65536)
    assert pages.payload.value + pages.padding.value == pages.total_bytes == live * pages.page_bytes
    assert pages.page_bytes % 65536 == 0 and 0 <= pages.page_bytes - page * row < 65536


def test_memory_held_stays_when_every_request_has_ended() -> None:
    busy, quiet = (pool_ledger(8, live, 16, RowBytes(65536)) for live in (3, 0))
    assert quiet.live.value == 0 and quiet.held == busy.held


def test_figures_beyond_64_bits_stay_exact() -> None:
    row = RowBytes(2**40)
    assert pool_ledger(2**27, 0, 16, row).provisioned.value == 2**71
    assert request_view_ledger([2**31 - 16] * 3, 16, row).payload.value == 3 * (2**31 - 16) * 2**40
