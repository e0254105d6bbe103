"""The cpu backend: everything `KernelBackend` asks for, from the two files of jitted code.

Owns nothing but the join of `cpu_rows.py` (rows, norms, activation) and `cpu_attention.py` (attention and states).
"""

from __future__ import annotations

import platform

from llvmlite import binding

from . import cpu_attention, cpu_rows
from .choices import KVDtype
from .cpu_attention import (
    merge_rows,
    merge_states,
    narrow_rows,
    paged_attention,
    paged_attention_split,
    paged_attention_states,
)
from .cpu_rows import add_rms_norm, rotate_and_write, silu_mul, write_rows
from .interface import KernelRequest, Refusal, tile_refusal

__all__ = [
    "NAME",
    "add_rms_norm",
    "compile_counts",
    "merge_rows",
    "merge_states",
    "narrow_rows",
    "paged_attention",
    "paged_attention_split",
    "paged_attention_states",
    "refusal",
    "rotate_and_write",
    "silu_mul",
    "warm_up",
    "write_rows",
]

NAME = "cpu"


def refusal(request: KernelRequest) -> Refusal | None:
    """Layouts of other tiles, and halves where the processor does not convert them."""
    halves = platform.machine() not in ("x86_64", "AMD64") or binding.get_host_cpu_features().get(
        "f16c", False
    )
    if request.kv_dtype == "float16" and not halves:
        return Refusal("kernel_contract_mismatch", "float16 K/V needs a processor with F16C")
    return tile_refusal(request)


def warm_up(kv_dtype: KVDtype = "float32") -> None:
    """Compile (or load from the cache beside the sources) every signature that a rank with this K/V storage uses."""
    cpu_rows.warm_up(kv_dtype)
    cpu_attention.warm_up(kv_dtype)


def compile_counts() -> dict[str, tuple[int, int]]:
    """Per kernel: signatures known and cache misses so far; after `warm_up` neither may rise."""
    return cpu_rows.compile_counts() | cpu_attention.compile_counts()
