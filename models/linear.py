"""Owns the matrix product of a layer: weights packed once into the matrix library's own order.

Packed, a product of few rows reads weights at memory speed and one of many rows computes twice as fast as from a plain
matrix. A row's bits depend on how many rows there are where the inner axis is long (a single row of 1408 columns, in
float32 and in bfloat16, on the machine tried); `copyhold.models.deterministic` is for those who mind. Where the library is
missing, or has no bfloat16, the plain product serves.
"""

from __future__ import annotations

from typing import Any

import torch

_TYPICAL_ROWS = 32
"""Rows the packed order is chosen for; decode of 1 to 8 rows and prefill of 256 are as fast as with their own."""


class Linear:
    """`y = x @ weight.T` for one weight `[out, in]`, which is not kept; input and result have the weight's dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = _pack(weight)
        self._weight = weight.clone() if self._packed is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to a new `[rows, out]`, contiguous."""
        if self._packed is None:
            assert self._weight is not None
            return torch.nn.functional.linear(x, self._weight)
        if x.shape[0] == 0:
            return x.new_empty((0, self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")


def _pack(weight: torch.Tensor) -> Any:
    """The packed weight, None where this build or machine cannot use one."""
    if not torch.backends.mkldnn.is_available():
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
