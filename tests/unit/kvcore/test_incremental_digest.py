"""Columns keep their digests under any writes; the digest depends on contents alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from copyhold.kvcore.digest import Column, DigestSum, IdStack, bytes_fingerprint, digest_bytes

VALUES = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.tuples(st.integers(0, 9), VALUES), max_size=30), st.randoms(use_true_random=False))
def test_incremental_sum_equals_recomputation(writes: list[tuple[int, int]], random: object) -> None:
    sink = DigestSum()
    column = Column("c", 10, np.int32, sink)
    for number, (index, value) in enumerate(writes):
        if number % 3 == 0:
            column.put(index, value)
        elif number % 3 == 1:
            column.write(np.array([index, (index + 1) % 10]), value)
        else:
            column.add(np.array([index]), 1)
        if number % 4 == 0:
            sink.pair()
    assert sink.pair() == tuple(part % 2**64 for part in column.recomputed_pair())


def test_scalar_and_array_writes_agree_and_order_does_not_matter() -> None:
    first, second = DigestSum(), DigestSum()
    one, two = Column("c", 8, np.int64, first), Column("c", 8, np.int64, second)
    for index in range(8):
        one.put(index, index - 3)
    two.write(np.arange(8)[::-1], np.arange(8)[::-1] - 3)
    assert first.pair() == second.pair() != (0, 0)


def test_cells_that_return_to_zero_leave_nothing() -> None:
    sink = DigestSum()
    column = Column("c", 4, np.uint64, sink)
    column.put(1, 2**64 - 1)
    column.write(np.array([0, 2]), np.array([5, 2**63], dtype=np.uint64))
    assert sink.pair() != (0, 0)
    column.write(np.arange(4), 0)
    assert sink.pair() == (0, 0)


def test_value_index_and_column_each_change_the_digest() -> None:
    def digest(name: str, index: int, value: int) -> bytes:
        sink = DigestSum()
        Column(name, 4, np.int32, sink).put(index, value)
        return digest_bytes(sink.pair())

    seen = {digest("a", 0, 1), digest("a", 0, 2), digest("a", 1, 1), digest("b", 0, 1), digest("a", 0, -1)}
    assert len(seen) == 5


def test_growing_a_column_keeps_its_digest() -> None:
    sink = DigestSum()
    column = Column("c", 2, np.int32, sink)
    column.put(1, 7)
    before = sink.pair()
    column.grow(100)
    assert sink.pair() == before == column.recomputed_pair()


def test_fingerprint_of_bytes_is_fixed_for_ever() -> None:
    assert bytes_fingerprint(b"") != bytes_fingerprint(b"\0") != bytes_fingerprint(b"\0\0")
    assert bytes_fingerprint(b"copyhold") == 9262110940093945511


def test_stack_hands_out_low_ids_first_and_its_order_is_in_the_digest() -> None:
    sink = DigestSum()
    stack = IdStack("s", 6, 1, sink)
    assert stack.take(3).tolist() == [1, 2, 3] and stack.take_one() == 4
    stack.push(np.array([2, 1]))
    first = sink.pair()
    other = DigestSum()
    twin = IdStack("s", 6, 1, other)
    twin.take(4)
    twin.push(np.array([1, 2]))
    assert first != other.pair()
    assert stack.take(2).tolist() == [1, 2]
