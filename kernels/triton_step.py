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
from .interface import TILE
from .triton_attention import attend, merge_states
from .triton_config import padded_dim
from .triton_launch import launch
from .triton_plan import AttentionPlan, Launch
from .triton_pool import check_rows

_HEAD_ROWS = 8
"""Query heads that one program of the merge takes."""

_ALIGN = 4
"""int32 values between the starts of two arrays of the one copy: Triton compiles anew for less aligned pointers."""


class AttentionShape(msgspec.Struct, frozen=True):
    """What the model says about attention (K146); `window` and `soft_cap` are None where it has none."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


class AttentionStep:
    """One step's rows against one K/V layout; used for every layer of that shape.

    `tiles_per_block` says what a cell of the batch's tables is: a block of so many tiles (K143).

    Raises: `KernelContractMismatch` for heads that the KV heads do not divide.
    """

    def __init__(
        self,
        batch: StepBatch,
        plan: AttentionPlan,
        shape: AttentionShape,
        device: torch.device,
        tiles_per_block: int = 1,
    ) -> None:
        if shape.heads <= 0 or shape.heads % shape.kv_heads:
            raise KernelContractMismatch(f"{shape.heads} query heads over {shape.kv_heads} KV heads")
        if shape.soft_cap is not None and shape.soft_cap <= 0:
            raise KernelContractMismatch(f"soft cap {shape.soft_cap}")
        self._shape, self._launches, self._tiles_per_block = shape, plan.launches, tiles_per_block
        self.num_tokens = batch.num_tokens
        arrays = [plan.rows, batch.positions, batch.block_tables, plan.merge_rows, plan.merge_starts]
        arrays += [plan.merge_states, *(part.items for part in plan.launches)]
        sent = _one_copy(arrays, device)
        self._rows, self._positions, self._tables = sent[:3]
        self._merge_rows, self._merge_starts, self._merge_states = sent[3:6]
        self._items = sent[6:]
        self._table_stride = int(batch.block_tables.shape[1])
        on_device = {"dtype": torch.float32, "device": device}
        states = (max(plan.num_states, 1), shape.heads)
        self._states = torch.empty((*states, shape.head_dim), **on_device)
        self._lse = torch.empty(states, **on_device)
        self._keys = torch.empty(states, dtype=torch.int32, device=device)
        self.lse = torch.zeros((batch.num_tokens, shape.heads), **on_device)
        """`[T, heads]` natural log-sum-exp of merged rows; 0 for the others"""
        self.key_counts = torch.zeros((batch.num_tokens, shape.heads), dtype=torch.int32, device=device)
        """`[T, heads]` keys that the merged rows' states covered; 0 for rows that were written directly"""

    def attend(
        self, q: torch.Tensor, k_layer: torch.Tensor, v_layer: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attention of q `[T, heads, head_dim]` over one layer `[tiles, kv_heads, TILE, head_dim]`; writes out.

        Raises: `KernelInputRefused` for other shapes or dtypes (nothing was written).
        """
        shape = self._shape
        for name, tensor in (("q", q), ("out", out)):
            check_rows(name, tensor, (self.num_tokens, shape.heads, shape.head_dim))
        for name, layer in (("k_layer", k_layer), ("v_layer", v_layer)):
            if tuple(layer.shape[1:]) != (shape.kv_heads, TILE, shape.head_dim) or not layer.is_contiguous():
                raise KernelInputRefused(name, f"shape {tuple(layer.shape)}")
            if layer.dtype != q.dtype:
                raise KernelInputRefused(name, f"{layer.dtype}, but the queries are {q.dtype}")
        for part, items in zip(self._launches, self._items, strict=True):
            self._attend(part, items, (q, k_layer, v_layer, out))
        _launch_merge(
            (self._states, self._lse, self._keys),
            (out, self.lse, self.key_counts),
            (self._merge_rows, self._merge_starts, self._merge_states),
        )

    def _attend(self, part: Launch, items: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> None:
        shape, tile, (q, k_layer, _, out) = self._shape, part.tile, tensors
        launch(
            attend,
            (items.shape[0], shape.kv_heads),
            *tensors,
            self._states,
            self._lse,
            self._keys,
            self._tables,
            self._rows,
            self._positions,
            items,
            q.stride(0),
            out.stride(0),
            k_layer.stride(0),
            self._table_stride,
            shape.scale,
            shape.soft_cap or 1.0,
            shape.window or 0,
            HEADS=shape.heads,
            GROUP=shape.heads // shape.kv_heads,
            DIM=shape.head_dim,
            DIM_PAD=padded_dim(shape.head_dim),
            TILE=TILE,
            TILES=self._tiles_per_block,
            QUERY_ROWS=tile.query_rows,
            KEY_TOKENS=tile.key_tokens,
            WINDOWED=shape.window is not None,
            CAPPED=shape.soft_cap is not None,
            PARTIAL=part.partial,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def merge_rows(
    out_a: torch.Tensor, lse_a: torch.Tensor, rows: np.ndarray, out_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    """Merge row i of state b into row `rows[i]` of state a, in that order; writes out_a, lse_a.

    A log-sum-exp of minus infinity marks the empty state; it becomes a count of 0 before the merge.
    """
    order = np.argsort(rows, kind="stable")
    targets, first = np.unique(rows[order], return_index=True)
    sizes = np.diff(np.append(first, rows.size)) + 1
    starts = np.concatenate([[0], np.cumsum(sizes)])
    sources = np.insert(order + out_a.shape[0], first, targets)
    lse = torch.cat((lse_a, lse_b)).float()
    keys = (lse > float("-inf")).int()
    states = (torch.cat((out_a, out_b)).float(), lse.masked_fill(keys == 0, 0.0), keys)
    merged_lse, merged_keys = torch.zeros_like(lse), torch.zeros_like(keys)
    sent = _one_copy([targets, starts, sources], out_a.device)
    _launch_merge(states, (out_a, merged_lse, merged_keys), tuple(sent))
    at = sent[0].long()
    lse_a[at] = merged_lse.masked_fill(merged_keys == 0, float("-inf"))[at].to(lse_a.dtype)


def _launch_merge(
    states: tuple[torch.Tensor, ...], merged: tuple[torch.Tensor, ...], order: tuple[torch.Tensor, ...]
) -> None:
    """states: rows, log-sum-exps, key counts; merged: out and the same two of each token; order: rows, starts, states."""
    _, heads, head_dim = states[0].shape
    launch(
        merge_states,
        (order[0].shape[0], -(-heads // _HEAD_ROWS)),
        *states,
        *merged,
        *order,
        merged[0].stride(0),
        HEADS=heads,
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
