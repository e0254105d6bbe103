"""Owns the writing of one shard file: a safetensors header from known shapes, then tensors streamed in order.

Streaming keeps the converter's memory at one layer of one model, whatever the model's size. The header is
padded so that data starts on a cache line and a mapped file serves vector loads as it is.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from .layout import Dtype, ShardTensor

_ALIGNMENT_BYTES = 64
_STORED: dict[Dtype, tuple[str, int]] = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
"""Name in a safetensors header and bytes of one element."""


class ShardWriter:
    """Writes float32 tensors, narrowed where `tensors` says so, in its order; the file is whole and synced when the
    context ends well.
    """

    def __init__(self, path: Path, tensors: dict[str, ShardTensor]) -> None:
        self._pending = list(tensors.items())
        self._pending.reverse()
        header: dict[str, object] = {}
        offset = 0
        for name, tensor in tensors.items():
            stored, element_bytes = _STORED[tensor.dtype]
            end = offset + element_bytes * math.prod(tensor.shape)
            header[name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT_BYTES)
        self._file = path.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: npt.NDArray[np.float32]) -> None:
        """Append one tensor; it must be the next one of the shapes."""
        expected, spec = self._pending.pop()
        assert name == expected, f"{name} written, {expected} expected"
        assert tensor.shape == spec.shape, f"{name} is {tensor.shape}, {spec.shape} expected"
        assert tensor.dtype == np.float32, f"{name} is {tensor.dtype}"
        whole = np.ascontiguousarray(tensor)
        self._file.write((bfloat16_bits(whole) if spec.dtype == "bfloat16" else whole).data)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._pending, f"{len(self._pending)} tensors were not written"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16 of each value, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)
