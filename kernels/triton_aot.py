"""Compiles the Triton kernels for GPUs that are not at hand, and says what each asks of the machine.

``python -m copyhold.kernels.triton_aot [--sm 90] [--json]`` compiles every entry of the table for each head dim and dtype;
exit code 1 when one does not compile or needs more shared memory than its SM has. Must not run under Triton's interpreter,
which replaces the compiler. Invariant: the constants compiled here come from the table that launches use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import triton_attention, triton_rows
from .interface import TILE
from .triton_config import ELEMENT_BYTES, SHARED_BYTES, TileConfig, attention_config, padded_dim

TARGETS = (80, 90, 100)
_TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FLOAT_POINTERS = {"state_ptr", "lse_ptr", "out_lse_ptr"}
_DATA_POINTERS = {"q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_rows_ptr", "v_rows_ptr", "planes_ptr"}
_FLOATS = {"scale", "soft_cap"}
_WARP = 32


class Job(msgspec.Struct, frozen=True):
    """One kernel with its constants, for one SM."""

    kernel: str
    sm: int
    dtype: str
    constants: dict[str, int | bool]
    num_warps: int = 4
    num_stages: int = 2


class Compiled(msgspec.Struct, frozen=True):
    """What the compiler says; `error` is empty when it made a cubin that fits."""

    kernel: str
    sm: int
    dtype: str
    constants: dict[str, int | bool]
    shared_bytes: int
    cubin_bytes: int
    error: str = ""


def attention_jobs(
    sm: int,
    dtype: str,
    head_dim: int,
    group: int = 4,
    *,
    windowed: bool = False,
    capped: bool = False,
    tiles_per_block: int = 1,
) -> Iterator[Job]:
    """Both program shapes, writing rows and leaving states, and the merge."""
    config = attention_config(head_dim, dtype, sm, group)
    padded = padded_dim(head_dim)
    for tile, partial in (
        (config.narrow, True),
        (config.narrow, False),
        (config.wide, True),
        (config.wide, False),
    ):
        flags = {"WINDOWED": windowed, "CAPPED": capped, "PARTIAL": partial}
        shape = {
            "HEADS": 8 * group,
            "GROUP": group,
            "DIM": head_dim,
            "DIM_PAD": padded,
            "TILES": tiles_per_block,
        }
        yield _attend(sm, dtype, tile, {**shape, **flags})
    constants = {"HEADS": 8 * group, "HEAD_ROWS": 8, "DIM": head_dim, "DIM_PAD": padded}
    yield Job("merge_states", sm, dtype, constants, 2)


def row_jobs(sm: int, dtype: str, head_dim: int = 128, kv_heads: int = 8) -> Iterator[Job]:
    """Writing, copying, zeroing and counting."""
    width, words = kv_heads * head_dim, kv_heads * TILE * head_dim * ELEMENT_BYTES[dtype] // 4
    row = {"DIM": head_dim, "TILE": TILE}
    yield Job("write_rows", sm, dtype, {"WIDTH": width, **row, "CHUNK": 1024})
    yield Job("copy_rows", sm, dtype, {"TILES": 2, "WIDTH": width * TILE, **row, "CHUNK": 2048})
    yield Job("zero_tiles", sm, dtype, {"WORDS": words, "CHUNK": 2048})
    yield Job("count_nonzero_bytes", sm, dtype, {"WORDS": words, "CHUNK": 2048})


def compile_job(job: Job) -> Compiled:
    """Compile one kernel; a failure is reported, not raised."""
    try:
        made = triton.compile(
            _source(job),
            target=GPUTarget("cuda", job.sm, _WARP),
            options={"num_warps": job.num_warps, "num_stages": job.num_stages},
        )
    except Exception as error:  # noqa: BLE001 - the compiler raises types of several packages
        text = f"{type(error).__name__}: {error}".strip().splitlines()
        return Compiled(
            job.kernel, job.sm, job.dtype, job.constants, 0, 0, text[-1][:300] if text else "failed"
        )
    shared = int(made.metadata.shared)
    too_much = f"needs {shared} B of shared memory" if shared > SHARED_BYTES[job.sm] else ""
    return Compiled(job.kernel, job.sm, job.dtype, job.constants, shared, len(made.asm["cubin"]), too_much)


def _attend(sm: int, dtype: str, tile: TileConfig, constants: dict[str, int | bool]) -> Job:
    own = {"TILE": TILE, "QUERY_ROWS": tile.query_rows, "KEY_TOKENS": tile.key_tokens}
    return Job("attend", sm, dtype, {**constants, **own}, tile.num_warps, tile.num_stages)


def _source(job: Job) -> ASTSource:
    kernel: Any = getattr(
        triton_attention if hasattr(triton_attention, job.kernel) else triton_rows, job.kernel
    )
    names = list(kernel.arg_names)
    signature = {
        name: "constexpr" if name in job.constants else _type(name, _TYPES[job.dtype]) for name in names
    }
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if _is_aligned(name)}
    constants = {(names.index(name),): value for name, value in job.constants.items()}
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)


def _type(name: str, dtype: str) -> str:
    if name in _DATA_POINTERS:
        return f"*{dtype}"
    if name in _FLOAT_POINTERS:
        return "*fp32"
    if name == "slots_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name in _FLOATS else "i32"


def _is_aligned(name: str) -> bool:
    return name.endswith("_ptr") or name in {"q_stride", "out_stride", "tile_stride", "plane_stride"}


def main(argv: Sequence[str]) -> int:
    """Compile everything and print a line each, or one JSON document."""
    parser = argparse.ArgumentParser(prog="triton_aot", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sm", type=int, action="append", choices=sorted(SHARED_BYTES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    found = []
    for sm in options.sm or TARGETS:
        for dtype in ELEMENT_BYTES:
            jobs = list(row_jobs(sm, dtype))
            for head_dim in (64, 80, 128, 256):
                jobs += attention_jobs(sm, dtype, head_dim)
            for done in map(compile_job, jobs):
                found.append(done)
                _tell(done)
    ok = not any(done.error for done in found)
    if options.json:
        sys.stdout.write(json.dumps({"ok": ok, "kernels": msgspec.to_builtins(found)}) + "\n")
    return 0 if ok else 1


def _tell(done: Compiled) -> None:
    """Progress; on standard error, so that a document on standard output stays one."""
    shape = " ".join(f"{name}={int(value)}" for name, value in done.constants.items())
    result = done.error or f"{done.shared_bytes} B shared, {done.cubin_bytes} B cubin"
    sys.stderr.write(f"sm_{done.sm} {done.dtype} {done.kernel} {shape}: {result}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
