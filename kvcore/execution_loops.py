"""The inner loop of execution snapshots: which running requests read the same blocks, from their tables.

Invariant: a pure function over arrays, compiled or plain Python with the same result; the order of sequences depends on
their tables and their order in the step alone. Source: LEDGER "Determinism"; contracts K153, K154.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit

FIRST, END, BEGIN, STOP, LEVEL = range(5)
"""Columns of a chunk: blocks [FIRST, END) of sequences [BEGIN, STOP) in tree order, LEVEL chunks below the root."""


def _plain(loop: Callable[..., Any]) -> Callable[..., Any]:
    return loop


_jit = _plain if vars(config)["DISABLE_JIT"] else njit(cache=True, nogil=True, error_model="numpy")


@_jit
def chunk_tree(tables, slots, limits, order, chunks):
    """Chunks of the tree that the first `limits` blocks of each sequence's table form; returns how many.

    tables int32 [slots, width]; slots, limits int64 [S]; `order` int64 [S] (the step's order on entry) becomes tree
    order; `chunks` int64 [2 S, 5] is filled in preorder. Sequences that share a block lie side by side.
    """
    total = slots.shape[0]
    stack = np.empty((2 * total + 1, 4), np.int64)
    keys = np.empty(total, np.int64)
    stack[0] = np.array([0, total, 0, 0])
    waiting, found = min(total, 1), 0
    while waiting:
        waiting -= 1
        first, last, depth, level = stack[waiting]
        leader = order[first]
        shared = limits[leader]
        for i in range(first + 1, last):
            shared = min(shared, limits[order[i]])
        for i in range(first + 1, last):
            block = depth
            while block < shared and tables[slots[order[i]], block] == tables[slots[leader], block]:
                block += 1
            shared = block
        if shared > depth:
            row = chunks[found]
            row[FIRST], row[END], row[BEGIN], row[STOP], row[LEVEL] = depth, shared, first, last, level
            found += 1
            level += 1
        if last - first == 1:
            continue
        for i in range(first, last):
            ended = limits[order[i]] == shared
            keys[i] = -1 if ended else np.int64(tables[slots[order[i]], shared])
        by_key = np.argsort(keys[first:last], kind="mergesort")
        members, sorted_keys = order[first:last][by_key], keys[first:last][by_key]
        order[first:last] = members
        stop = last - first
        for i in range(last - first - 1, -1, -1):
            if i == 0 or sorted_keys[i - 1] != sorted_keys[i]:
                if sorted_keys[i] >= 0:
                    place = stack[waiting]
                    place[0], place[1], place[2], place[3] = first + i, first + stop, shared, level
                    waiting += 1
                stop = i
    return found


@_jit
def unshared(tables, slots, limits):
    """Whether no two sequences with a whole block begin with the same one: the common case, without a tree."""
    total = slots.shape[0]
    firsts = np.empty(total, np.int64)
    for i in range(total):
        firsts[i] = np.int64(tables[slots[i], 0]) if limits[i] > 0 else -1 - i
    firsts.sort()
    repeated = 0
    for i in range(1, total):
        repeated += firsts[i] == firsts[i - 1]
    return repeated == 0
