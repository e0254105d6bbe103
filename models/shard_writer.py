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

_ALIGNMENT_BYTES = 64


class ShardWriter:
    """Writes float32 tensors in the order of `shapes`; the file is whole and synced when the context ends
    well.
    """

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self._pending = list(shapes.items())
        self._pending.reverse()
        header: dict[str, object] = {}
        offset = 0
        for name, shape in shapes.items():
            end = offset + 4 * math.prod(shape)
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT_BYTES)
        self._file = path.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: npt.NDArray[np.float32]) -> None:
        """Append one tensor; it must be the next one of the shapes."""
        expected, shape = self._pending.pop()
        assert name == expected, f"{name} written, {expected} expected"
        assert tensor.shape == shape, f"{name} is {tensor.shape}, {shape} expected"
        assert tensor.dtype == np.float32, f"{name} is {tensor.dtype}"
        self._file.write(np.ascontiguousarray(tensor).data)

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
