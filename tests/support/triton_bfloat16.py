"""bfloat16 in Triton's interpreter, which keeps it as raw 16-bit integers and multiplies those.

Its dot product is made to see the numbers that the bits mean; nothing else of it is changed. The kernels add, compare and
exponentiate in float32 only, which it does right; float32 to bfloat16 it cuts off where a GPU rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def widen_products() -> None:
    """Make the interpreter's dot product take bfloat16 operands as the numbers that their bits mean."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder_type: Any = interpreter.InterpreterBuilder
    plain = builder_type.create_dot

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = np.left_shift(handle.data, 16, dtype=np.uint32)
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(builder, wide(a), wide(b), *rest)

    builder_type.create_dot = create_dot
