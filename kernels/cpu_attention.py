"""CPU attention: jitted, single-threaded kernels over the paged K/V of one layer, and the merge of partial states.

K/V are float32, or bfloat16 (uint16) or IEEE half (int16) that are widened where they are loaded; queries and sums are
float32. The output may also be bfloat16. Every jitted function and every one it calls stand in this file, because a cached
caller does not notice a changed callee elsewhere. Only contraction is allowed as fast math: NaN in a row that is not visible
must stay harmless, and a row's sums have one order, over chunks of absolute positions, whatever rows share its tile, so a
row's bits do not depend on its batch. Contracts: K140 to K152.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .choices import KVDtype
from .errors import PartitionNotWholeTiles
from .interface import KV_STORAGE, TILE, Activations, Floats, Int32s, KVRows, as_stored

_ROWS = 32
"""Query rows (token x head of the group) that share one pass over K/V; a multiple of `_MICRO`."""

_MICRO = 4
"""Query rows whose sums stay in registers together."""

_CHUNK = 256
"""Tokens scored before their weights are made: a row's maximum moves at most once a chunk."""

_LOG2E = np.float32(1.4426950408889634)
_MASKED = np.float32(-3.0e38)
_SMALLEST = np.float32(-126)
_LN2 = 0.6931471805599453

_jit = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_callee = njit(nogil=True, error_model="numpy", fastmath={"contract"})
_inlined = njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always")


@intrinsic
def _float_of_bits(typing_context, bits):
    """The float32 whose bits are the given int32; a plain bitcast, so that loops around it vectorise."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@intrinsic
def _bfloat16_of_float(typing_context, value):
    """The bits of the nearest bfloat16, ties to even; NaN stays one."""

    def codegen(context, builder, signature, arguments):
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF)))
        quiet = builder.or_(bits, ir.Constant(word, 0x400000))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        kept = builder.select(is_nan, quiet, rounded)
        return builder.trunc(builder.lshr(kept, ir.Constant(word, 16)), ir.IntType(16))

    return types.uint16(types.float32), codegen


def _narrow(value, array):
    """A float32 as `array` keeps it: unchanged, or the bits of the nearest bfloat16, ties to even."""
    return as_stored(np.array([value], np.float32), array.dtype)[0]


@overload(_narrow, inline="always")
def _narrow_of_type(value, array):
    if array.dtype == types.uint16:
        return lambda value, array: _bfloat16_of_float(value)  # pyright: ignore[reportCallIssue]
    return lambda value, array: value


@_inlined
def _exp2(x):
    """2**x for x in [-126, 127], relative error under 2e-7; NaN stays NaN."""
    whole = np.floor(x + np.float32(0.5))
    f = x - whole
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    bits = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23))
    return p * _float_of_bits(bits)  # pyright: ignore[reportCallIssue]


_INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()


class _Vectors:
    """Emits vector code over flat float32 arrays, for the two inner loops that must not spill."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self._context, self._builder, self._lanes = context, builder, lanes
        self._type = self.kind = ir.VectorType(_FLOAT, lanes)
        kind = f"llvm.fmuladd.v{lanes}f32"
        signature = ir.FunctionType(self._type, [self._type] * 3)
        self._fmuladd = cgutils.get_or_insert_function(builder.module, signature, kind)

    def data(self, array_type: Any, array: Any) -> Any:
        """Pointer to an array's first element."""
        return self._context.make_array(array_type)(self._context, self._builder, array).data

    def at(self, pointer: Any, *terms: Any) -> Any:
        """Pointer to the element at the sum of `terms`, each an index value or a number."""
        index = ir.Constant(_INDEX, 0)
        for term in terms:
            index = self._builder.add(index, ir.Constant(_INDEX, term) if isinstance(term, int) else term)
        return self._builder.gep(pointer, [index])

    def load(self, pointer: Any, kind: Any = types.float32) -> Any:
        """Neighbouring elements as float32; 16-bit ones of `kind` uint16 (bfloat16) or int16 (half) are widened."""
        if kind == types.float32:
            return self._load_as(self._type, pointer, 4)
        if kind == types.int16:
            return self._builder.fpext(
                self._load_as(ir.VectorType(ir.HalfType(), self._lanes), pointer, 2), self._type
            )
        bits = ir.VectorType(ir.IntType(32), self._lanes)
        short = self._load_as(ir.VectorType(ir.IntType(16), self._lanes), pointer, 2)
        wide = self._builder.shl(self._builder.zext(short, bits), ir.Constant(bits, [16] * self._lanes))
        return self._builder.bitcast(wide, self._type)

    def _load_as(self, vector_type: Any, pointer: Any, align: int) -> Any:
        vector = self._builder.load(self._builder.bitcast(pointer, vector_type.as_pointer()))
        vector.align = align
        return vector

    def store(self, vector: Any, pointer: Any) -> None:
        kept = self._builder.store(vector, self._builder.bitcast(pointer, self._type.as_pointer()))
        kept.align = 4

    def prefetch(self, pointer: Any) -> None:
        """Ask for the cache line at `pointer`; whatever the address, nothing is read."""
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        signature = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(self._builder.module, signature, "llvm.prefetch.p0")
        for_reading, near, of_data = (ir.Constant(word, number) for number in (0, 3, 1))
        line = self._builder.bitcast(pointer, byte)
        self._builder.call(function, [line, for_reading, near, of_data])

    def splat(self, pointer: Any) -> Any:
        """One element in every lane."""
        index_type = ir.IntType(32)
        one = ir.Constant(self._type, ir.Undefined)
        one = self._builder.insert_element(one, self._builder.load(pointer), ir.Constant(index_type, 0))
        lanes = ir.Constant(ir.VectorType(index_type, self._lanes), [0] * self._lanes)
        return self._builder.shuffle_vector(one, ir.Constant(self._type, ir.Undefined), lanes)

    def zeros(self, count: int) -> list[Any]:
        """Accumulators that end up in registers."""
        zero = ir.Constant(self._type, [0.0] * self._lanes)
        slots = [cgutils.alloca_once(self._builder, self._type) for _ in range(count)]
        for slot in slots:
            self._builder.store(zero, slot)
        return slots

    def fused(self, x: Any, y: Any, z: Any) -> Any:
        """`x * y + z`."""
        return self._builder.call(self._fmuladd, [x, y, z])

    def multiply_add(self, x: Any, y: Any, slot: Any) -> None:
        """`slot += x * y`."""
        total = self._builder.call(self._fmuladd, [x, y, self._builder.load(slot)])
        self._builder.store(total, slot)

    def loop(self, start: Any, stop: Any, step: int) -> Any:
        return cgutils.for_range_slice(self._builder, start, stop, ir.Constant(_INDEX, step), intp=_INDEX)


def _scores_of(tiles: int, prefetch: bool) -> Any:
    """Makes the kernel of scores: 4 query rows against the 16 tokens each of `tiles` (1 or 2) K tiles.

    Arguments, flat arrays: q rows are `head_dim` apart from `q_at`, a tile `[head_dim, 16]` begins at each of `at`, score
    rows are `_CHUNK` apart from `score_at`, a second tile's scores behind the first's. A score is the sum of its even and its
    odd dimensions, each in order, so that its bits do not depend on which kernel of this family computed it. With `prefetch`,
    beside each line of K the same line of V and of the next K tiles (at `next_at`) is asked for: tiles are pages apart, so
    that no hardware does it.
    """

    @intrinsic
    def scores_kernel(typing_context, q, q_at, k, v, at, next_at, scores, score_at, head_dim):
        def codegen(context, builder, signature, arguments):
            vectors = _Vectors(context, builder, TILE)
            q_data, k_data, v_data, score_data = (
                vectors.data(signature.args[i], arguments[i]) for i in (0, 2, 3, 6)
            )
            q_first, score_first, dim = (arguments[i] for i in (1, 7, 8))
            first, following = (
                [builder.extract_value(arguments[i], tile) for tile in range(tiles)] for i in (4, 5)
            )
            kind = signature.args[2].dtype
            lines = 1 if kind == types.float32 else 2
            sums = vectors.zeros(2 * _MICRO * tiles)
            with vectors.loop(ir.Constant(_INDEX, 0), dim, 4) as (d, _):
                for u in range(4):
                    line = builder.mul(d, ir.Constant(_INDEX, TILE))
                    columns = [vectors.load(vectors.at(k_data, one, line, u * TILE), kind) for one in first]
                    if prefetch and u % lines == 0:
                        for one, later in zip(first, following, strict=True):
                            vectors.prefetch(vectors.at(k_data, later, line, u * TILE))
                            vectors.prefetch(vectors.at(v_data, one, line, u * TILE))
                    for r in range(_MICRO):
                        row = builder.mul(dim, ir.Constant(_INDEX, r))
                        value = vectors.splat(vectors.at(q_data, q_first, row, d, u))
                        for tile, column in enumerate(columns):
                            vectors.multiply_add(value, column, sums[2 * (r * tiles + tile) + u % 2])
            for r in range(_MICRO):
                for tile in range(tiles):
                    even, odd = (builder.load(sums[2 * (r * tiles + tile) + u]) for u in range(2))
                    total = builder.fadd(even, odd)
                    vectors.store(total, vectors.at(score_data, score_first, r * _CHUNK + tile * TILE))
            return context.get_dummy_value()

        index = types.int64
        places = types.UniTuple(index, tiles)
        return types.void(q, index, k, v, places, places, scores, index, index), codegen

    return scores_kernel


_scores_1_ahead = _scores_of(1, True)
_scores_2 = _scores_of(2, False)
_scores_2_ahead = _scores_of(2, True)


@intrinsic
def _tile_values(typing_context, weights, weight_at, v, v_at, sums, sum_at, head_dim, tokens):
    """Add the weighted V rows of a tile's first `tokens` tokens to 4 output rows, in token order.

    Flat arrays: weight rows are `_CHUNK` apart, the tile is `[16, head_dim]`, output rows are `head_dim` apart.
    """

    def codegen(context, builder, signature, arguments):
        zero = ir.Constant(_INDEX, 0)
        w_first, v_first, sum_first, dim, count = (arguments[i] for i in (1, 3, 5, 6, 7))

        def slices(start: Any, lanes: int, width: int) -> Any:
            """Whole slices of `lanes * width` columns from `start`; returns where they end."""
            vectors = _Vectors(context, builder, lanes)
            w_data, v_data, sum_data = (vectors.data(signature.args[i], arguments[i]) for i in (0, 2, 4))
            step = lanes * width
            length = builder.and_(builder.sub(dim, start), ir.Constant(_INDEX, -step))
            stop = builder.add(start, length)
            kept = vectors.zeros(_MICRO * width)
            with vectors.loop(start, stop, step) as (d, _):
                places = [
                    vectors.at(sum_data, sum_first, builder.mul(dim, ir.Constant(_INDEX, r)), d, lanes * c)
                    for r in range(_MICRO)
                    for c in range(width)
                ]
                for slot, place in zip(kept, places, strict=True):
                    builder.store(vectors.load(place), slot)
                with vectors.loop(zero, count, 1) as (t, _):
                    line = builder.mul(t, dim)
                    columns = [
                        vectors.load(vectors.at(v_data, v_first, line, d, lanes * c), signature.args[2].dtype)
                        for c in range(width)
                    ]
                    for r in range(_MICRO):
                        weight = vectors.splat(vectors.at(w_data, w_first, r * _CHUNK, t))
                        for c in range(width):
                            vectors.multiply_add(weight, columns[c], kept[r * width + c])
                for slot, place in zip(kept, places, strict=True):
                    vectors.store(builder.load(slot), place)
            return stop

        slices(slices(slices(zero, TILE, 4), TILE, 1), TILE // 2, 1)
        return context.get_dummy_value()

    index = types.int64
    return types.void(weights, index, v, index, sums, index, index, index), codegen


@_callee
def _cap(row, soft_cap):
    """`soft_cap * tanh(score / soft_cap)` in place, over scores that are already in units of log2."""
    cap = np.float32(soft_cap * _LOG2E)
    slope = np.float32(-2) * _LOG2E / cap
    for i in range(row.shape[0]):
        x = row[i]
        e = _exp2(max(abs(x) * slope, _SMALLEST))
        capped = cap * ((np.float32(1) - e) / (np.float32(1) + e))
        row[i] = -capped if x < 0 else capped


_EXP2 = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
"""Coefficients of 2**f for f in [-0.5, 0.5], highest first; relative error under 2e-7."""


@intrinsic
def _weigh_tiles(typing_context, scores, at, tiles, maximum):
    """Turn `tiles` tiles of one row's scores into weights in place; returns (new maximum, sum of the weights).

    A weight is 2**(score - maximum), and 0 from 126 below on. The sum has one lane for each of the 16 tokens of a tile, a tile
    after the other, then the lanes in order: tiles of zeros before or behind change no bit.
    """

    def codegen(context, builder, signature, arguments):
        vectors = _Vectors(context, builder, TILE)
        data = vectors.data(signature.args[0], arguments[0])
        first, count, before = arguments[1:]
        zero, lanes = ir.Constant(_INDEX, 0), range(TILE)

        def constant(value: float) -> Any:
            return ir.Constant(vectors.kind, [value] * TILE)

        def spread(value: Any) -> Any:
            one = builder.insert_element(
                ir.Constant(vectors.kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
            )
            order = ir.Constant(ir.VectorType(ir.IntType(32), TILE), [0] * TILE)
            return builder.shuffle_vector(one, ir.Constant(vectors.kind, ir.Undefined), order)

        def unary(name: str, value: Any) -> Any:
            signature = ir.FunctionType(vectors.kind, [vectors.kind])
            function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{TILE}f32")
            return builder.call(function, [value])

        def larger(one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", one, other), one, other)

        def element(vector: Any, lane: int) -> Any:
            return builder.extract_element(vector, ir.Constant(ir.IntType(32), lane))

        highest = cgutils.alloca_once_value(builder, spread(before))
        with vectors.loop(zero, count, 1) as (tile, _):
            row = vectors.load(vectors.at(data, first, builder.mul(tile, ir.Constant(_INDEX, TILE))))
            builder.store(larger(row, builder.load(highest)), highest)
        top = before
        for lane in lanes:
            top = larger(element(builder.load(highest), lane), top)
        shift, total = spread(top), cgutils.alloca_once_value(builder, constant(0.0))
        whole_type = ir.VectorType(ir.IntType(32), TILE)
        with vectors.loop(zero, count, 1) as (tile, _):
            place = vectors.at(data, first, builder.mul(tile, ir.Constant(_INDEX, TILE)))
            x = builder.fsub(vectors.load(place), shift)
            gone = builder.fcmp_ordered("<", x, constant(float(_SMALLEST)))
            x = builder.select(gone, constant(float(_SMALLEST)), x)
            whole = unary("rint", x)
            rest = builder.fsub(x, whole)
            p = constant(_EXP2[0])
            for coefficient in _EXP2[1:]:
                p = vectors.fused(p, rest, constant(coefficient))
            exponent = builder.add(builder.fptosi(whole, whole_type), ir.Constant(whole_type, [127] * TILE))
            power = builder.bitcast(builder.shl(exponent, ir.Constant(whole_type, [23] * TILE)), vectors.kind)
            weight = builder.select(gone, constant(0.0), builder.fmul(p, power))
            vectors.store(weight, place)
            builder.store(builder.fadd(builder.load(total), weight), total)
        lanes_sum = element(builder.load(total), 0)
        for lane in range(1, TILE):
            lanes_sum = builder.fadd(lanes_sum, element(builder.load(total), lane))
        return context.make_tuple(builder, signature.return_type, (top, lanes_sum))

    index = types.int64
    return types.UniTuple(types.float32, 2)(scores, index, index, types.float32), codegen


@_callee
def _weigh(scores, at, tiles, low, high, soft_cap, maximum):
    """Turn a row's scores of some tiles into weights, in place; returns the row's new maximum and the weights' sum.

    Tokens outside `[low, high)` weigh nothing, whatever their scores are; zeros leave every partial sum as it is, so
    that the result does not depend on how many tiles beside the visible ones were passed.
    """
    length = tiles * TILE
    start = min(max(low, 0), length)
    stop = max(min(high, length), start)
    if start == stop:
        for i in range(length):
            scores[at + i] = 0
        return maximum, np.float32(0)
    if soft_cap > 0:
        _cap(scores[at : at + length], soft_cap)
    for i in range(start):
        scores[at + i] = _MASKED
    for i in range(stop, length):
        scores[at + i] = _MASKED
    return _weigh_tiles(scores, at, tiles, maximum)  # pyright: ignore[reportCallIssue]


class _Work(NamedTuple):
    """One call's buffers: `[_ROWS]` query rows, flat, and what is known of each so far."""

    rows: Any
    """`[_ROWS * head_dim]`, scaled"""
    acc: Any
    """`[_ROWS * head_dim]` weighted sums of V rows, to be divided by `sums`"""
    scores: Any
    """`[_ROWS * _CHUNK]`"""
    maxima: Any
    sums: Any
    lows: Any
    """`[_ROWS]` int64: the first token that each row sees"""
    highs: Any
    """`[_ROWS]` int64: where the tokens that each row sees end"""


@_callee
def _new_work(head_dim):
    return _Work(
        np.zeros(_ROWS * head_dim, np.float32),
        np.empty(_ROWS * head_dim, np.float32),
        np.empty(_ROWS * _CHUNK, np.float32),
        np.empty(_ROWS, np.float32),
        np.empty(_ROWS, np.float32),
        np.empty(_ROWS, np.int64),
        np.empty(_ROWS, np.int64),
    )


class _Sight(NamedTuple):
    """What the query rows of one sequence may see of its K/V rows."""

    first: Any
    """No row sees a token below this one"""
    context: Any
    """No row sees a token from this one on"""
    start: Any
    """Position of the first query row, where `causal`"""
    causal: Any
    window: Any
    """A row sees at most so many tokens, its own included; 0 is no limit; only where `causal`"""


@_callee
def _load_rows(work, q, first, rows, base, kv, group, scale, sight):
    """Fill the buffers with the query rows from `base` on, whole micro tiles of them, and what each sees."""
    head_dim = q.shape[2]
    for r in range((min(_ROWS, rows - base) + _MICRO - 1) // _MICRO * _MICRO):
        work.maxima[r] = _MASKED
        work.sums[r] = 0
        row = min(base + r, rows - 1)
        position = sight.start + row // group
        work.lows[r] = max(sight.first, position + 1 - sight.window) if sight.window > 0 else sight.first
        work.highs[r] = min(sight.context, position + 1) if sight.causal else sight.context
        source = q[first + row // group, kv * group + row % group]
        for d in range(head_dim):
            work.acc[r * head_dim + d] = 0
            work.rows[r * head_dim + d] = source[d] * (scale * _LOG2E)


@_callee
def _attend(work, count, first, stop, soft_cap, k_layer, v_layer, kv, table):
    """Run `count` buffered rows over the tokens in `[first, stop)` that they see, chunk by chunk of absolute positions.

    In a chunk: scores, then weights, then weighted V rows. Both limits of what a row sees rise with the row. Many rows take
    two tiles at a time, which serves more products for each value loaded; a single group of rows takes one, which leaves
    room near the core for the lines asked for ahead, and only the first group asks.
    """
    kv_heads, head_dim = k_layer.shape[1], k_layer.shape[2]
    k, v, tile_size = k_layer.reshape(-1), v_layer.reshape(-1), head_dim * TILE
    begin = max(work.lows[0], first)
    end = min(work.highs[count - 1], stop)
    for chunk in range(begin // _CHUNK * _CHUNK, end, _CHUNK):
        j_first = max(begin - chunk, 0) // TILE
        j_stop = (min(_CHUNK, end - chunk) + TILE - 1) // TILE
        if count <= _MICRO:
            for j in range(j_first, j_stop):
                at = (np.int64(table[chunk // TILE + j]) * kv_heads + kv) * tile_size
                following = (
                    np.int64(table[chunk // TILE + min(j + 1, j_stop - 1)]) * kv_heads + kv
                ) * tile_size
                _scores_1_ahead(  # pyright: ignore[reportCallIssue]
                    work.rows, 0, k, v, (at,), (following,), work.scores, j * TILE, head_dim
                )
        else:
            for j in range(j_first, j_stop, 2):
                last, to = j_stop - 1, j * TILE
                at = (np.int64(table[chunk // TILE + j]) * kv_heads + kv) * tile_size
                beside = (np.int64(table[chunk // TILE + min(j + 1, last)]) * kv_heads + kv) * tile_size
                next_at = (np.int64(table[chunk // TILE + min(j + 2, last)]) * kv_heads + kv) * tile_size
                next_beside = (np.int64(table[chunk // TILE + min(j + 3, last)]) * kv_heads + kv) * tile_size
                pair, later = (at, beside), (next_at, next_beside)
                # A last tile alone: as a pair it would be scored past the end of its chunk's row when it is the sixteenth.
                for m in range(0, count if j == last else 0, _MICRO):
                    if work.highs[m + _MICRO - 1] > chunk + to and work.lows[m] < chunk + to + TILE:
                        _scores_1_ahead(  # pyright: ignore[reportCallIssue]
                            work.rows,
                            m * head_dim,
                            k,
                            v,
                            (at,),
                            (at,),
                            work.scores,
                            m * _CHUNK + to,
                            head_dim,
                        )
                for m in range(0, count if j < last else 0, _MICRO):
                    if work.highs[m + _MICRO - 1] > chunk + to and work.lows[m] < chunk + to + 2 * TILE:
                        if m == 0:
                            _scores_2_ahead(  # pyright: ignore[reportCallIssue]
                                work.rows, 0, k, v, pair, later, work.scores, to, head_dim
                            )
                        else:
                            _scores_2(  # pyright: ignore[reportCallIssue]
                                work.rows,
                                m * head_dim,
                                k,
                                v,
                                pair,
                                later,
                                work.scores,
                                m * _CHUNK + to,
                                head_dim,
                            )
        for r in range(count):
            m = r // _MICRO * _MICRO
            low = max(work.lows[m], first) - chunk
            high = min(work.highs[m + _MICRO - 1], stop) - chunk
            if low < min(high, _CHUNK) and high > 0:
                tile = max(low, 0) // TILE
                tiles = (min(high, _CHUNK) + TILE - 1) // TILE - tile
                origin = chunk + tile * TILE
                low = max(work.lows[r], first) - origin
                high = min(work.highs[r], stop) - origin
                at = r * _CHUNK + tile * TILE
                top, total = _weigh(work.scores, at, tiles, low, high, soft_cap, work.maxima[r])
                factor = _exp2(max(work.maxima[r] - top, _SMALLEST))
                work.maxima[r] = top
                work.sums[r] = work.sums[r] * factor + total
                for d in range(r * head_dim, (r + 1) * head_dim):
                    work.acc[d] *= factor
        for j in range(j_first, j_stop):
            at = (np.int64(table[chunk // TILE + j]) * kv_heads + kv) * tile_size
            origin = chunk + j * TILE
            for m in range(0, count, _MICRO):
                low = max(max(work.lows[m], first) - origin, 0)
                high = min(min(work.highs[m + _MICRO - 1], stop) - origin, TILE)
                if low < high:
                    by = m * _CHUNK + j * TILE + low
                    _tile_values(  # pyright: ignore[reportCallIssue]
                        work.scores, by, v, at + low * head_dim, work.acc, m * head_dim, head_dim, high - low
                    )


@_callee
def _finish(acc, at, empty, total, to):
    """Write one row's output: its sums over `total`, or zeros where it saw no token (`empty`, from its limits: K150).

    Takes only what it needs: the whole of `_Work` costs a count of references for each of its arrays.
    """
    if empty:
        for d in range(to.shape[0]):
            to[d] = 0
        return
    factor = np.float32(1) / total
    for d in range(to.shape[0]):
        to[d] = _narrow(acc[at + d] * factor, to)


@_callee
def _mass(empty, maximum, total):
    """One row's log-sum-exp, natural; minus infinity where it saw no token."""
    if empty:
        return np.float32(-np.inf)
    return np.float32((np.float64(maximum) + np.log2(np.float64(total))) * _LN2)


@_jit
def attention(q, k_layer, v_layer, tile_tables, seq_starts, first_rows, context_lens, rule, scale, out, lse):
    """Attention of each sequence's query rows over its K/V rows `[first_rows[s], context_lens[s])` of one layer.

    q `[T, heads, head_dim]` float32, out of the same shape; tile_tables `[S, max_tiles]` int32 (block tables after
    `split_table`); seq_starts `[S+1]`, first_rows, context_lens `[S]` int32; rule `(causal, window, soft_cap)`;
    lse `[T, heads]` float32 is written unless it has no rows.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_layer.shape[1]
    group = heads // kv_heads
    causal, window, soft_cap = rule
    work = _new_work(head_dim)
    for seq in range(context_lens.shape[0]):
        first = np.int64(seq_starts[seq])
        tokens = np.int64(seq_starts[seq + 1]) - first
        context = np.int64(context_lens[seq])
        sight = _Sight(np.int64(first_rows[seq]), context, context - tokens, causal, window)
        rows = tokens * group
        for kv in range(kv_heads):
            for base in range(0, rows, _ROWS):
                count = min(_ROWS, rows - base)
                _load_rows(work, q, first, rows, base, kv, group, scale, sight)
                _attend(work, count, 0, context, soft_cap, k_layer, v_layer, kv, tile_tables[seq])
                for r in range(count):
                    token, head = first + (base + r) // group, kv * group + (base + r) % group
                    empty = work.lows[r] >= work.highs[r]
                    _finish(work.acc, r * head_dim, empty, work.sums[r], out[token, head])
                    if lse.shape[0] > 0:
                        lse[token, head] = _mass(empty, work.maxima[r], work.sums[r])


@_callee
def _merge_row(to, a, other, b):
    """State (other, b) into state (to, a) of one row; returns the merged log-sum-exp."""
    if b == -np.inf:
        return a
    if a == -np.inf:
        for d in range(to.shape[0]):
            to[d] = other[d]
        return b
    top = max(np.float64(a), np.float64(b))
    weight_a, weight_b = np.exp(np.float64(a) - top), np.exp(np.float64(b) - top)
    total = weight_a + weight_b
    share_a, share_b = np.float32(weight_a / total), np.float32(weight_b / total)
    for d in range(to.shape[0]):
        to[d] = to[d] * share_a + other[d] * share_b
    return np.float32(top + np.log(total))


@_jit
def merge_states(out_a, lse_a, out_b, lse_b):
    """State b into state a, in place: each output weighs as much as its log-sum-exp says (K149).

    out `[T, heads, head_dim]` float32, lse `[T, heads]` float32 natural. A row whose lse is minus infinity saw no
    token: it is recognised before any exponent and leaves the other as it is, bit for bit (K150).
    """
    for t in range(out_a.shape[0]):
        for h in range(out_a.shape[1]):
            lse_a[t, h] = _merge_row(out_a[t, h], lse_a[t, h], out_b[t, h], lse_b[t, h])


@_jit
def merge_rows(out_a, lse_a, rows, out_b, lse_b):
    """As `merge_states`, row i of state b into row `rows[i]` (int64) of state a, in the order of `rows`."""
    for i in range(rows.shape[0]):
        t = rows[i]
        for h in range(out_a.shape[1]):
            lse_a[t, h] = _merge_row(out_a[t, h], lse_a[t, h], out_b[i, h], lse_b[i, h])


@_jit
def narrow_rows(rows, out):
    """Float32 rows `[T, heads, head_dim]` as `out` keeps them: float32, or the bits of the nearest bfloat16."""
    for t in range(rows.shape[0]):
        for h in range(rows.shape[1]):
            to, row = out[t, h], rows[t, h]
            for d in range(to.shape[0]):
                to[d] = _narrow(row[d], to)


@_jit
def attention_partitions(
    q, k_layer, v_layer, tile_tables, seq_starts, context_lens, partition, rule, scale, out
):
    """As `attention` without its states, each row's tokens cut at multiples of `partition` and merged in that order.

    Every sequence passes through as many partitions as the longest context has, as on a grid; those past its own
    context, and those before a window, are empty states.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_layer.shape[1]
    group = heads // kv_heads
    causal, window, soft_cap = rule
    work = _new_work(head_dim)
    whole, part = np.empty((_ROWS, head_dim), np.float32), np.empty(head_dim, np.float32)
    masses = np.empty(_ROWS, np.float32)
    longest = np.int64(0)
    for seq in range(context_lens.shape[0]):
        longest = max(longest, np.int64(context_lens[seq]))
    for seq in range(context_lens.shape[0]):
        first = np.int64(seq_starts[seq])
        tokens = np.int64(seq_starts[seq + 1]) - first
        context = np.int64(context_lens[seq])
        sight = _Sight(np.int64(0), context, context - tokens, causal, window)
        rows = tokens * group
        for kv in range(kv_heads):
            for base in range(0, rows, _ROWS):
                count = min(_ROWS, rows - base)
                masses[:] = -np.inf
                whole[:] = 0
                for begin in range(0, longest, partition):
                    end = begin + partition
                    _load_rows(work, q, first, rows, base, kv, group, scale, sight)
                    _attend(work, count, begin, end, soft_cap, k_layer, v_layer, kv, tile_tables[seq])
                    for r in range(count):
                        empty = max(work.lows[r], begin) >= min(work.highs[r], end)
                        _finish(work.acc, r * head_dim, empty, work.sums[r], part)
                        mass = _mass(empty, work.maxima[r], work.sums[r])
                        masses[r] = _merge_row(whole[r], masses[r], part, mass)
                for r in range(count):
                    to = out[first + (base + r) // group, kv * group + (base + r) % group]
                    for d in range(head_dim):
                        to[d] = _narrow(whole[r, d], to)


def paged_attention(
    q: Floats,
    k_layer: KVRows,
    v_layer: KVRows,
    tile_tables: Int32s,
    seq_starts: Int32s,
    context_lens: Int32s,
    scale: np.float32,
    out: Activations,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Causal attention of the batch's rows over one layer's pool: prefill, decode and mixtures are the same call.

    q, out `[T, heads, head_dim]`; tile_tables `[S, max_tiles]` (block tables after `split_table`); seq_starts
    `[S+1]`, context_lens `[S]`. A row sees at most its last `window` tokens, its own included (0: no limit);
    `soft_cap` c turns a scaled score s into c * tanh(s / c) (0: none).
    """
    firsts = np.zeros_like(context_lens)
    rule = (True, window, np.float32(soft_cap))
    attention(q, k_layer, v_layer, tile_tables, seq_starts, firsts, context_lens, rule, scale, out, _no_lse())


def paged_attention_states(
    q: Floats,
    k_layer: KVRows,
    v_layer: KVRows,
    tile_tables: Int32s,
    seq_starts: Int32s,
    first_rows: Int32s,
    context_lens: Int32s,
    causal: bool,
    scale: np.float32,
    out: Floats,
    lse: Floats,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Partial attention over the K/V rows `[first_rows[s], context_lens[s])` only, with its log-sum-exp.

    As `paged_attention`, and: with `causal` false every query row sees the whole range, so that rows of many
    requests can share one pass over K/V ("one sequence" of a shared prefix). out `[T, heads, head_dim]` and lse
    `[T, heads]` (natural) are written, float32; a row that sees nothing gets zeros and minus infinity. `window`
    counts from the query rows' own positions and so needs `causal`.
    """
    rule = (causal, window, np.float32(soft_cap))
    attention(q, k_layer, v_layer, tile_tables, seq_starts, first_rows, context_lens, rule, scale, out, lse)


def paged_attention_split(
    q: Floats,
    k_layer: KVRows,
    v_layer: KVRows,
    tile_tables: Int32s,
    seq_starts: Int32s,
    context_lens: Int32s,
    partition: int,
    scale: np.float32,
    out: Floats,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """`paged_attention` in partitions of so many tokens, whose states are merged in order (K144).

    Raises: `PartitionNotWholeTiles` (nothing was written).
    """
    if partition <= 0 or partition % TILE:
        raise PartitionNotWholeTiles(partition, TILE)
    rule = (True, window, np.float32(soft_cap))
    attention_partitions(
        q, k_layer, v_layer, tile_tables, seq_starts, context_lens, partition, rule, scale, out
    )


def _no_lse() -> Floats:
    return np.empty((0, 0), np.float32)


def warm_up(kv_dtype: KVDtype = "float32") -> None:
    """Compile (or load from the cache beside this file) every signature that a rank with this K/V storage uses."""
    storage = KV_STORAGE[kv_dtype]
    k, v = np.zeros((1, 1, TILE, TILE), storage), np.zeros((1, 1, TILE, TILE), storage)
    rows, mass = np.zeros((1, 1, TILE), np.float32), np.zeros((1, 1), np.float32)
    table, starts, lens = np.zeros((1, 1), np.int32), np.array([0, 1], np.int32), np.ones(1, np.int32)
    outputs: tuple[Activations, ...] = (np.empty_like(rows), np.empty((1, 1, TILE), np.uint16))
    for out in outputs:
        paged_attention(rows, k, v, table, starts, lens, np.float32(1), out)
    paged_attention_split(rows, k, v, table, starts, lens, TILE, np.float32(1), np.empty_like(rows))
    merge_states(rows, mass, rows, mass)
    merge_rows(rows, mass, np.zeros(1, np.int64), rows.copy(), mass.copy())
    narrow_rows(rows, np.empty(rows.shape, np.uint16))


def compile_counts() -> dict[str, tuple[int, int]]:
    """Per kernel: signatures known and cache misses so far; after `warm_up` neither may rise."""
    return {
        name: (len(kernel.signatures), sum(kernel.stats.cache_misses.values()))
        for name, kernel in _kernels().items()
    }


def _kernels() -> dict[str, Any]:
    return {
        "attention": attention,
        "attention_partitions": attention_partitions,
        "merge_states": merge_states,
        "merge_rows": merge_rows,
        "narrow_rows": narrow_rows,
    }
