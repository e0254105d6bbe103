"""Memory of the index: resident bytes of a process that holds nothing but a ledger, before and after it is filled.

Owns the process that is measured. Invariant: what is counted is what the kernel counts, Python's own objects included; only
memory that every ledger of that size has before anything is cached, and what the compiled loops took, is left out.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from .bench_process import run_child

BLOCKS, LEAF_TOKENS = 200_000, 288
"""Leaves as long as the churn's mean suffix, below system prompts of 1,024 tokens."""


def bytes_per_block() -> float:
    """Resident bytes a cached block costs, from a process of its own. Raises: ``BenchInvalid`` when that fails."""
    return float(run_child("bytes per block", "copyhold.cluster.bench_prefix_memory", timeout_s=600))


def main() -> float:
    import numpy as np

    from copyhold.kvcore.warm_up import warm_up

    from .bench_churn import Prefixes
    from .bench_prefix_load import BLOCK, SYSTEM_TOKENS, TENANTS, random_tokens

    warm_up()
    gc.collect()
    before = _resident_bytes()
    prefixes = Prefixes(BLOCKS, SYSTEM_TOKENS + LEAF_TOKENS + BLOCK)
    systems = [random_tokens(SYSTEM_TOKENS, number) for number in range(TENANTS)]
    number = 0
    while prefixes.ledger.gauge().free > (SYSTEM_TOKENS + LEAF_TOKENS) // BLOCK:
        prompt = np.concatenate([systems[number % TENANTS], random_tokens(LEAF_TOKENS, 1000 + number)])
        prefixes.fill(prompt)
        number += 1
    gc.collect()
    gauge = prefixes.ledger.gauge()
    return (_resident_bytes() - before) / (gauge.total - gauge.free)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.stdout.write(f"{main()}\n")
