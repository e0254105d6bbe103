"""Owns one rank's activation buffers, allocated once for the largest batch and lent out as views per step.

A buffer that a kernel fills and a matrix product reads exists as a tensor and as an array over the same memory, so that
no layer converts anything; the array of a bfloat16 tensor holds its bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .config import ModelConfig
from .layout import Dtype
from .partition import RankPartition


class StepViews:
    """Views of the first `rows` rows of every buffer; valid until the scratch is dropped."""

    def __init__(self, scratch: Scratch, rows: int) -> None:
        self.rows = rows
        self.x = scratch.x[:rows]
        self.q = scratch.q[:rows]
        self.normed = scratch.normed[:rows]
        self.attended = scratch.attended[:rows]
        self.activated = scratch.activated[:rows]
        self.normed_np = kernel_view(self.normed)
        self.attended_np = kernel_view(self.attended).reshape(self.q.shape)
        self.activated_np = kernel_view(self.activated)


class Scratch:
    """Buffers for `capacity` token rows; the residual stream `x` and the queries are float32 in either dtype."""

    def __init__(self, config: ModelConfig, part: RankPartition, capacity: int, dtype: Dtype) -> None:
        heads, kind = len(part.q_heads), getattr(torch, dtype)
        self.capacity = capacity
        self.x = np.empty((capacity, config.hidden_size), dtype=np.float32)
        self.q = np.empty((capacity, heads, config.head_dim), dtype=np.float32)
        self.normed = torch.empty(capacity, config.hidden_size, dtype=kind)
        self.attended = torch.empty(capacity, heads * config.head_dim, dtype=kind)
        self.activated = torch.empty(capacity, len(part.ffn), dtype=kind)
        self._last: StepViews | None = None

    def views(self, rows: int) -> StepViews:
        """Views for one step; the same object again while the row count stays."""
        if self._last is None or self._last.rows != rows:
            self._last = StepViews(self, rows)
        return self._last


def kernel_view(tensor: torch.Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """An array over a tensor's memory, as kernels take it: float32, or the bits of bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
