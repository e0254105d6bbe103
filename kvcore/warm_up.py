"""Warm-up: every compiled loop of kvcore is loaded or compiled once, by a short life of a small ledger.

Owns that life. Invariant: afterwards no command compiles anything; `compile_counts` shows it.
Source: LEDGER "Determinism" (loops are pure functions over arrays).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import execution_loops, loops
from .commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Command,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    RequestHandle,
    Reset,
    RowSpan,
    Scope,
    Truncate,
    pack,
)
from .execution import shares_anything, take_snapshot
from .ledger import Ledger

_GROUPS = (GroupSpec("full", 2, 32), GroupSpec("coarse", 4, 16), GroupSpec("sliding", 2, 32, 10))


class _Life:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.number = 0
        self.ledger.apply(Genesis(b"warm up", _GROUPS, 8, 24, "warm up"))

    def admit(self, count: int, namespace: str = "a", last: int = 1) -> RequestHandle:
        self.number += 1
        tokens = np.array([*range(1, count), last], dtype="<i4").tobytes()
        return self.ledger.apply(Admit(self.number, Scope(namespace, 1, b"w"), tokens)).request

    def step(self, *handles: RequestHandle) -> None:
        self.number += 1
        views = [self.ledger.request(handle) for handle in handles]
        rows = [RowSpan(v.handle, v.valid_rows, v.num_tokens - v.valid_rows) for v in views]
        sampled = tuple([(index, 1) for index in range(len(rows))])
        self.apply(Dispatch(self.number, tuple(rows)))
        shares_anything(self.ledger, handles)
        take_snapshot(self.ledger, handles, "warm up")
        self.apply(Complete(self.number, sampled))

    def apply(self, command: Command) -> Any:
        return self.ledger.apply(pack(command))


def warm_up() -> None:
    """Compiles, or loads from the cache beside the loops, every signature that commands and snapshots use."""
    life = _Life()
    first, second = life.admit(9), life.admit(9)
    life.step(first, second)
    life.apply(Publish((first, second)))
    (child,) = life.apply(Fork(first, 1)).children
    life.step(first, child)
    life.apply(Truncate(child, 10))
    life.apply(Truncate(child, 3))
    for handle in (child, second, first):
        life.apply(Release(handle, "finish"))
    life.admit(6)
    life.apply(Abort(life.number))
    fourth = life.admit(12, last=7)
    life.step(fourth)
    life.step(fourth)
    life.apply(Publish((fourth,)))
    life.apply(Release(fourth, "finish"))
    life.apply(Evict(tuple([leaf.handle for leaf in life.ledger.evictable_leaves()[:1]])))
    life.apply(Reset(Scope("a", 1, b"w")))
    other = life.admit(9, "b")
    life.step(other)
    life.apply(Publish((other,)))
    life.apply(AdvanceGeneration("b", 2))


def compile_counts() -> dict[str, tuple[int, int]]:
    """Per loop: signatures known and cache misses so far; after `warm_up` neither may rise."""
    return {
        name: (len(loop.signatures), sum(loop.stats.cache_misses.values()))
        for name, loop in sorted({**vars(loops), **vars(execution_loops)}.items())
        if not name.startswith("_") and hasattr(loop, "signatures")
    }
