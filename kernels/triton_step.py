"""Owns one step's attention on a GPU: its plan and tables on the device, its states, and the launches of each layer.

Everything integer goes to the device in one copy, made once a step; a layer then costs its launches only. States of
different layers share one buffer, since a layer's merge is over before the next layer's states are written (one stream).
Invariant: `out` rows are written exactly once a layer. Contracts: K140, K146, K149, K151, K157.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch

from .batch import StepBatch
from .errors import KernelContractMismatch, KernelInputRefused
from .pool import TILE
from .triton_attention import attend, merge_states
from .triton_config import padded_dim
from .triton_launch import launch
from .triton_plan import AttentionPlan, Launch
from .triton_pool import TritonPool, check_rows

_HEAD_ROWS = 8
"""Query heads that one program of the merge takes."""

_ALIGN = 4
"""int32 values between the starts of two arrays of the one copy: Triton compiles anew for less aligned pointers."""


class AttentionShape(msgspec.Struct, frozen=True):
    """What the model says about attention (K146); `window` and `soft_cap` are None where it has none."""

    heads: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


class AttentionStep:
    """One step's rows against one pool; used for every layer that has the same shape.

    Raises: `KernelContractMismatch` for heads that the pool's KV heads do not divide.
    """

    def __init__(
        self, batch: StepBatch, plan: AttentionPlan, pool: TritonPool, shape: AttentionShape
    ) -> None:
        if shape.heads <= 0 or shape.heads % pool.kv_heads:
            raise KernelContractMismatch(f"{shape.heads} query heads over {pool.kv_heads} KV heads")
        if shape.soft_cap is not None and shape.soft_cap <= 0:
            raise KernelContractMismatch(f"soft cap {shape.soft_cap}")
        self._pool, self._shape, self._launches = pool, shape, plan.launches
        self.num_tokens = batch.num_tokens
        arrays = [plan.rows, batch.positions, batch.block_tables, plan.merge_rows, plan.merge_starts]
        arrays += [plan.merge_states, *(part.items for part in plan.launches)]
        sent = _one_copy(arrays, pool.device)
        self._rows, self._positions, self._tables = sent[:3]
        self._merge_rows, self._merge_starts, self._merge_states = sent[3:6]
        self._items = sent[6:]
        self._table_stride = int(batch.block_tables.shape[1])
        on_device = {"dtype": torch.float32, "device": pool.device}
        states = (max(plan.num_states, 1), shape.heads)
        self._states = torch.empty((*states, pool.head_dim), **on_device)
        self._lse = torch.empty(states, **on_device)
        self._keys = torch.empty(states, dtype=torch.int32, device=pool.device)
        self.lse = torch.zeros((batch.num_tokens, shape.heads), **on_device)
        """`[T, heads]` natural log-sum-exp of merged rows; 0 for the others"""
        self.key_counts = torch.zeros((batch.num_tokens, shape.heads), dtype=torch.int32, device=pool.device)
        """`[T, heads]` keys that the merged rows' states covered; 0 for rows that were written directly"""

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of q `[T, heads, head_dim]` over one layer into `out` of the same shape.

        Raises: `KernelInputRefused` for other shapes or dtypes (nothing was written).
        """
        pool = self._pool
        wanted = (self.num_tokens, self._shape.heads, pool.head_dim)
        for name, tensor in (("q", q), ("out", out)):
            check_rows(name, tensor, wanted)
        if q.dtype != pool.k.dtype:
            raise KernelInputRefused("q", f"{q.dtype} against a pool of {pool.dtype}")
        for part, items in zip(self._launches, self._items, strict=True):
            self._attend(part, items, layer, q, out)
        self._merge(out)

    def _attend(
        self, part: Launch, items: torch.Tensor, layer: int, q: torch.Tensor, out: torch.Tensor
    ) -> None:
        pool, shape, tile = self._pool, self._shape, part.tile
        launch(
            attend,
            (items.shape[0], pool.kv_heads),
            q,
            pool.k[layer],
            pool.v[layer],
            out,
            self._states,
            self._lse,
            self._keys,
            self._tables,
            self._rows,
            self._positions,
            items,
            q.stride(0),
            out.stride(0),
            pool.k.stride(1),
            self._table_stride,
            shape.scale,
            shape.soft_cap or 1.0,
            shape.window or 0,
            HEADS=shape.heads,
            GROUP=shape.heads // pool.kv_heads,
            DIM=pool.head_dim,
            DIM_PAD=padded_dim(pool.head_dim),
            TILE=TILE,
            TILES=pool.tiles_per_block,
            QUERY_ROWS=tile.query_rows,
            KEY_TOKENS=tile.key_tokens,
            WINDOWED=shape.window is not None,
            CAPPED=shape.soft_cap is not None,
            PARTIAL=part.partial,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _merge(self, out: torch.Tensor) -> None:
        shape, head_dim = self._shape, self._pool.head_dim
        launch(
            merge_states,
            (self._merge_rows.shape[0], -(-shape.heads // _HEAD_ROWS)),
            self._states,
            self._lse,
            self._keys,
            out,
            self.lse,
            self.key_counts,
            self._merge_rows,
            self._merge_starts,
            self._merge_states,
            out.stride(0),
            HEADS=shape.heads,
            HEAD_ROWS=_HEAD_ROWS,
            DIM=head_dim,
            DIM_PAD=padded_dim(head_dim),
            num_warps=2,
        )


def _one_copy(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as int32 on the device, aligned views of a single transfer."""
    sizes = [-(-array.size // _ALIGN) * _ALIGN for array in arrays]
    ends = np.cumsum(sizes)
    buffer = np.zeros(int(ends[-1]), dtype=np.int32)
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        buffer[end - size : end - size + array.size] = array.reshape(-1)
    sent = torch.from_numpy(buffer).to(device)
    return [
        sent[end - size : end - size + array.size].view(array.shape)
        for array, end, size in zip(arrays, ends.tolist(), sizes, strict=True)
    ]
