"""Loops by which ranks that map one segment add and gather: copy in, announce, wait briefly, combine in rank order.

Owns the order of memory accesses. A rank's sequence number is stored with release and loaded with acquire, so whoever sees
the number sees the bytes before it; both are plain moves on x86-64, where alone this runs (the pause is that processor's).
Two buffers alternate: a rank fills one for message n + 2 only after every rank announced n + 1, hence finished reading n.
Sums run over ranks in rising order in float32 from the shared copies, so every rank computes the same bits.

All loops stand in this file, because a cached caller does not notice a changed callee elsewhere. `warm_up` compiles every
signature that a rank uses.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

DONE, WAITING, DISAGREEMENT = 0, 1, 2
"""What a call came to: combined; some rank is not there yet; a rank is there with another message."""

WORDS = 16
"""int64 per rank, two cache lines, so that no rank's stores disturb another's line or its neighbour's prefetch.

[0, 1) the sequence number announced last, [1, 3) the messages' labels in the even and the odd buffer.
"""

_SPINS = 200
"""Looks at one rank's number before the processor is given away; a few microseconds."""

_YIELDS = 16
"""Times it is given away before the caller may look at the clock."""

_BLOCK = 4096
"""Elements added at a time, which stay in the nearest cache between ranks."""

_jit = njit(cache=True, nogil=True, error_model="numpy")
_callee = njit(nogil=True, error_model="numpy")


@intrinsic
def _load_acquire(typing_context, words, index):
    """One int64 of a flat array; nothing after it is read before it."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load_atomic(builder.gep(array.data, [arguments[1]]), "acquire", 8)

    return types.int64(words, types.int64), codegen


@intrinsic
def _store_release(typing_context, words, index, value):
    """Set one int64 of a flat array; nothing before it is written after it."""

    def codegen(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        builder.store_atomic(arguments[2], builder.gep(array.data, [arguments[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), codegen


@intrinsic
def _pause(typing_context):
    """Tell the processor that this is a spin."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _yield_processor(typing_context):
    """libc's sched_yield: whoever else can run on this core, runs."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])

    return types.int32(), codegen


@_callee
def _announce(words, rank, sequence, label):
    words[rank * WORDS + 1 + (sequence & 1)] = label
    _store_release(words, rank * WORDS, sequence)  # pyright: ignore[reportCallIssue]


@_callee
def _arrival(words, ranks, sequence, label):
    """DONE when every rank announced `sequence`, with this label."""
    yields = 0
    for rank in range(ranks):
        looks = 0
        while _load_acquire(words, rank * WORDS) < sequence:  # pyright: ignore[reportCallIssue]
            looks += 1
            if looks < _SPINS:
                _pause()  # pyright: ignore[reportCallIssue]
            elif yields < _YIELDS:
                _yield_processor()  # pyright: ignore[reportCallIssue]
                yields += 1
            else:
                return WAITING
        if words[rank * WORDS + 1 + (sequence & 1)] != label:
            return DISAGREEMENT
    return DONE


@_jit
def sum_ranks(words, buffers, values, rank, sequence, label, first):
    """Message `sequence`: `values` of all ranks added into `values`, or WAITING to be called again with `first` False.

    words flat int64, `WORDS` a rank; buffers float32 `[2, ranks, capacity]`; values float32 of at most that capacity.
    """
    shared = buffers[sequence & 1]
    ranks, count = shared.shape[0], values.shape[0]
    if first:
        shared[rank, :count] = values
        _announce(words, rank, sequence, label)
    found = _arrival(words, ranks, sequence, label)
    if found != DONE:
        return found
    for start in range(0, count, _BLOCK):
        stop = min(start + _BLOCK, count)
        total = values[start:stop]
        one, two = shared[0, start:stop], shared[1, start:stop]
        for i in range(stop - start):
            total[i] = one[i] + two[i]
        for other in range(2, ranks):
            more = shared[other, start:stop]
            for i in range(stop - start):
                total[i] += more[i]
    return DONE


@_jit
def gather_ranks(words, buffers, message, rank, sequence, label, first, out, at):
    """Message `sequence`: every rank's bytes into `out[ranks, :]` from column `at`, or WAITING as in `sum_ranks`.

    buffers uint8 `[2, ranks, capacity]`; message uint8 of at most that capacity.
    """
    shared = buffers[sequence & 1]
    ranks, count = shared.shape[0], message.shape[0]
    if first:
        shared[rank, :count] = message
        _announce(words, rank, sequence, label)
    found = _arrival(words, ranks, sequence, label)
    if found == DONE:
        for other in range(ranks):
            out[other, at : at + count] = shared[other, :count]
    return found


def supported() -> bool:
    """Whether this processor has the memory order that the loops were tested on."""
    return platform.machine() in ("x86_64", "AMD64")


def warm_up() -> None:
    """Compile (or load from the cache beside this file) both loops, where they are supported."""
    if not supported():
        return
    words = np.zeros(2 * WORDS, np.int64)
    words[WORDS] = 3
    floats, values = np.zeros((2, 2, 4), np.float32), np.zeros(4, np.float32)
    sum_ranks(words, floats, values, 0, 1, 0, True)
    plain, out = np.zeros((2, 2, 4), np.uint8), np.zeros((2, 4), np.uint8)
    gather_ranks(words, plain, out[0].copy(), 0, 2, 0, True, out, 0)


def compile_counts() -> dict[str, tuple[int, int]]:
    """Per loop: signatures known and cache misses so far; after `warm_up` neither may rise."""
    loops: dict[str, Any] = {"sum_ranks": sum_ranks, "gather_ranks": gather_ranks}
    return {
        name: (len(loop.signatures), sum(loop.stats.cache_misses.values())) for name, loop in loops.items()
    }
