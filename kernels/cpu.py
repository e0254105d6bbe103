"""CPU backend: jitted, single-threaded kernels over a `KVPool` and over a step's activations.

K/V, sums and rotations are float32. Activations that meet a matrix product may also be bfloat16, carried as uint16
since numba has no such type: `_widen` and `_narrow` are the two borders.

Every jitted function and every one it calls stand in this file, because a cached caller does not notice a changed
callee elsewhere. Only contraction is allowed as fast math: NaN in a row that is not visible must stay harmless, and a
row's sum has one order whatever rows share its tile, so a row's bits do not depend on its batch. `warm_up` compiles
every signature that a rank uses. Contracts: K140, K141, K142, K143, K146.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from .pool import TILE, KVPool

_ROWS = 32
"""Query rows (token x head of the group) that share one pass over K/V; a multiple of `_MICRO`."""

_MICRO = 4
"""Query rows whose sums stay in registers together."""

_CHUNK = 256
"""Tokens scored before their weights are made: a row's maximum moves at most once a chunk."""

_LOG2E = np.float32(1.4426950408889634)
_MASKED = np.float32(-3.0e38)
_SMALLEST = np.float32(-126)

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
def _bits_of_float(typing_context, value):
    """The inverse of `_float_of_bits`."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), codegen


def _widen(value):
    """A float32 as it is, or the float32 that a bfloat16's bits name."""
    raise NotImplementedError


def _narrow(value, array):
    """A float32 as `array` keeps it: unchanged, or the bits of the nearest bfloat16, ties to even."""
    raise NotImplementedError


@overload(_widen, inline="always")
def _widen_of_type(value):
    if value == types.uint16:
        return lambda value: _float_of_bits(np.int32(np.int32(value) << np.int32(16)))  # pyright: ignore
    return lambda value: value


@overload(_narrow, inline="always")
def _narrow_of_type(value, array):
    if array.dtype != types.uint16:
        return lambda value, array: value

    def to_bfloat16(value, array):
        bits = _bits_of_float(value)  # pyright: ignore[reportCallIssue]
        odd = np.int32((bits >> np.int32(16)) & np.int32(1))
        rounded = np.int32(bits + np.int32(0x7FFF) + odd)
        quiet = np.int32(bits | np.int32(0x400000))
        return np.uint16((rounded if value == value else quiet) >> np.int32(16))

    return to_bfloat16


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


@_jit
def write_rows(k_layer, v_layer, k_rows, v_rows, slots):
    """Store rows `[T, kv_heads, head_dim]` of K and V at `slots[T]` of one layer."""
    kv_heads, head_dim = k_rows.shape[1], k_rows.shape[2]
    for t in range(slots.shape[0]):
        tile = slots[t] // TILE
        lane = slots[t] % TILE
        for h in range(kv_heads):
            for d in range(head_dim):
                k_layer[tile, h, d, lane] = k_rows[t, h, d]
                v_layer[tile, h, lane, d] = v_rows[t, h, d]


@_jit
def rotate_and_write(qkv, cos, sin, positions, slots, k_layer, v_layer, q_out):
    """Split a fused projection, rotate q and k, store k and v.

    qkv `[T, (heads + 2 * kv_heads) * head_dim]`; cos, sin `[max_positions, head_dim / 2]`; q_out
    `[T, heads, head_dim]` is written; k and v go to `slots[T]` of one layer.
    """
    kv_heads, head_dim = k_layer.shape[1], k_layer.shape[2]
    heads = q_out.shape[1]
    half = head_dim // 2
    for t in range(slots.shape[0]):
        row = qkv[t]
        c = cos[positions[t]]
        s = sin[positions[t]]
        tile = slots[t] // TILE
        lane = slots[t] % TILE
        for h in range(heads):
            base = h * head_dim
            q = q_out[t, h]
            for d in range(half):
                a = _widen(row[base + d])
                b = _widen(row[base + half + d])
                q[d] = a * c[d] - b * s[d]
                q[half + d] = b * c[d] + a * s[d]
        for h in range(kv_heads):
            base = (heads + h) * head_dim
            k = k_layer[tile, h]
            for d in range(half):
                a = _widen(row[base + d])
                b = _widen(row[base + half + d])
                k[d, lane] = a * c[d] - b * s[d]
                k[half + d, lane] = b * c[d] + a * s[d]
            base = (heads + kv_heads + h) * head_dim
            v = v_layer[tile, h, lane]
            for d in range(head_dim):
                v[d] = _widen(row[base + d])


@_jit
def add_rms_norm(x, delta, weight, eps, out):
    """`x += delta` in place, then `out = rms_norm(x) * weight`; x, delta, out `[T, hidden]`."""
    hidden = x.shape[1]
    lanes = np.empty(TILE, np.float32)
    whole = hidden // TILE * TILE
    for t in range(x.shape[0]):
        row = x[t]
        add = delta[t]
        to = out[t]
        for i in range(TILE):
            lanes[i] = 0
        for c in range(0, whole, TILE):
            for i in range(TILE):
                value = row[c + i] + _widen(add[c + i])
                row[c + i] = value
                lanes[i] += value * value
        total = np.float32(0)
        for i in range(TILE):
            total += lanes[i]
        for c in range(whole, hidden):
            value = row[c] + _widen(add[c])
            row[c] = value
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(hidden) + eps)
        for c in range(hidden):
            to[c] = _narrow(row[c] * factor * weight[c], to)


@_jit
def silu_mul(gate_up, out):
    """`out = silu(gate) * up`; gate_up `[T, 2 * ffn]` holds gate, then up; out `[T, ffn]`."""
    ffn = out.shape[1]
    for t in range(out.shape[0]):
        gate = gate_up[t, :ffn]
        up = gate_up[t, ffn:]
        to = out[t]
        for i in range(ffn):
            g = _widen(gate[i])
            exponent = min(max(-g * _LOG2E, _SMALLEST), np.float32(126))
            to[i] = _narrow(g / (np.float32(1) + _exp2(exponent)) * _widen(up[i]), to)


_INDEX = ir.IntType(64)
_FLOAT = ir.FloatType()


class _Vectors:
    """Emits vector code over flat float32 arrays, for the two inner loops that must not spill."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self._context, self._builder, self._lanes = context, builder, lanes
        self._type = ir.VectorType(_FLOAT, lanes)
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

    def load(self, pointer: Any) -> Any:
        vector = self._builder.load(self._builder.bitcast(pointer, self._type.as_pointer()))
        vector.align = 4
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

    def multiply_add(self, x: Any, y: Any, slot: Any) -> None:
        """`slot += x * y`."""
        total = self._builder.call(self._fmuladd, [x, y, self._builder.load(slot)])
        self._builder.store(total, slot)

    def loop(self, start: Any, stop: Any, step: int) -> Any:
        return cgutils.for_range_slice(self._builder, start, stop, ir.Constant(_INDEX, step), intp=_INDEX)


@intrinsic
def _tile_scores(typing_context, q, q_at, k, v, at, next_at, scores, score_at, head_dim):
    """Scores of 4 query rows against the 16 tokens of one K tile.

    Flat arrays: q rows are `head_dim` apart, the tile `[head_dim, 16]` begins at `at`, score rows are `_CHUNK` apart.
    Beside each line of K, the same line of this tile's V and of the next tile's K (at `next_at`) is asked for: tiles
    are pages apart, so that no hardware does it.
    """

    def codegen(context, builder, signature, arguments):
        vectors = _Vectors(context, builder, TILE)
        q_data, k_data, v_data, score_data = (
            vectors.data(signature.args[i], arguments[i]) for i in (0, 2, 3, 6)
        )
        q_first, first, following, score_first, dim = (arguments[i] for i in (1, 4, 5, 7, 8))
        sums = vectors.zeros(2 * _MICRO)
        with vectors.loop(ir.Constant(_INDEX, 0), dim, 4) as (d, _):
            for u in range(4):
                line = builder.mul(d, ir.Constant(_INDEX, TILE))
                column = vectors.load(vectors.at(k_data, first, line, u * TILE))
                vectors.prefetch(vectors.at(k_data, following, line, u * TILE))
                vectors.prefetch(vectors.at(v_data, first, line, u * TILE))
                for r in range(_MICRO):
                    row = builder.mul(dim, ir.Constant(_INDEX, r))
                    value = vectors.splat(vectors.at(q_data, q_first, row, d, u))
                    vectors.multiply_add(value, column, sums[r + _MICRO * (u % 2)])
        for r in range(_MICRO):
            total = builder.fadd(builder.load(sums[r]), builder.load(sums[r + _MICRO]))
            vectors.store(total, vectors.at(score_data, score_first, r * _CHUNK))
        return context.get_dummy_value()

    index = types.int64
    return types.void(q, index, k, v, index, index, scores, index, index), codegen


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
                        vectors.load(vectors.at(v_data, v_first, line, d, lanes * c)) for c in range(width)
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
def _weigh(scores, at, tiles, visible, maximum, lanes):
    """Turn a row's scores of a chunk into weights, in place; returns the row's new maximum and the weights' sum.

    Tokens from `visible` on weigh nothing, whatever their scores are.
    """
    row = scores[at : at + tiles * TILE]
    hidden = max(visible, 0)
    for i in range(hidden, row.shape[0]):
        row[i] = _MASKED
    for i in range(TILE):
        lanes[i] = maximum
    for c in range(0, row.shape[0], TILE):
        for i in range(TILE):
            lanes[i] = row[c + i] if row[c + i] > lanes[i] else lanes[i]
    top = maximum
    for i in range(TILE):
        top = max(top, lanes[i])
    for i in range(row.shape[0]):
        x = row[i] - top
        row[i] = _exp2(_SMALLEST if x < _SMALLEST else x)
    for i in range(hidden, row.shape[0]):
        row[i] = 0
    for i in range(TILE):
        lanes[i] = 0
    for c in range(0, row.shape[0], TILE):
        for i in range(TILE):
            lanes[i] += row[c + i]
    total = np.float32(0)
    for i in range(TILE):
        total += lanes[i]
    return top, total


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
    lanes: Any


@_callee
def _visible(start, row, rows, group, chunk):
    """How many tokens from `chunk` on a query row sees; a row past the last one counts as the last."""
    return start + min(row, rows - 1) // group + 1 - chunk


@_callee
def _load_rows(work, q, first, rows, base, kv, group, scale):
    """Fill the buffers with the query rows from `base` on, whole micro tiles of them."""
    head_dim = q.shape[2]
    for r in range((min(_ROWS, rows - base) + _MICRO - 1) // _MICRO * _MICRO):
        work.maxima[r] = _MASKED
        work.sums[r] = 0
        row = min(base + r, rows - 1)
        source = q[first + row // group, kv * group + row % group]
        for d in range(head_dim):
            work.acc[r * head_dim + d] = 0
            work.rows[r * head_dim + d] = source[d] * (scale * _LOG2E)


@_callee
def _attend(work, start, rows, base, group, k_layer, v_layer, kv, table):
    """Run the buffered rows over all tokens they see, a chunk at a time: scores, weights, weighted V rows."""
    kv_heads, head_dim = k_layer.shape[1], k_layer.shape[2]
    k, v, tile_size = k_layer.reshape(-1), v_layer.reshape(-1), head_dim * TILE
    count = min(_ROWS, rows - base)
    seen_by_all = start + (base + count - 1) // group + 1
    for chunk in range(0, seen_by_all, _CHUNK):
        tiles = (min(_CHUNK, seen_by_all - chunk) + TILE - 1) // TILE
        for j in range(tiles):
            at = (np.int64(table[chunk // TILE + j]) * kv_heads + kv) * tile_size
            following = (np.int64(table[chunk // TILE + min(j + 1, tiles - 1)]) * kv_heads + kv) * tile_size
            for m in range(0, count, _MICRO):
                if j * TILE < _visible(start, base + m + _MICRO - 1, rows, group, chunk):
                    to = m * _CHUNK + j * TILE
                    _tile_scores(  # pyright: ignore[reportCallIssue]
                        work.rows, m * head_dim, k, v, at, following, work.scores, to, head_dim
                    )
        for r in range(count):
            widest = _visible(start, base + r // _MICRO * _MICRO + _MICRO - 1, rows, group, chunk)
            if widest > 0:
                used = min(tiles, (widest + TILE - 1) // TILE)
                visible = _visible(start, base + r, rows, group, chunk)
                top, total = _weigh(work.scores, r * _CHUNK, used, visible, work.maxima[r], work.lanes)
                factor = _exp2(max(work.maxima[r] - top, _SMALLEST))
                work.maxima[r] = top
                work.sums[r] = work.sums[r] * factor + total
                for d in range(r * head_dim, (r + 1) * head_dim):
                    work.acc[d] *= factor
        for j in range(tiles):
            at = (np.int64(table[chunk // TILE + j]) * kv_heads + kv) * tile_size
            for m in range(0, count, _MICRO):
                widest = _visible(start, base + m + _MICRO - 1, rows, group, chunk)
                tokens = min(TILE, widest - j * TILE)
                if tokens > 0:
                    by = m * _CHUNK + j * TILE
                    _tile_values(  # pyright: ignore[reportCallIssue]
                        work.scores, by, v, at, work.acc, m * head_dim, head_dim, tokens
                    )


@_jit
def paged_attention(q, k_layer, v_layer, tile_tables, seq_starts, context_lens, scale, out):
    """Causal attention of the batch's rows over one layer's pool.

    q, out `[T, heads, head_dim]`; tile_tables `[S, max_tiles]` int32 (block tables after `split_table`);
    seq_starts `[S+1]`, context_lens `[S]` int32. Prefill, decode and mixtures are the same call.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_layer.shape[1]
    group = heads // kv_heads
    work = _Work(
        np.zeros(_ROWS * head_dim, np.float32),
        np.empty(_ROWS * head_dim, np.float32),
        np.empty(_ROWS * _CHUNK, np.float32),
        np.empty(_ROWS, np.float32),
        np.empty(_ROWS, np.float32),
        np.empty(TILE, np.float32),
    )
    for seq in range(context_lens.shape[0]):
        first = seq_starts[seq]
        tokens = seq_starts[seq + 1] - first
        start = context_lens[seq] - tokens
        rows = tokens * group
        for kv in range(kv_heads):
            for base in range(0, rows, _ROWS):
                _load_rows(work, q, first, rows, base, kv, group, scale)
                _attend(work, start, rows, base, group, k_layer, v_layer, kv, tile_tables[seq])
                for r in range(min(_ROWS, rows - base)):
                    token, head = first + (base + r) // group, kv * group + (base + r) % group
                    factor = np.float32(1) / work.sums[r]
                    to = out[token, head]
                    for d in range(head_dim):
                        to[d] = _narrow(work.acc[r * head_dim + d] * factor, to)


def warm_up() -> None:
    """Compile (or load from the cache beside this file) every signature of every kernel that a rank uses."""
    pool = KVPool(1, 2, 1, TILE)
    k, v = pool.k[0], pool.v[0]
    rows = np.zeros((1, 1, TILE), np.float32)
    table = np.zeros((1, 2), np.int32)
    starts, lens = np.array([0, 1], np.int32), np.ones(1, np.int32)
    index = np.zeros(1, np.int64)
    angles = np.zeros((1, TILE // 2), np.float32)
    hidden = np.zeros((1, TILE), np.float32)
    write_rows(k, v, rows, rows, index)
    for activation in (np.float32, np.uint16):
        wide, narrow = np.zeros((1, 3 * TILE), activation), np.zeros((1, TILE), activation)
        rotate_and_write(wide, angles, angles, index, index, k, v, np.empty_like(rows))
        paged_attention(rows, k, v, table, starts, lens, np.float32(1), np.empty((1, 1, TILE), activation))
        for delta in (hidden.copy(), narrow):
            add_rms_norm(hidden, delta, hidden[0].copy(), np.float32(1), narrow.copy())
        silu_mul(np.zeros((1, 2 * TILE), activation), narrow)


def compile_counts() -> dict[str, tuple[int, int]]:
    """Per kernel: signatures known and cache misses so far; after `warm_up` neither may rise."""
    return {
        name: (len(kernel.signatures), sum(kernel.stats.cache_misses.values()))
        for name, kernel in _kernels().items()
    }


def _kernels() -> dict[str, Any]:
    return {
        "write_rows": write_rows,
        "rotate_and_write": rotate_and_write,
        "paged_attention": paged_attention,
        "add_rms_norm": add_rms_norm,
        "silu_mul": silu_mul,
    }
