"""CPU kernels that touch rows, not scores: K/V writes, copies, zeroing and counting; norms and activation of a step.

Single-threaded. K/V are float32, or bfloat16 (uint16) or IEEE half (int16) that are widened and narrowed at the borders
`_widen` and `_narrow`; sums and rotations are float32. Every jitted function and every one it calls stand in this file,
because a cached caller does not notice a changed callee elsewhere: the scalar helpers stand in `cpu.py` too.
Invariant: copies, zeroes and counts touch exactly the rows and blocks named. Contracts: K140, K143.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from .choices import KVDtype
from .interface import KV_STORAGE, TILE, as_stored, widen_rows

_LOG2E = np.float32(1.4426950408889634)
_SMALLEST = np.float32(-126)
_LINE = 4096
"""Bytes looked at together when blocks are searched for what is not zero."""

_jit = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_callee = njit(nogil=True, error_model="numpy", fastmath={"contract"})
_inlined = njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always")


@intrinsic
def _float_of_bits(typing_context, bits):
    """The float32 whose bits are the given int32; a plain bitcast, so that loops around it vectorise."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


def _round_to_bfloat16(builder, value, lanes=0):
    """Code for the bits of the nearest bfloat16 of one float32, or of a vector of `lanes`; NaN stays one."""
    word: Any = ir.VectorType(ir.IntType(32), lanes) if lanes else ir.IntType(32)
    short: Any = ir.VectorType(ir.IntType(16), lanes) if lanes else ir.IntType(16)

    def constant(number: int) -> Any:
        return ir.Constant(word, [number] * lanes if lanes else number)

    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
    quiet = builder.or_(bits, constant(0x400000))
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, constant(16)), short)


@intrinsic
def _bfloat16_of_float(typing_context, value):
    """The bits of the nearest bfloat16, ties to even; NaN stays one."""

    def codegen(context, builder, signature, arguments):
        return _round_to_bfloat16(builder, arguments[0])

    return types.uint16(types.float32), codegen


@intrinsic
def _store_turned(typing_context, rows, at, stride, out, out_at):
    """Store 16 x 16 float32 values turned: `out[out_at + 16 * d + t] = rows[at + t * stride + d]`, as `out` keeps them."""

    def codegen(context, builder, signature, arguments):
        data, first, step, target, to = arguments
        index, float_lanes = ir.IntType(64), ir.VectorType(ir.FloatType(), TILE)
        source = context.make_array(signature.args[0])(context, builder, data).data
        goal = context.make_array(signature.args[3])(context, builder, target).data
        kind = signature.args[3].dtype
        lines = []
        for t in range(TILE):
            place = builder.gep(source, [builder.add(first, builder.mul(step, ir.Constant(index, t)))])
            line = builder.load(builder.bitcast(place, float_lanes.as_pointer()))
            line.align = 4
            lines.append(line)
        lane_type = ir.VectorType(ir.IntType(32), TILE)
        for bit in (8, 4, 2, 1):
            low = [TILE + lane - bit if lane & bit else lane for lane in range(TILE)]
            high = [TILE + lane if lane & bit else lane + bit for lane in range(TILE)]
            for t in range(TILE):
                if not t & bit:
                    a, b = lines[t], lines[t + bit]
                    lines[t] = builder.shuffle_vector(a, b, ir.Constant(lane_type, low))
                    lines[t + bit] = builder.shuffle_vector(a, b, ir.Constant(lane_type, high))
        for d, line in enumerate(lines):
            if kind == types.uint16:
                line = _round_to_bfloat16(builder, line, TILE)
            elif kind == types.int16:
                halves = builder.fptrunc(line, ir.VectorType(ir.HalfType(), TILE))
                line = builder.bitcast(halves, ir.VectorType(ir.IntType(16), TILE))
            place = builder.gep(goal, [builder.add(to, ir.Constant(index, d * TILE))])
            kept = builder.store(line, builder.bitcast(place, line.type.as_pointer()))
            kept.align = kind.bitwidth // 8
        return context.get_dummy_value()

    number = types.int64
    return types.void(rows, number, number, out, number), codegen


@intrinsic
def _float_of_half(typing_context, bits):
    """The float32 of the IEEE half whose bits are the given int16."""

    def codegen(context, builder, signature, arguments):
        half = builder.bitcast(arguments[0], ir.HalfType())
        return builder.fpext(half, ir.FloatType())

    return types.float32(types.int16), codegen


@intrinsic
def _half_of_float(typing_context, value):
    """The bits of the nearest IEEE half, ties to even; too large a number becomes infinite."""

    def codegen(context, builder, signature, arguments):
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

    return types.int16(types.float32), codegen


def _widen(value):
    """A float32 as it is, or the float32 that the bits of a bfloat16 (uint16) or a half (int16) name."""
    return widen_rows(np.array([value]))[0]


def _narrow(value, array):
    """A float32 as `array` keeps it: unchanged, or the bits of the nearest bfloat16 or half, ties to even."""
    return as_stored(np.array([value], np.float32), array.dtype)[0]


@overload(_widen, inline="always")
def _widen_of_type(value):
    if value == types.uint16:
        return lambda value: _float_of_bits(np.int32(np.int32(value) << np.int32(16)))  # pyright: ignore
    if value == types.int16:
        return lambda value: _float_of_half(value)  # pyright: ignore[reportCallIssue]
    return lambda value: value


@overload(_narrow, inline="always")
def _narrow_of_type(value, array):
    if array.dtype == types.int16:
        return lambda value, array: _half_of_float(value)  # pyright: ignore[reportCallIssue]
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


@_jit
def write_rows(k_layer, v_layer, k_rows, v_rows, slots):
    """Store rows `[T, kv_heads, head_dim]` of K and V at `slots[T]` of one layer.

    Rows that lie together in a tile are stored head by head, so that a head's K tile stays in the nearest cache until all
    of its lanes are written; a whole tile is turned in registers.
    """
    kv_heads, head_dim = k_rows.shape[1], k_rows.shape[2]
    flat = k_rows.reshape(-1)
    first = 0
    while first < slots.shape[0]:
        tile = slots[first] // TILE
        last = first + 1
        while last < slots.shape[0] and slots[last] // TILE == tile:
            last += 1
        whole = last - first == TILE and head_dim % TILE == 0
        for t in range(first, last):
            whole = whole and slots[t] % TILE == t - first
        for h in range(kv_heads):
            k = k_layer[tile, h].reshape(-1)
            if whole:
                for d in range(0, head_dim, TILE):
                    at = (first * kv_heads + h) * head_dim + d
                    _store_turned(flat, at, kv_heads * head_dim, k, d * TILE)  # pyright: ignore[reportCallIssue]
            else:
                for t in range(first, last):
                    lane = slots[t] % TILE
                    row = k_rows[t, h]
                    for d in range(head_dim):
                        k[d * TILE + lane] = _narrow(row[d], k)
            for t in range(first, last):
                v = v_layer[tile, h, slots[t] % TILE]
                row = v_rows[t, h]
                for d in range(head_dim):
                    v[d] = _narrow(row[d], v)
        first = last


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
                k[d, lane] = _narrow(a * c[d] - b * s[d], k)
                k[half + d, lane] = _narrow(b * c[d] + a * s[d], k)
            base = (heads + kv_heads + h) * head_dim
            v = v_layer[tile, h, lane]
            for d in range(head_dim):
                v[d] = _narrow(_widen(row[base + d]), v)


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


@_jit
def copy_rows(k, v, sources, targets, rows, tiles_per_block):
    """Rows `[0, rows[i])` of block `sources[i]` become those of block `targets[i]`, in all layers; no other row changes.

    k `[layers, tiles, kv_heads, head_dim, 16]`, v `[layers, tiles, kv_heads, 16, head_dim]`.
    """
    for layer in range(k.shape[0]):
        for i in range(sources.shape[0]):
            for inner in range((rows[i] + TILE - 1) // TILE):
                lanes = min(rows[i] - inner * TILE, TILE)
                source = sources[i] * tiles_per_block + inner
                target = targets[i] * tiles_per_block + inner
                if lanes == TILE:
                    k_from, k_to = k[layer, source].reshape(-1), k[layer, target].reshape(-1)
                    v_from, v_to = v[layer, source].reshape(-1), v[layer, target].reshape(-1)
                    for d in range(k_from.shape[0]):
                        k_to[d] = k_from[d]
                    for d in range(v_from.shape[0]):
                        v_to[d] = v_from[d]
                else:
                    for h in range(k.shape[2]):
                        for d in range(k.shape[3]):
                            for lane in range(lanes):
                                k[layer, target, h, d, lane] = k[layer, source, h, d, lane]
                        for lane in range(lanes):
                            for d in range(k.shape[3]):
                                v[layer, target, h, lane, d] = v[layer, source, h, lane, d]


@_jit
def zero_blocks(planes, blocks):
    """Zero the bytes of these blocks; planes `[2 * layers, num_blocks, bytes of a block in a layer]` uint8."""
    for plane in range(planes.shape[0]):
        for i in range(blocks.shape[0]):
            planes[plane, blocks[i]] = 0


@_jit
def count_nonzero(planes, blocks):
    """Bytes of these blocks that are not zero, each read; planes as in `zero_blocks`."""
    found = 0
    for plane in range(planes.shape[0]):
        for i in range(blocks.shape[0]):
            line = planes[plane, blocks[i]]
            for start in range(0, line.shape[0], _LINE):
                part = line[start : start + _LINE]
                seen = np.uint8(0)
                for at in range(part.shape[0]):
                    seen |= part[at]
                if seen:
                    for at in range(part.shape[0]):
                        found += part[at] != 0
    return found


def warm_up(kv_dtype: KVDtype = "float32") -> None:
    """Compile (or load from the cache beside this file) every signature that a rank with this K/V storage uses."""
    storage = KV_STORAGE[kv_dtype]
    k, v = np.zeros((1, 1, 1, TILE, TILE), storage), np.zeros((1, 1, 1, TILE, TILE), storage)
    rows = np.zeros((1, 1, TILE), np.float32)
    index = np.zeros(1, np.int64)
    angles = np.zeros((1, TILE // 2), np.float32)
    hidden = np.zeros((1, TILE), np.float32)
    write_rows(k[0], v[0], rows, rows, index)
    copy_rows(k, v, index, index, index, 1)
    zero_blocks(np.zeros((1, 1, 1), np.uint8), index)
    count_nonzero(np.zeros((1, 1, 1), np.uint8), index)
    for activation in (np.float32, np.uint16):
        wide, narrow = np.zeros((1, 3 * TILE), activation), np.zeros((1, TILE), activation)
        rotate_and_write(wide, angles, angles, index, index, k[0], v[0], rows.copy())
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
        "copy_rows": copy_rows,
        "zero_blocks": zero_blocks,
        "count_nonzero": count_nonzero,
        "add_rms_norm": add_rms_norm,
        "silu_mul": silu_mul,
    }
