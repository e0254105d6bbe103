"""What deterministic mode costs: decode of 1 and 8 requests, and prefill, with and without it, taking turns in one process.

``python benchmarks/deterministic_cost.py [MODEL]``: one thread, one rank, the installed SmolLM2 where no model is named.
Processor time of the one thread, the least of many turns, because a busy machine only ever adds to it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from copyhold.cluster.bench_turns import in_turns, least_of
from copyhold.kernels.batch import StepBatch
from copyhold.models.convert import convert
from copyhold.models.layout import Dtype
from copyhold.models.shard_set import ObservedShard, ShardSet

_CONTEXT, _BLOCK = 128, 16
_DECODE_TURNS, _PREFILL_TURNS = 40, 10


def step(sequences: int, rows: int, start: int) -> StepBatch:
    """``rows`` new tokens of each sequence after ``start`` of its own; blocks in order."""
    blocks = -(-(start + rows) // _BLOCK)
    positions = np.tile(np.arange(start, start + rows, dtype=np.int64), sequences)
    owner = np.repeat(np.arange(sequences, dtype=np.int64), rows)
    return StepBatch(
        tokens=(positions * 31 + owner * 7) % 1000 + 3,
        positions=positions,
        slots=owner * blocks * _BLOCK + positions,
        seq_starts=np.arange(0, sequences * rows + 1, rows, dtype=np.int32),
        context_lens=np.full(sequences, start + rows, dtype=np.int32),
        block_tables=np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
        logit_rows=np.arange(rows - 1, sequences * rows, rows, dtype=np.int64),
    )


def least_s(shards: list[ObservedShard], batch: StepBatch, turns: int) -> list[float]:
    """Least time of one forward pass on each shard, taking turns."""
    works = [least_of(lambda shard=shard: shard.forward(batch)) for shard in shards]
    return [least for (least,) in in_turns(works, 1, turns)]


def timed(load: Callable[[], ShardSet]) -> tuple[ShardSet, float]:
    started_s = time.thread_time()
    return load(), time.thread_time() - started_s


def main(arguments: list[str]) -> int:
    """One line per dtype and kind of step."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    source = Path(arguments[0]) if arguments else None
    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    for dtype in dtypes:
        checkpoint = convert(source, Path("~/.cache/copyhold").expanduser(), 1, dtype=dtype)
        plain, plain_s = timed(lambda checkpoint=checkpoint: ShardSet(checkpoint))
        fixed, fixed_s = timed(lambda checkpoint=checkpoint: ShardSet(checkpoint, deterministic=True))
        sys.stdout.write(f"{dtype} load: off {plain_s:.1f} s, on {fixed_s:.1f} s\n")
        shards = [plain.shards[0], fixed.shards[0]]
        for sequences in (1, 8):
            for made in (plain, fixed):
                made.new_pools(sequences * (_CONTEXT // _BLOCK + 1), _BLOCK)
            off, on = least_s(shards, step(sequences, 1, _CONTEXT), _DECODE_TURNS)
            sys.stdout.write(
                f"{dtype} decode {sequences}: off {sequences / off:.1f} tok/s, on {sequences / on:.1f} tok/s, "
                f"{on / off:.2f} of the time\n"
            )
        for rows in (65, 256):
            for made in (plain, fixed):
                made.new_pools(-(-rows // _BLOCK), _BLOCK)
            off, on = least_s(shards, step(1, rows, 0), _PREFILL_TURNS)
            sys.stdout.write(
                f"{dtype} prefill {rows}: off {off * 1e3:.0f} ms, on {on * 1e3:.0f} ms, {on / off:.2f} of the time\n"
            )
        plain.close()
        fixed.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
