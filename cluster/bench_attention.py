"""Attention rows of ``copyhold bench kernels``: paged decode and prefill beside kernels that may do without pages.

The peer is torch's scaled_dot_product_attention over K/V that lie contiguous, its query groups folded into rows: the fastest way
it has, and one that nothing which pages can have. vLLM's own paged kernel runs in its own environment where
``make bench-peers`` made it.
"""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec
import numpy as np
import torch

from copyhold.kernels import cpu
from copyhold.kernels.choices import KVDtype
from copyhold.kernels.pool import KVPool

from .bench_process import Peer, PeerProcess
from .bench_report import BenchRow, Target, bench_row
from .bench_turns import Least, against, in_turns, least_of
from .errors import BenchInvalid

_VLLM = Peer("vLLM's kernel", "vllm_attention.py")


class Shape(msgspec.Struct, frozen=True):
    """One attention call: `batch` sequences of `context` K/V rows, the last `rows` of each being queries."""

    batch: int = 8
    rows: int = 1
    context: int = 2048
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    layers: int = 1

    def kv_bytes(self, scalar_bytes: int) -> int:
        return self.layers * self.batch * self.context * self.kv_heads * self.dim * 2 * scalar_bytes


DECODE = Shape()
PREFILL = Shape(batch=1, rows=512)
SMOLLM2 = Shape(context=300, kv_heads=3, group=3, dim=64, layers=30)


def attention_rows(rounds: int, with_peers: bool, read_gb_s: float) -> tuple[list[BenchRow], tuple[str, ...]]:
    """Every row of attention, and notes on peers that were not there."""
    rows: list[BenchRow] = []
    types: tuple[tuple[KVDtype, str], ...] = (("float32", "decode fp32"), ("bfloat16", "decode bf16"))
    for kv_dtype, name in types:
        works = [_paged(DECODE, kv_dtype), _contiguous(DECODE, kv_dtype)]
        ours, theirs = in_turns(works, rounds)
        rows += against(name, "torch sdpa", ours, theirs, Target(0.95, at_least=False))
        if kv_dtype == "float32":
            shares = [DECODE.kv_bytes(4) / s / 1e9 / read_gb_s for s in ours]
            rows.append(bench_row("read bandwidth share", "of read", shares, Target(0.40)))
        del works
    ours, theirs = in_turns([_paged(PREFILL, "float32"), _contiguous(PREFILL, "float32")], rounds, 3)
    rows += against("prefill 512 on 1536", "torch sdpa", ours, theirs, Target(1.1, at_least=False))
    ours, theirs = in_turns([_paged(SMOLLM2, "float32"), _contiguous(SMOLLM2, "float32")], rounds)
    small = "decode 9/3 heads of 64, 8 x 300, 30 layers"
    rows += against(small, "torch sdpa", ours, theirs, Target(0.95, at_least=False))
    notes: tuple[str, ...] = ()
    if with_peers:
        found, notes = _beside_vllm(rounds)
        rows += found
    return rows, notes


def _paged(shape: Shape, kv_dtype: KVDtype) -> Least:
    """The paged kernel over blocks in shuffled order."""
    rng = np.random.default_rng(0)
    blocks = -(-shape.context // 16)
    pool = KVPool(shape.layers, shape.batch * blocks, shape.kv_heads, shape.dim, kv_dtype=kv_dtype)
    slots = np.arange(pool.num_blocks * 16)
    for layer in range(shape.layers):
        values = rng.standard_normal((2, len(slots), shape.kv_heads, shape.dim), dtype=np.float32)
        cpu.write_rows(pool.k[layer], pool.v[layer], values[0], values[1], slots)
    tables = rng.permutation(pool.num_blocks).reshape(shape.batch, blocks).astype(np.int32)
    q = rng.standard_normal(
        (shape.batch * shape.rows, shape.kv_heads * shape.group, shape.dim), dtype=np.float32
    )
    starts = np.arange(0, shape.batch * shape.rows + 1, shape.rows, dtype=np.int32)
    lens, scale = np.full(shape.batch, shape.context, dtype=np.int32), np.float32(shape.dim**-0.5)
    out = cast(Any, np.empty(q.shape, np.float32 if kv_dtype == "float32" else np.uint16))

    def work() -> None:
        for layer in range(shape.layers):
            cpu.paged_attention(q, pool.k[layer], pool.v[layer], tables, starts, lens, scale, out)

    return least_of(work)


def _contiguous(shape: Shape, kv_dtype: KVDtype) -> Least:
    """torch over contiguous K/V of the same type."""
    kind = getattr(torch, kv_dtype)
    size = (shape.layers, shape.batch, shape.kv_heads, shape.context, shape.dim)
    keys, values = torch.randn(size).to(kind), torch.randn(size).to(kind)
    queries = torch.randn(shape.batch, shape.kv_heads, shape.group * shape.rows, shape.dim).to(kind)
    seen = torch.ones(shape.rows, shape.context, dtype=torch.bool).tril(shape.context - shape.rows)
    mask = None if shape.rows == 1 else seen.repeat(shape.group, 1)

    def work() -> None:
        for layer in range(shape.layers):
            torch.nn.functional.scaled_dot_product_attention(queries, keys[layer], values[layer], mask)

    return least_of(work)


def _beside_vllm(rounds: int) -> tuple[list[BenchRow], tuple[str, ...]]:
    if not _VLLM.is_installed:
        return [], (_VLLM.not_installed().text,)
    shape = DECODE
    asked = {"batch": shape.batch, "context": shape.context, "block": 16, "dim": shape.dim}
    asked |= {"heads": shape.kv_heads * shape.group, "kv_heads": shape.kv_heads}
    try:
        with PeerProcess(_VLLM, json.dumps(asked)) as vllm:
            works = [_paged(shape, "float32"), lambda calls: float(vllm.ask(str(calls)))]
            ours, peer = in_turns(works, rounds)
    except (BenchInvalid, ValueError) as error:
        return [], (_VLLM.note(error).text,)
    target = Target(1.15, at_least=False)
    return against("decode fp32 vs vllm", "vllm", ours, peer, target), ()
