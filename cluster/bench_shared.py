"""The shared-prefix rows of ``copyhold bench kernels``: one prefix read once for a batch, beside our own plain kernel.

The plain kernel reads the prefix for every request, though from the same blocks: what of them a cache nearer than memory keeps
between two requests is not read from memory again, so the gain is bounded by arithmetic, not by bytes alone. Layers take turns
and together exceed the caches, as in a model. A schedule's choice and prediction are the serving path's own.
"""

from __future__ import annotations

import msgspec
import numpy as np

from copyhold.kernels import cpu
from copyhold.kernels.pool import KVPool
from copyhold.kernels.shared_attention import SharedAttention, StateBuffers
from copyhold.kernels.shared_cost import Geometry, choose
from copyhold.kernels.shared_schedule import Ints
from copyhold.kvcore.commands import RequestHandle
from copyhold.kvcore.execution import ExecutionSnapshot, chunks_of_tables

from .bench_report import BenchRow, Target, bench_row
from .bench_turns import against, in_turns, least_of

_BLOCK = 16


class SharedShape(msgspec.Struct, frozen=True):
    """`batch` decode rows over a prefix of `prefix` rows and `own` rows each."""

    batch: int = 32
    prefix: int = 2048
    own: int = 64
    kv_heads: int = 8
    group: int = 4
    dim: int = 128
    layers: int = 3


SHARED = SharedShape()


def shared_rows(rounds: int, shape: SharedShape | None = None) -> list[BenchRow]:
    """Ratio and times of the shared prefix, and what the cost model expected."""
    shape = shape or SHARED
    case = _Case(shape)
    shared, plain = in_turns([least_of(case.shared), least_of(case.plain)], rounds)
    name = f"shared {shape.batch}x{shape.prefix}"
    rows = against(name, "our plain kernel", shared, plain, Target(2.2), faster=True)
    return [*rows, bench_row(f"{name} expected", "of our plain kernel", [case.choice.predicted_gain])]


class _Case:
    """One pool, one step of decode rows, both ways."""

    def __init__(self, shape: SharedShape) -> None:
        rng = np.random.default_rng(0)
        common, own = shape.prefix // _BLOCK, -(-shape.own // _BLOCK)
        self._pool = KVPool(shape.layers, common + shape.batch * own, shape.kv_heads, shape.dim)
        slots = np.arange(self._pool.num_blocks * _BLOCK)
        for layer in range(shape.layers):
            values = rng.standard_normal((2, len(slots), shape.kv_heads, shape.dim), dtype=np.float32)
            cpu.write_rows(self._pool.k[layer], self._pool.v[layer], values[0], values[1], slots)
        blocks = rng.permutation(self._pool.num_blocks).astype(np.int32)
        self._tables = np.empty((shape.batch, common + own), dtype=np.int32)
        self._tables[:, :common] = blocks[:common]
        self._tables[:, common:] = blocks[common:].reshape(shape.batch, own)
        heads = shape.kv_heads * shape.group
        self._q = rng.standard_normal((shape.batch, heads, shape.dim), dtype=np.float32)
        self._out = np.empty_like(self._q)
        self._starts = np.arange(shape.batch + 1, dtype=np.int32)
        self._lens = np.full(shape.batch, shape.prefix + shape.own, dtype=np.int32)
        self._scale = np.float32(shape.dim**-0.5)
        ones = np.ones(shape.batch, dtype=np.int64)
        self.choice = choose(
            _snapshot(self._tables, self._lens), ones, Geometry(heads, shape.kv_heads, shape.dim)
        )
        buffers = StateBuffers(heads, shape.dim)
        self._attention = SharedAttention(
            cpu, self.choice.schedule, self._tables, self._starts, self._lens, buffers
        )

    def shared(self) -> None:
        for k, v in zip(self._pool.k, self._pool.v, strict=True):
            self._attention(self._q, k, v, self._scale, self._out)

    def plain(self) -> None:
        for k, v in zip(self._pool.k, self._pool.v, strict=True):
            cpu.paged_attention(self._q, k, v, self._tables, self._starts, self._lens, self._scale, self._out)


def _snapshot(tables: np.ndarray, lens: np.ndarray) -> ExecutionSnapshot:
    """The chunks that these tables form, as a rank's ledger would tell them."""
    firsts: Ints = lens.astype(np.int64) - 1
    order, chunks = chunks_of_tables(tables, np.arange(len(lens), dtype=np.int64), firsts, _BLOCK)
    return ExecutionSnapshot(
        log_index=0,
        machine_digest=b"",
        contract="",
        handles=tuple([RequestHandle(slot, 0) for slot in range(len(lens))]),
        order=order,
        first_rows=firsts,
        chunks=chunks,
        digests=np.zeros(len(chunks), dtype=np.uint64),
    )
