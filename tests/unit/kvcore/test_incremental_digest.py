"""Columns keep their digests under any writes; the digest depends on contents alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.kvcore.columns import Column, DigestSum, IdStack, Records
from copyhold.kvcore.digest import bytes_fingerprint, digest_bytes


def _column(name: str, size: int, sink: DigestSum, unsigned: bool = False) -> Column:
    return Records(name, size, 1).column(0, "cell", sink, unsigned=unsigned)


VALUES = st.integers(-(2**31), 2**31 - 1)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), VALUES), max_size=30), st.randoms(use_true_random=False))
def test_incremental_sum_equals_recomputation(writes: list[tuple[int, int]], random: object) -> None:
    sink = DigestSum()
    column = _column("c", 10, sink)
    for number, (index, value) in enumerate(writes):
        if number % 3 == 0:
            column.put(index, value)
        elif number % 3 == 1:
            column.write(np.array([index, (index + 1) % 10]), value)
        else:
            column.add(np.array([index]), 1)
        if number % 4 == 0:
            sink.pair()
    assert sink.pair() == column.records.recomputed(sink)


def test_scalar_and_array_writes_agree_and_order_does_not_matter() -> None:
    first, second = DigestSum(), DigestSum()
    one, two = _column("c", 8, first), _column("c", 8, second)
    for index in range(8):
        one.put(index, index - 3)
    two.write(np.arange(8)[::-1], np.arange(8)[::-1] - 3)
    assert first.pair() == second.pair() != (0, 0)


def test_cells_that_return_to_zero_leave_nothing() -> None:
    sink = DigestSum()
    column = _column("c", 4, sink, True)
    column.put(1, 2**64 - 1)
    column.write(np.array([0, 2]), np.array([5, 2**63], dtype=np.uint64))
    assert sink.pair() != (0, 0)
    column.write(np.arange(4), 0)
    assert sink.pair() == (0, 0)


def test_value_index_and_column_each_change_the_digest() -> None:
    def digest(name: str, index: int, value: int) -> bytes:
        sink = DigestSum()
        _column(name, 4, sink).put(index, value)
        return digest_bytes(sink.pair())

    seen = {digest("a", 0, 1), digest("a", 0, 2), digest("a", 1, 1), digest("b", 0, 1), digest("a", 0, -1)}
    assert len(seen) == 5


def test_growing_a_column_keeps_its_digest() -> None:
    sink = DigestSum()
    records = Records("c", 2, 1)
    column = records.column(0, "cell", sink)
    column.put(1, 7)
    before = sink.pair()
    records.grow(100)
    assert sink.pair() == before == records.recomputed(sink)


def test_fingerprint_of_bytes_is_fixed_for_ever() -> None:
    assert bytes_fingerprint(b"") != bytes_fingerprint(b"\0") != bytes_fingerprint(b"\0\0")
    assert bytes_fingerprint(b"copyhold") == 9262110940093945511


def test_stack_hands_out_low_ids_first_and_its_order_is_in_the_digest() -> None:
    sink = DigestSum()
    stack = IdStack("s", 6, 1, sink)
    assert [stack.take_one() for _ in range(4)] == [1, 2, 3, 4]
    stack.push(np.array([1, 2]))
    first = sink.pair()
    other = DigestSum()
    twin = IdStack("s", 6, 1, other)
    for _ in range(4):
        twin.take_one()
    twin.push(np.array([2, 1]))
    assert first != other.pair()
    assert [stack.take_one(), stack.take_one()] == [1, 2]
