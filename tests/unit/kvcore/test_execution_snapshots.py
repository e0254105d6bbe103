"""Execution snapshots say exactly which sequences read the same blocks, and refuse to be used for anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.kvcore import execution_loops as loops
from copyhold.kvcore.commands import Fork, Publish, RequestHandle
from copyhold.kvcore.execution import (
    BEGIN,
    END,
    END_ROW,
    FIRST_ROW,
    LEVEL,
    ExecutionSnapshot,
    check_chunks,
    coverage_of,
    shares_anything,
    take_snapshot,
)

FACTS = {
    row["id"]: row
    for row in json.loads((Path(__file__).parents[2] / "data/fixtures.json").read_text())["fixtures"]
}


def _published(driver: Any, count: int) -> None:
    first = driver.admit(driver.tokens(1, count)).request
    driver.dispatch((first, count))
    driver.complete(sampled=((0, 9),))
    driver.apply(Publish((first,)))
    driver.release(first)


def _running(driver: Any, *prompts: list[int]) -> list[RequestHandle]:
    """Requests admitted with a hit and dispatched over the rest of their prompts."""
    handles = [driver.admit(prompt).request for prompt in prompts]
    driver.dispatch(
        *[(h, len(p) - driver.ledger.request(h).valid_rows) for h, p in zip(handles, prompts, strict=True)]
    )
    return handles


def test_requests_with_a_common_hit_share_its_blocks_and_nothing_else(
    make_driver: Callable[..., Any],
) -> None:
    driver = make_driver(num_blocks=32)
    _published(driver, 16)
    base = driver.tokens(1, 16)
    handles = _running(driver, [*base, 50], [*base[:8], 60, 61], [70, 71, 72], [*base, 51])
    taken = take_snapshot(driver.ledger, handles, "c")
    shared = taken.chunks[taken.coverage > 1].tolist()
    assert [
        (chunk[FIRST_ROW], chunk[END_ROW], chunk[END] - chunk[BEGIN], chunk[LEVEL]) for chunk in shared
    ] == [
        (0, 8, 3, 0),
        (8, 16, 2, 1),
    ]
    assert taken.shared_rows(taken.coverage > 1).tolist() == [16, 8, 0, 16]
    check_chunks(taken.chunks, len(handles))
    taken.require_same_blocks(driver.ledger)
    assert shares_anything(driver.ledger, handles)
    assert not shares_anything(driver.ledger, handles[1:3])


def test_equal_tokens_through_other_blocks_are_not_shared(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(num_blocks=32)
    prompt = driver.tokens(1, 8)
    handles = _running(driver, prompt, prompt)
    driver.complete(sampled=((0, 5), (1, 5)))
    driver.apply(Publish(tuple(handles)))
    driver.dispatch((handles[0], 1), (handles[1], 1))
    assert take_snapshot(driver.ledger, handles, "c").coverage.tolist() == [1, 1]
    assert not shares_anything(driver.ledger, handles)


def test_another_namespace_never_shares(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(num_blocks=32)
    _published(driver, 16)
    prompt = [*driver.tokens(1, 16), 40]
    mine, other = driver.admit(prompt).request, driver.admit(prompt, "b").request
    driver.dispatch((mine, 1), (other, 17))
    assert not shares_anything(driver.ledger, [mine, other])


def test_forked_requests_share_whole_blocks_only(make_driver: Callable[..., Any]) -> None:
    driver = make_driver(num_blocks=32)
    (parent,) = _running(driver, driver.tokens(1, 10))
    driver.complete(sampled=((0, 5),))
    (child,) = driver.apply(Fork(parent, 1)).children
    driver.dispatch((parent, 1), (child, 1))
    taken = take_snapshot(driver.ledger, [parent, child], "c")
    assert taken.shared_rows(taken.coverage > 1).tolist() == [8, 8]


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=7),
    st.randoms(use_true_random=False),
)
@settings(max_examples=300, deadline=None)
def test_the_tree_is_what_comparing_every_pair_gives(prefixes: list[list[int]], random: Any) -> None:
    """Tables of few different blocks; a block id names its depth too, as no block stands at two depths."""
    width = 7
    tables = np.zeros((len(prefixes) + 3, width), dtype=np.int32)
    slots = np.array(random.sample(range(len(prefixes) + 3), len(prefixes)), dtype=np.int64)
    trail = [[] for _ in prefixes]
    for row, prefix in enumerate(prefixes):
        for depth in range(len(prefix)):
            trail[row].append(hash(tuple(prefix[: depth + 1])) % 100_003)
        tables[slots[row], : len(prefix)] = trail[row]
        tables[slots[row], len(prefix) :] = 77
    limits = np.array([len(prefix) for prefix in prefixes], dtype=np.int64)
    results = []
    for build, alone in (
        (loops.chunk_tree, loops.unshared),
        (
            getattr(loops.chunk_tree, "py_func", loops.chunk_tree),
            getattr(loops.unshared, "py_func", loops.unshared),
        ),
    ):
        order = np.arange(len(prefixes), dtype=np.int64)
        chunks = np.zeros((2 * len(prefixes), 5), dtype=np.int64)
        count = build(tables, slots, limits, order, chunks)
        results.append((order.tolist(), chunks[:count].tolist(), bool(alone(tables, slots, limits))))
    assert results[0] == results[1]
    order, chunks, lonely = results[0]
    assert sorted(order) == list(range(len(prefixes)))
    check_chunks(np.array(chunks, dtype=np.int64).reshape(-1, 5), len(prefixes))
    for a in range(len(prefixes)):
        for b in range(a):
            common = next(
                (i for i, pair in enumerate(zip(trail[a], trail[b], strict=False)) if pair[0] != pair[1]),
                min(len(trail[a]), len(trail[b])),
            )
            positions = {order.index(a), order.index(b)}
            told = [c for c in chunks if positions <= set(range(c[BEGIN], c[END]))]
            assert sum(chunk[END_ROW] - chunk[FIRST_ROW] for chunk in told) == common
            assert not (lonely and common)
    for row, prefix in enumerate(prefixes):
        own = [c for c in chunks if c[BEGIN] <= order.index(row) < c[END]]
        assert sum(chunk[END_ROW] - chunk[FIRST_ROW] for chunk in own) == len(prefix)


def test_the_four_sequence_tree_has_the_known_paths_and_coverage() -> None:
    fact = FACTS["F090"]
    wanted = {name: tuple(interval) for name, interval in fact["inputs"]["coverage"].items()}
    assert coverage_of(fact["expected"]["paths"]) == wanted


def four_sequences() -> ExecutionSnapshot:
    """F090's tree: C0 under all, C1 and C2 under two each, a private chunk of each sequence."""
    rows, cover = FACTS["F090"]["inputs"]["chunk_rows"], FACTS["F090"]["inputs"]["coverage"]
    first = {"C0": 0, "C1": 2, "C2": 2, "C3": 3, "C4": 3, "C5": 4, "C6": 4}
    levels = {"C0": 0, "C1": 1, "C2": 1}
    names = ["C0", "C1", "C3", "C4", "C2", "C5", "C6"]
    chunks = [[first[n], first[n] + rows[n], *cover[n], levels.get(n, 2)] for n in names]
    return ExecutionSnapshot(
        log_index=0,
        machine_digest=b"",
        contract="c",
        handles=tuple([RequestHandle(slot, 1) for slot in range(4)]),
        order=np.arange(4, dtype=np.int64),
        first_rows=np.array(FACTS["F090"]["expected"]["path_lengths"], dtype=np.int64),
        chunks=np.array(chunks, dtype=np.int64),
        digests=np.zeros(7, dtype=np.uint64),
    )


def test_paths_and_lengths_come_from_the_chunks() -> None:
    snapshot, expected = four_sequences(), FACTS["F090"]["expected"]
    check_chunks(snapshot.chunks, 4)
    lengths = snapshot.chunks[:, END_ROW] - snapshot.chunks[:, FIRST_ROW]
    paths = snapshot.paths()
    assert [len(path) for path in paths] == [expected["partitions_per_sequence"]] * 4
    assert [int(lengths[path].sum()) for path in paths] == expected["path_lengths"]
    assert int(lengths.sum()) == expected["physical_rows"]
    assert sum(int(lengths[path].sum()) for path in paths) == expected["logical_pairs"]


@pytest.mark.parametrize("released", [False, True])
def test_a_snapshot_is_good_for_its_own_log_index_only(
    make_driver: Callable[..., Any], released: bool
) -> None:
    driver = make_driver()
    (handle,) = _running(driver, driver.tokens(1, 8))
    taken = take_snapshot(driver.ledger, [handle], "c")
    taken.require_current(driver.ledger)
    if released:
        driver.release(handle)
    else:
        driver.complete(sampled=((0, 3),))
    with pytest.raises(Exception, match="stale_snapshot"):
        taken.require_current(driver.ledger)
