"""GPU attention over a paged pool: one kernel for prefill, decode and shared prefixes, and the merge of its states.

Owns the device code only; `triton_plan` says which rows meet which keys and `triton_step` launches. Layout of K and V of
one layer: row-major `[tiles, kv_heads, TILE, head_dim]`; block `a` is the tiles `[a*q, (a+1)*q)` (K143), and the split
happens in the kernel, so that a request's block table is used as it is. Rows and key offsets are int64 before they are
multiplied by a stride.

Invariant: no K/V row and no table cell outside an item's keys `[begin, end)` is loaded, so that whatever lies in stale or
padded places cannot reach a sum (K141, K142). Storage is float32, float16 or bfloat16; products and sums are float32.
A program's inputs are many because Triton passes scalars only; `triton_step` is the one caller.
Contracts: K141, K142, K143, K144, K146, K147, K149, K150, K151, K152.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _soft_capped(scores, cap):
    """`cap * tanh(scores / cap)`, from one exponential that is right at both ends of its range."""
    return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def _token_offsets(
    table_ptr, key, key_ok, tile_stride, kv_head, TILE: tl.constexpr, TILES: tl.constexpr, DIM: tl.constexpr
):
    """Element offsets `[keys]` of the rows of `key` in the pool; cells of keys that are not read are not loaded."""
    block = tl.load(table_ptr + key // (TILE * TILES), mask=key_ok, other=0)
    tile = block.to(tl.int64) * TILES + (key // TILE) % TILES
    return tile * tile_stride + (kv_head * (TILE * DIM) + (key % TILE) * DIM)


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    state_ptr,
    lse_ptr,
    keys_ptr,
    tables_ptr,
    rows_ptr,
    positions_ptr,
    items_ptr,
    q_stride,
    out_stride,
    tile_stride,
    table_stride,
    scale,
    soft_cap,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    KEY_TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One item for one KV head: `count` token rows, each with its group's query heads, against keys `[begin, end)`.

    items `[n, 6]` int32: first place in `rows`, count, table row, begin, end, first state. Grid `(n, kv_heads)`.
    q, out `[T, HEADS, DIM]`. A row sees the keys up to its position and, windowed, the last `window` of those.
    PARTIAL writes states `[S, HEADS]`: normalised sums in float32 `[S, HEADS, DIM]`, natural log-sum-exp, and the number of
    keys, which is 0 for the empty state, whose other fields are zeros. Otherwise `out` is written.
    """
    item = items_ptr + tl.program_id(0) * 6
    kv_head = tl.program_id(1)
    first, count = tl.load(item), tl.load(item + 1)
    table = tables_ptr + tl.load(item + 2).to(tl.int64) * table_stride
    begin, end = tl.load(item + 3), tl.load(item + 4)

    lane = tl.arange(0, QUERY_ROWS)
    token, head = lane // GROUP, kv_head * GROUP + lane % GROUP
    row_ok = token < count
    row = tl.load(rows_ptr + first + token, mask=row_ok, other=0)
    position = tl.load(positions_ptr + row, mask=row_ok, other=-1)
    oldest = position - window + 1
    dim = tl.arange(0, DIM_PAD)
    dim_ok = dim < DIM
    q_at = row.to(tl.int64)[:, None] * q_stride + (head * DIM)[:, None] + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)

    top = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([QUERY_ROWS], tl.float32)
    total = tl.zeros([QUERY_ROWS, DIM_PAD], tl.float32)
    for at in range(begin // KEY_TOKENS * KEY_TOKENS, end, KEY_TOKENS):
        key = at + tl.arange(0, KEY_TOKENS)
        key_ok = (key >= begin) & (key < end)
        offset = _token_offsets(table, key, key_ok, tile_stride, kv_head, TILE, TILES, DIM)
        k_ok = dim_ok[:, None] & key_ok[None, :]
        k = tl.load(k_ptr + offset[None, :] + dim[:, None], mask=k_ok, other=0.0)
        scores = tl.dot(q, k, input_precision="tf32x3") * scale
        if CAPPED:
            scores = _soft_capped(scores, soft_cap)
        seen = row_ok[:, None] & key_ok[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] >= oldest[:, None])
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(v_ptr + offset[:, None] + dim[None, :], mask=key_ok[:, None] & dim_ok[None, :], other=0.0)
        product = tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
        mass = mass * shrink + tl.sum(weights, 1)
        total = total * shrink[:, None] + product
        top = higher

    oldest_seen = begin
    if WINDOWED:
        oldest_seen = tl.maximum(oldest, begin)
    keys = tl.where(row_ok, tl.maximum(tl.minimum(position + 1, end) - oldest_seen, 0), 0)
    valid = keys > 0
    mass = tl.where(valid, mass, 1.0)
    result = total / mass[:, None]
    stored = row_ok[:, None] & dim_ok[None, :]
    if PARTIAL:
        state = (tl.load(item + 5) + token).to(tl.int64) * HEADS + head
        tl.store(state_ptr + state[:, None] * DIM + dim[None, :], result, mask=stored)
        lse = tl.where(valid, (tl.where(valid, top, 0.0) + tl.log2(mass)) * LN2, 0.0)
        tl.store(lse_ptr + state, lse, mask=row_ok)
        tl.store(keys_ptr + state, keys, mask=row_ok)
    else:
        out_at = row.to(tl.int64)[:, None] * out_stride + (head * DIM)[:, None] + dim[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def merge_states(
    state_ptr,
    lse_ptr,
    keys_ptr,
    out_ptr,
    out_lse_ptr,
    out_keys_ptr,
    rows_ptr,
    starts_ptr,
    states_ptr,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Merge each row's states, in the order listed, into `out`; also the merged log-sum-exp and number of keys.

    Row `rows[i]` has the states `states[starts[i] : starts[i+1]]`. Grid `(rows, ceil(HEADS / HEAD_ROWS))`. A state of no
    keys is skipped by its count, before any exponential; a row without keys gets zeros and the count 0.
    out_lse and out_keys `[T, HEADS]`.
    """
    at = tl.program_id(0)
    row = tl.load(rows_ptr + at).to(tl.int64)
    head = tl.program_id(1) * HEAD_ROWS + tl.arange(0, HEAD_ROWS)
    head_ok = head < HEADS
    dim = tl.arange(0, DIM_PAD)
    stored = head_ok[:, None] & (dim < DIM)[None, :]

    top = tl.zeros([HEAD_ROWS], tl.float32)
    mass = tl.zeros([HEAD_ROWS], tl.float32)
    keys = tl.zeros([HEAD_ROWS], tl.int32)
    total = tl.zeros([HEAD_ROWS, DIM_PAD], tl.float32)
    for i in range(tl.load(starts_ptr + at), tl.load(starts_ptr + at + 1)):
        state = tl.load(states_ptr + i).to(tl.int64) * HEADS + head
        count = tl.load(keys_ptr + state, mask=head_ok, other=0)
        lse = tl.load(lse_ptr + state, mask=head_ok, other=0.0)
        part = tl.load(state_ptr + state[:, None] * DIM + dim[None, :], mask=stored, other=0.0)
        full = count > 0
        higher = tl.where(full, tl.where(keys > 0, tl.maximum(top, lse), lse), top)
        shrink = tl.where(keys > 0, tl.exp2((top - higher) * LOG2E), 0.0)
        weight = tl.where(full, tl.exp2((tl.where(full, lse, higher) - higher) * LOG2E), 0.0)
        part = tl.where(full[:, None], part, 0.0)
        mass = mass * shrink + weight
        total = total * shrink[:, None] + part * weight[:, None]
        keys += count
        top = higher

    valid = keys > 0
    mass = tl.where(valid, mass, 1.0)
    out_at = row * out_stride + (head * DIM)[:, None] + dim[None, :]
    tl.store(out_ptr + out_at, (total / mass[:, None]).to(out_ptr.dtype.element_ty), mask=stored)
    tl.store(out_lse_ptr + row * HEADS + head, tl.where(valid, top + tl.log(mass), 0.0), mask=head_ok)
    tl.store(out_keys_ptr + row * HEADS + head, keys, mask=head_ok)
