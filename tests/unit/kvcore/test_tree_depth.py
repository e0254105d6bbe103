"""A path of 100,000 tokens through more edges than Python would recurse: every walk over it is a loop."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from copyhold.kvcore.audit import audit
from copyhold.kvcore.checkpoint import restore, take_checkpoint
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Complete,
    Dispatch,
    Evict,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    Reset,
    RowSpan,
    Scope,
)
from copyhold.kvcore.ledger import Ledger

TOKENS, PAGE, EDGE = 100_000, 16, 80
SCOPE = Scope("a", 1, b"w")
WORDS = np.arange(TOKENS, dtype="<i4")


@pytest.fixture
def deep() -> Ledger:
    """One prompt of 100,000 tokens, cut by admissions that part from it every 80 tokens."""
    ledger = Ledger()
    groups = (GroupSpec("full", PAGE, 7000), GroupSpec("sliding", PAGE, 7000, 64))
    ledger.apply(Genesis(b"w", groups, 4, TOKENS + PAGE, "pool"))
    request = ledger.apply(Admit(0, SCOPE, WORDS.tobytes())).request
    ledger.apply(Dispatch(0, (RowSpan(request, 0, TOKENS),)))
    ledger.apply(Complete(0))
    ledger.apply(Publish((request,)))
    ledger.apply(Release(request, "finish"))
    for number, end in enumerate(range(TOKENS - EDGE, 0, -EDGE), 1):
        ledger.apply(Admit(number, SCOPE, WORDS[: end + 1].tobytes()))
        ledger.apply(Abort(number))
    return ledger


def test_a_deep_path_is_matched_leased_checked_and_given_back(deep: Ledger) -> None:
    probe = deep.probe(SCOPE, WORDS.tobytes())
    assert len(probe.path) == TOKENS // EDGE > sys.getrecursionlimit()
    assert probe.match.runtime == TOKENS - PAGE and probe.match.junction == TOKENS
    audit(deep)
    assert restore(take_checkpoint(deep)).machine_digest == deep.machine_digest
    receipt = deep.apply(Admit(9000, SCOPE, WORDS.tobytes()))
    assert len(receipt.path) == len(probe.path)
    deep.apply(Release(receipt.request, "cancel"))
    from_the_end = receipt.path[::-1]
    (leaf,) = deep.evictable_leaves()
    below = deep.apply(Evict((leaf.handle, *from_the_end[:100])))
    assert below.nodes == 101
    assert deep.probe(SCOPE, WORDS.tobytes()).match.indexed == TOKENS - 100 * EDGE
    deep.apply(Reset(SCOPE))
    assert deep.gauge(0).free == deep.gauge(1).free == 7000


def test_a_deep_root_drops_with_its_floor(deep: Ledger) -> None:
    deep.apply(AdvanceGeneration("a", 2))
    assert deep.gauge(0).free == deep.gauge(1).free == 7000
    audit(deep)
