"""CPU backend: jitted, single-threaded, fp32 kernels over a `KVPool` and over a step's activations.

Every jitted function and every one it calls stand in this file, because a cached caller does not notice a
changed callee elsewhere. Only contraction is allowed as fast math: NaN in a row that is not visible must stay
harmless, and a row's sum has one order whatever rows share its tile, so a row's bits do not depend on its
batch. `warm_up` compiles the one signature of each kernel. Contracts: K140, K141, K142, K143, K146.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from .pool import TILE, KVPool

_ROWS = 32
"""Query rows (token x head of the group) that share one pass over K/V; a multiple of a micro tile's 4."""

_LOG2E = np.float32(1.4426950408889634)
_MASKED = np.float32(-3.0e38)

_jit = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_callee = njit(nogil=True, error_model="numpy", fastmath={"contract"})


@intrinsic
def _float_of_bits(typing_context, bits):
    """The float32 whose bits are the given int32; a plain bitcast, so that loops around it vectorise."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always")
def _exp2(x):
    """2**x for x in [-126, 127], relative error under 2e-7."""
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
            for d in range(half):
                a = row[base + d]
                b = row[base + half + d]
                q_out[t, h, d] = a * c[d] - b * s[d]
                q_out[t, h, half + d] = b * c[d] + a * s[d]
        for h in range(kv_heads):
            base = (heads + h) * head_dim
            k = k_layer[tile, h]
            for d in range(half):
                a = row[base + d]
                b = row[base + half + d]
                k[d, lane] = a * c[d] - b * s[d]
                k[half + d, lane] = b * c[d] + a * s[d]
            base = (heads + kv_heads + h) * head_dim
            v = v_layer[tile, h, lane]
            for d in range(head_dim):
                v[d] = row[base + d]


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
                value = row[c + i] + add[c + i]
                row[c + i] = value
                lanes[i] += value * value
        total = np.float32(0)
        for i in range(TILE):
            total += lanes[i]
        for c in range(whole, hidden):
            value = row[c] + add[c]
            row[c] = value
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(hidden) + eps)
        for c in range(hidden):
            to[c] = row[c] * factor * weight[c]


@_jit
def silu_mul(gate_up, out):
    """`out = silu(gate) * up`; gate_up `[T, 2 * ffn]` holds gate, then up; out `[T, ffn]`."""
    ffn = out.shape[1]
    for t in range(out.shape[0]):
        gate = gate_up[t, :ffn]
        up = gate_up[t, ffn:]
        to = out[t]
        for i in range(ffn):
            g = gate[i]
            exponent = min(max(-g * _LOG2E, np.float32(-126)), np.float32(126))
            to[i] = g / (np.float32(1) + _exp2(exponent)) * up[i]


@_callee
def _scores(q0, q1, q2, q3, k, s0, s1, s2, s3):
    """Scores of 4 query rows against the 16 tokens of one K tile `[head_dim, 16]`."""
    for i in range(TILE):
        s0[i] = 0
        s1[i] = 0
        s2[i] = 0
        s3[i] = 0
    for d in range(0, k.shape[0], 8):
        for i in range(TILE):
            x0 = s0[i]
            x1 = s1[i]
            x2 = s2[i]
            x3 = s3[i]
            for u in range(8):
                value = k[d + u, i]
                x0 += q0[d + u] * value
                x1 += q1[d + u] * value
                x2 += q2[d + u] * value
                x3 += q3[d + u] * value
            s0[i] = x0
            s1[i] = x1
            s2[i] = x2
            s3[i] = x3


@_callee
def _weights(s, visible, row, maxima, sums, acc):
    """Turn one row's 16 scores into weights, rescaling its running sum and output when the maximum rises."""
    for i in range(TILE):
        if i >= visible:
            s[i] = _MASKED
    top = maxima[row]
    for i in range(TILE):
        top = max(top, s[i])
    if top > maxima[row]:
        factor = _exp2(max(maxima[row] - top, np.float32(-126)))
        if maxima[row] == _MASKED:
            factor = np.float32(0)
        maxima[row] = top
        sums[row] *= factor
        for d in range(acc.shape[0]):
            acc[d] *= factor
    for i in range(TILE):
        s[i] = _exp2(max(s[i] - top, np.float32(-126)))
    total = np.float32(0)
    for i in range(TILE):
        if i >= visible:
            s[i] = 0
        total += s[i]
    sums[row] += total


@_callee
def _accumulate(s0, s1, s2, s3, v, tokens, a0, a1, a2, a3):
    """Add the weighted V rows of the first `tokens` tokens to 4 output rows, in token order."""
    head_dim = v.shape[1]
    whole = tokens // 4 * 4
    for i in range(0, whole, 4):
        v0 = v[i]
        v1 = v[i + 1]
        v2 = v[i + 2]
        v3 = v[i + 3]
        for d in range(head_dim):
            x = v0[d]
            y = v1[d]
            z = v2[d]
            w = v3[d]
            a0[d] = a0[d] + s0[i] * x + s0[i + 1] * y + s0[i + 2] * z + s0[i + 3] * w
            a1[d] = a1[d] + s1[i] * x + s1[i + 1] * y + s1[i + 2] * z + s1[i + 3] * w
            a2[d] = a2[d] + s2[i] * x + s2[i + 1] * y + s2[i + 2] * z + s2[i + 3] * w
            a3[d] = a3[d] + s3[i] * x + s3[i + 1] * y + s3[i + 2] * z + s3[i + 3] * w
    for i in range(whole, tokens):
        vi = v[i]
        for d in range(head_dim):
            a0[d] += s0[i] * vi[d]
            a1[d] += s1[i] * vi[d]
            a2[d] += s2[i] * vi[d]
            a3[d] += s3[i] * vi[d]


@_jit
def paged_attention(q, k_layer, v_layer, tile_tables, seq_starts, context_lens, scale, out):
    """Causal attention of the batch's rows over one layer's pool.

    q, out `[T, heads, head_dim]`; tile_tables `[S, max_tiles]` int32 (block tables after `split_table`);
    seq_starts `[S+1]`, context_lens `[S]` int32. Prefill, decode and mixtures are the same call.
    """
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k_layer.shape[1]
    group = heads // kv_heads
    rows = np.zeros((_ROWS, head_dim), np.float32)
    acc = np.empty((_ROWS, head_dim), np.float32)
    score = np.empty((4, TILE), np.float32)
    maxima = np.empty(_ROWS, np.float32)
    sums = np.empty(_ROWS, np.float32)
    s0, s1, s2, s3 = score[0], score[1], score[2], score[3]
    for seq in range(context_lens.shape[0]):
        first = seq_starts[seq]
        total_rows = (seq_starts[seq + 1] - first) * group
        start = context_lens[seq] - (seq_starts[seq + 1] - first)
        for kv in range(kv_heads):
            for base in range(0, total_rows, _ROWS):
                count = min(_ROWS, total_rows - base)
                micro = (count + 3) // 4
                for r in range(micro * 4):
                    maxima[r] = _MASKED
                    sums[r] = 0
                    token = first + (base + r) // group
                    head = kv * group + (base + r) % group
                    for d in range(head_dim):
                        acc[r, d] = 0
                        rows[r, d] = q[token, head, d] * (scale * _LOG2E) if r < count else np.float32(0)
                last = start + (base + count - 1) // group
                for j in range(last // TILE + 1):
                    tile = tile_tables[seq, j]
                    k = k_layer[tile, kv]
                    v = v_layer[tile, kv]
                    filled = min(TILE, last + 1 - j * TILE)
                    for m in range(micro):
                        r = m * 4
                        top = start + (base + min(r + 3, count - 1)) // group + 1 - j * TILE
                        if top <= 0:
                            continue
                        _scores(rows[r], rows[r + 1], rows[r + 2], rows[r + 3], k, s0, s1, s2, s3)
                        for u in range(4):
                            visible = start + (base + min(r + u, count - 1)) // group + 1 - j * TILE
                            _weights(score[u], visible, r + u, maxima, sums, acc[r + u])
                        _accumulate(
                            s0, s1, s2, s3, v, min(filled, top), acc[r], acc[r + 1], acc[r + 2], acc[r + 3]
                        )
                for r in range(count):
                    token = first + (base + r) // group
                    head = kv * group + (base + r) % group
                    factor = np.float32(1) / sums[r]
                    for d in range(head_dim):
                        out[token, head, d] = acc[r, d] * factor


def warm_up() -> None:
    """Compile (or load from the cache beside this file) the one signature of every kernel."""
    pool = KVPool(1, 2, 1, TILE)
    k, v = pool.k[0], pool.v[0]
    rows = np.zeros((1, 1, TILE), np.float32)
    table = np.zeros((1, 2), np.int32)
    starts, lens = np.array([0, 1], np.int32), np.ones(1, np.int32)
    index = np.zeros(1, np.int64)
    flat = np.zeros((1, 3 * TILE), np.float32)
    angles = np.zeros((1, TILE // 2), np.float32)
    write_rows(k, v, rows, rows, index)
    rotate_and_write(flat, angles, angles, index, index, k, v, np.empty_like(rows))
    paged_attention(rows, k, v, table, starts, lens, np.float32(1), np.empty_like(rows))
    hidden = np.zeros((1, TILE), np.float32)
    add_rms_norm(hidden, hidden.copy(), hidden[0].copy(), np.float32(1), hidden.copy())
    silu_mul(np.zeros((1, 2 * TILE), np.float32), hidden)


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
