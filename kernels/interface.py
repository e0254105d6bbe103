"""The one interface of every kernel backend: shapes, dtypes, strides, inner tile, and who owns memory.

Layout of a layer's K/V, per *tile* of `TILE` tokens; allocator block `a` is the tiles `[a*q, (a+1)*q)` with
`q = block_size / TILE` (K143):

    K [tiles, kv_heads, head_dim, TILE]     a dimension of 16 tokens lies together
    V [tiles, kv_heads, TILE, head_dim]     a token's dimensions lie together

Every array is C-contiguous. Activations are float32, or bfloat16 where a matrix product meets them. The caller owns every array:
a backend allocates nothing that outlives a call, reads K/V only through tables, and never a row at or past a context
(K141) nor a table cell past the last used one (K142). Invariant: an array that a function writes is named in its
docstring; all others are only read. Contracts: K140 to K146, K232.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from .choices import KVDtype
from .errors import KernelContractMismatch

TILE = 16
"""Tokens of one kernel tile, independent of the allocator's block size."""

KV_DTYPES: tuple[KVDtype, ...] = get_args(KVDtype)

KV_STORAGE: Mapping[KVDtype, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.int16),
}
"""The element type of a backend's K/V arrays: numba has neither 16-bit float, so one is carried unsigned, one signed."""

Floats = npt.NDArray[np.float32]
Activations = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""float32, or the bits of bfloat16."""
KVRows = npt.NDArray[Any]
"""K or V of one layer, of a type of `KV_STORAGE`."""
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class KernelLayout(msgspec.Struct, frozen=True):
    """What one rank's K/V looks like in memory: a manifest of layout, equal for equal bytes."""

    backend: str
    kv_dtype: KVDtype
    tile: int
    kv_heads: int
    head_dim: int
    k_axes: tuple[str, ...] = ("layer", "slot", "token/tile", "kv_head", "lane", "token%tile")
    v_axes: tuple[str, ...] = ("layer", "slot", "token/tile", "kv_head", "token%tile", "lane")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, K and V."""
        return 2 * self.kv_heads * self.head_dim * KV_STORAGE[self.kv_dtype].itemsize


class KernelRequest(msgspec.Struct, frozen=True):
    """What a rank needs kernels for."""

    kv_dtype: KVDtype
    kv_heads: int
    head_dim: int
    block_size: int


class Refusal(msgspec.Struct, frozen=True):
    """Why a backend cannot serve a request: a word that dispatch counts, and a sentence for people."""

    outcome: str
    why: str


def tile_refusal(request: KernelRequest) -> Refusal | None:
    """The refusals that follow from the layout alone."""
    if request.block_size <= 0 or request.block_size % TILE:
        why = f"block size {request.block_size} is not a positive multiple of the tile of {TILE}"
        return Refusal("unsupported_kernel_block_size", why)
    if request.head_dim <= 0 or request.head_dim % 8:
        why = f"head dim {request.head_dim} is not a positive multiple of 8"
        return Refusal("kernel_contract_mismatch", why)
    return None


class KernelBackend(Protocol):
    """One implementation; every function is called with positional arrays of the shapes stated here.

    T token rows, S sequences; sequence s owns the query rows `[seq_starts[s], seq_starts[s+1])`, the last of its
    `context_lens[s]` K/V rows. `tile_tables [S, max_tiles]` are block tables after `split_table`.
    """

    @property
    def NAME(self) -> str: ...

    def refusal(self, request: KernelRequest) -> Refusal | None:
        """Why this backend cannot serve `request` on this machine; none if it can. Allocates nothing."""
        ...

    def write_rows(
        self, k_layer: KVRows, v_layer: KVRows, k_rows: Floats, v_rows: Floats, slots: Int64s
    ) -> None:
        """Store rows `[T, kv_heads, head_dim]` at `slots[T]`; writes k_layer, v_layer there."""
        ...

    def rotate_and_write(
        self,
        qkv: Activations,
        cos: Floats,
        sin: Floats,
        positions: Int64s,
        slots: Int64s,
        k_layer: KVRows,
        v_layer: KVRows,
        q_out: Floats,
    ) -> None:
        """Split `qkv [T, (heads + 2 * kv_heads) * head_dim]`, rotate q and k, store k and v; writes q_out, k, v."""
        ...

    def paged_attention(
        self,
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
        """Causal attention `[T, heads, head_dim]`; writes out. window 0: no limit; soft_cap 0: none."""
        ...

    def paged_attention_split(
        self,
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
        """`paged_attention` over partitions of so many tokens, merged in order; writes out (K144).

        Raises: `PartitionNotWholeTiles`.
        """
        ...

    def paged_attention_states(
        self,
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
        """Attention over `[first_rows[s], context_lens[s])` only; writes out and lse `[T, heads]` (natural).

        causal False: every query row sees the whole range. A row that sees nothing: zeros and minus infinity (K150).
        """
        ...

    def merge_states(self, out_a: Floats, lse_a: Floats, out_b: Floats, lse_b: Floats) -> None:
        """The state over both sets of tokens; writes out_a, lse_a. Outputs are never averaged (K149)."""
        ...

    def merge_rows(self, out_a: Floats, lse_a: Floats, rows: Int64s, out_b: Floats, lse_b: Floats) -> None:
        """`merge_states` of row i of state b with row `rows[i]` of state a, in that order; writes out_a, lse_a."""
        ...

    def narrow_rows(self, rows: Floats, out: Activations) -> None:
        """Rows `[T, heads, head_dim]` in the type of out; writes out."""
        ...

    def add_rms_norm(
        self, x: Floats, delta: Activations, weight: Floats, eps: np.float32, out: Activations
    ) -> None:
        """`x += delta`, then `out = rms_norm(x) * weight`; writes x, out."""
        ...

    def silu_mul(self, gate_up: Activations, out: Activations) -> None:
        """`out = silu(gate) * up` of rows that hold gate, then up; writes out."""
        ...

    def warm_up(self, kv_dtype: KVDtype = "float32") -> None:
        """Compile whatever a rank with this storage calls."""
        ...

    def compile_counts(self) -> dict[str, tuple[int, int]]:
        """Per kernel: signatures known and cache misses; after `warm_up` neither may rise."""
        ...


def kv_dtype_of(name: str) -> KVDtype:
    """Raises: `KernelContractMismatch` for a storage that no backend has."""
    for known in KV_DTYPES:
        if name == known:
            return known
    raise KernelContractMismatch(f"K/V dtype {name!r} is none of {', '.join(KV_DTYPES)}")


def widen_rows(rows: KVRows) -> Floats:
    """A copy in float32 of K/V values of any type of `KV_STORAGE`."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if rows.dtype == np.int16:
        return np.ascontiguousarray(rows).view(np.float16).astype(np.float32)
    return np.array(rows, dtype=np.float32)


def as_stored(values: Floats, storage: np.dtype[Any]) -> npt.NDArray[Any]:
    """float32 values as an array of `storage` keeps them: nearest, ties to even; NaN stays one."""
    if storage == np.uint16:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        kept = np.where(np.isnan(values), bits | np.uint32(0x400000), rounded)
        return (kept >> np.uint32(16)).astype(np.uint16)
    if storage == np.int16:
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(values, dtype=np.float32).astype(np.float16).view(np.int16)
    return values
