"""A ledger with a control left out allocates the same blocks in the same order, and really lacks the control."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numba import config

from copyhold.cluster import bench_load
from copyhold.cluster.bench_variants import CONTROLS, variant
from copyhold.kvcore import loops


class _Life:
    """A short life on a small pool, and what can be seen of it."""

    def __init__(self, load: ModuleType) -> None:
        bench: Any = load.Bench(256, 32, 1024)
        small = bench.running(4, 33)
        bench.fill(32, 256)
        bench.decode_us(small, 40)
        released = bench.ledger.apply(bench.admit(300)).request
        bench.compute(released)
        bench.ledger.apply(load.Release(released, "finish"))
        self.last = bench.ledger.apply(bench.admit(20))
        self.state = bench.ledger.state
        self.gauge = bench.ledger.gauge()
        self.tables = [table.copy() for table in self.state.requests.all_tables]
        self.records = self.state.pool.records.cells.copy()
        self.rows = self.state.requests.valid_rows.array.copy()


@pytest.fixture(scope="module")
def whole() -> _Life:
    return _Life(bench_load)


@pytest.fixture(scope="module", params=CONTROLS)
def part(request: pytest.FixtureRequest) -> tuple[str, _Life]:
    """Its loops run as plain Python, which is the same code and is not compiled anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "DISABLE_JIT", 1)
        load = variant(request.param)
    return request.param, _Life(load)


def test_what_is_left_out_decides_no_block_and_no_row(whole: _Life, part: tuple[str, _Life]) -> None:
    _, life = part
    assert (life.gauge.free, life.gauge.live) == (whole.gauge.free, whole.gauge.live)
    assert all(np.array_equal(one, other) for one, other in zip(life.tables, whole.tables, strict=True))
    for field in (loops.REF, loops.ROWS, loops.NODE, loops.OWNER):
        assert np.array_equal(life.records[:, field], whole.records[:, field])
    assert np.array_equal(life.rows, whole.rows)


def test_the_control_is_really_gone_and_the_others_are_there(whole: _Life, part: tuple[str, _Life]) -> None:
    name, life = part
    generations = int(life.records[:, loops.GENERATION].sum())
    generations += int(life.state.requests.generation.array.sum())
    kept = {
        "generations": generations != 0,
        "digests": bool(life.state.sums.all.any()),
        "receipts": hasattr(life.last, "machine_after"),
    }
    assert kept == {control: control != name for control in CONTROLS}
    if name == "receipts":
        assert life.state.sums.digests() == whole.state.sums.digests()
        assert vars(life.last) == {"request": life.last.request}
