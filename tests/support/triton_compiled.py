"""Compiles a selection of the Triton kernels for GPUs that are not here, in a process of its own; prints one JSON object.

Each job of `JOBS` covers something that no other does: an SM, a dtype, a program shape, a padded head dim, a flag. All entries of
the table: ``python -m copyhold.kernels.triton_aot``.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copyhold.kernels.triton_aot import Job

JOBS = (
    "sm_80 float16 narrow states of dim 64",
    "sm_80 bfloat16 wide rows of dim 128",
    "sm_90 bfloat16 narrow states of dim 128",
    "sm_90 bfloat16 wide rows of dim 80, window and cap",
    "sm_90 float32 narrow rows of dim 64",
    "sm_100 float32 wide states of dim 64",
    "sm_100 bfloat16 wide rows of dim 128",
    "sm_100 bfloat16 narrow states of dim 256",
    "sm_80 merge_states",
    "sm_90 merge_states",
    "sm_100 merge_states",
    *(f"sm_{sm} {kernel}" for sm in (80, 90, 100) for kernel in ("write_rows", "copy_rows")),
    "sm_90 zero_tiles",
    "sm_90 count_nonzero_bytes",
)
IMPOSSIBLE = "a program that asks for more shared memory than the SM has"


def job_of(name: str) -> Job:
    from copyhold.kernels.triton_aot import attention_jobs, row_jobs

    words = name.replace(",", "").split()
    sm = int(words[0].removeprefix("sm_"))
    if len(words) == 2:
        jobs = {job.kernel: job for job in (*row_jobs(sm, "bfloat16"), *attention_jobs(sm, "bfloat16", 128))}
        return jobs[words[1]]
    both = "window" in words
    found = list(
        attention_jobs(sm, words[1], int(words[6]), windowed=both, capped=both, tiles_per_block=1 + both)
    )
    return found[2 * (words[2] == "wide") + (words[3] == "rows")]


def main() -> int:
    import msgspec

    from copyhold.kernels.triton_aot import compile_job

    found: dict[str, Any] = {name: msgspec.to_builtins(compile_job(job_of(name))) for name in JOBS}
    narrow = job_of("sm_90 float16 narrow states of dim 256")
    huge = msgspec.structs.replace(
        narrow, constants={**narrow.constants, "KEY_TOKENS": 256, "QUERY_ROWS": 128}, num_warps=8
    )
    found[IMPOSSIBLE] = msgspec.to_builtins(compile_job(huge))
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
