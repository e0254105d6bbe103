"""A block that changes its tenant arrives zeroed: stale bytes are never in a block that is in use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from local_replica import BLOCK, LocalReplica, run_of

OLD, NEW = run_of(1, 100), run_of(300, 37)


def poison(served: LocalReplica, blocks: list[int]) -> None:
    """Whatever a tenant could have left behind, at its worst: not-a-numbers in every row."""
    for pool in served.pools:
        pool.k[:, blocks] = np.nan
        pool.v[:, blocks] = np.nan


def leave_free(served: LocalReplica) -> None:
    served.serve(OLD, "a", max_new=1, publish=False)


def leave_cached(served: LocalReplica) -> None:
    served.serve(OLD, "a", max_new=1)


def leave_cancelled(served: LocalReplica) -> None:
    stream = served.submit(OLD, "a", max_new=25, publish=False)
    served.step()
    served.cancel(stream)
    served.run()


def leave_preempted(served: LocalReplica) -> None:
    """Two requests that outgrow the pool together."""
    for n in range(2):
        served.submit(run_of(1 + 100 * n, 55), "a", max_new=30, publish=False)
    served.run()
    assert served.scheduler.preemptions > 0


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("leave", [leave_free, leave_cached, leave_cancelled, leave_preempted])
def test_stale_bytes_of_another_tenant_are_gone_before_the_first_row_is_written(
    replica, cold, ranks: int, leave: Callable[[LocalReplica], None]
):
    served: LocalReplica = replica(ranks, num_blocks=8)
    leave(served)
    residue = list(served.ledger.residue("a", 2))
    assert len(residue) >= 7
    poison(served, residue)
    stream = served.submit(NEW, "b", max_new=40)
    served.step()
    entry = stream.entry
    assert entry is not None and entry.handle is not None
    table = [handle.block for handle in served.ledger.block_handles(entry.handle)]
    assert set(table) & set(residue)
    unwritten = np.arange(len(NEW) % BLOCK, BLOCK)
    for pool in served.pools:
        for layer in range(pool.num_layers):
            k, v = pool.read_rows(layer, np.full(len(unwritten), table[-1]), unwritten)
            assert not k.any()
            assert not v.any()
            assert np.isfinite(pool.k[:, table]).all()
            assert np.isfinite(pool.v[:, table]).all()
    served.run()
    assert stream.tokens == cold(NEW, 40)
    assert served.worst_audit("b") <= 1e-3
    served.check_quiet()


def test_another_generation_of_the_same_namespace_is_another_owner(replica):
    served: LocalReplica = replica(num_blocks=8)
    leave_free(served)
    poison(served, list(served.ledger.residue("a", 2)))
    stream = served.serve(NEW, "a", generation=2, max_new=40)
    assert len(stream.tokens) == 40
    pool = served.pools[0]
    held = sorted(served.index("a").values())
    assert np.isfinite(pool.k[:, held]).all()


def test_a_block_that_stays_with_its_tenant_is_not_zeroed_for_nothing(replica):
    served: LocalReplica = replica(num_blocks=8)
    leave_free(served)
    residue = list(served.ledger.residue("a", 2))
    before = served.block_bytes(0, residue)
    stream = served.submit(run_of(700, 2), "a", max_new=1)
    served.step()
    assert stream.tokens
    after = served.block_bytes(0, residue)
    assert sum(x != y for x, y in zip(before, after, strict=True)) <= 2 * served.pools[0].block_bytes // BLOCK
