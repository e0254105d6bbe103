"""Owns one rank's activation buffers, allocated once for the largest batch and lent out as views per step.

Each buffer exists as a tensor (for matrix products and collectives) and as an array over the same memory (for
kernels), so that no layer converts anything.
"""

from __future__ import annotations

import numpy as np
import torch

from .config import ModelConfig
from .partition import RankPartition


class StepViews:
    """Views of the first `rows` rows of every buffer; valid until the scratch is dropped."""

    def __init__(self, scratch: Scratch, rows: int) -> None:
        self.rows = rows
        self.x = scratch.x[:rows]
        self.delta = scratch.delta[:rows]
        self.normed = scratch.normed[:rows]
        self.qkv = scratch.qkv[:rows]
        self.attended = scratch.attended[:rows]
        self.gate_up = scratch.gate_up[:rows]
        self.activated = scratch.activated[:rows]
        self.x_np = self.x.numpy()
        self.delta_np = self.delta.numpy()
        self.normed_np = self.normed.numpy()
        self.qkv_np = self.qkv.numpy()
        self.q_np = scratch.q[:rows]
        self.attended_np = self.attended.numpy().reshape(self.q_np.shape)
        self.gate_up_np = self.gate_up.numpy()
        self.activated_np = self.activated.numpy()


class Scratch:
    """Buffers for `capacity` token rows."""

    def __init__(self, config: ModelConfig, part: RankPartition, capacity: int) -> None:
        q, kv = len(part.q_heads) * config.head_dim, len(part.kv_heads) * config.head_dim
        self.capacity = capacity
        self.x = torch.empty(capacity, config.hidden_size)
        self.delta = torch.empty(capacity, config.hidden_size)
        self.normed = torch.empty(capacity, config.hidden_size)
        self.qkv = torch.empty(capacity, q + 2 * kv)
        self.q = np.empty((capacity, len(part.q_heads), config.head_dim), dtype=np.float32)
        self.attended = torch.empty(capacity, q)
        self.gate_up = torch.empty(capacity, 2 * len(part.ffn))
        self.activated = torch.empty(capacity, len(part.ffn))
        self._last: StepViews | None = None

    def views(self, rows: int) -> StepViews:
        """Views for one step; the same object again while the row count stays."""
        if self._last is None or self._last.rows != rows:
            self._last = StepViews(self, rows)
        return self._last
