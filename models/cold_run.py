"""Owns the oracle of reuse: one sequence alone, in empty memory, through a table written by hand (K147, K219).

No ledger, no scheduler, no prefix: the prompt in one pass, then one token a step. Whatever serves the same tokens any
other way must come to the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from copyhold.kernels.batch import StepBatch

from .shard_set import ObservedShard, ShardSet


class ColdResult(msgspec.Struct, frozen=True):
    """`tokens[i]` is the greedy choice of `logits[i]`, `[vocab]` float32 each."""

    tokens: tuple[int, ...]
    logits: tuple[npt.NDArray[np.float32], ...]


def cold_run(
    ranks: ShardSet, prompt: Sequence[int], count: int, forced: Sequence[int] = (), block_size: int = 16
) -> ColdResult:
    """`count` greedy tokens after `prompt`; where `forced` has a token, that one is fed on instead of the choice.

    Raises: what `LlamaShard.forward` raises.
    """
    blocks = -(-(len(prompt) + count) // block_size)
    ranks.new_pools(blocks, block_size)
    table = np.arange(blocks, dtype=np.int32)[None]
    chosen: list[int] = []
    logits: list[npt.NDArray[np.float32]] = []
    fed, start = list(prompt), 0
    for step in range(count):
        batch = one_sequence(fed, start, table)
        ids = ranks.each(lambda shard, batch=batch: _greedy(shard, batch))
        logits.append(ranks.last_logits()[0].copy())
        chosen.append(ids[0])
        start += len(fed)
        fed = [forced[step] if step < len(forced) else ids[0]]
    return ColdResult(tuple(chosen), tuple(logits))


def one_sequence(tokens: Sequence[int], start: int, table: npt.NDArray[np.int32]) -> StepBatch:
    """A step of one sequence whose rows lie in order in its pool; logits of the last row."""
    rows = np.arange(start, start + len(tokens), dtype=np.int64)
    return StepBatch(
        tokens=np.asarray(tokens, dtype=np.int64),
        positions=rows,
        slots=rows,
        seq_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lens=np.array([start + len(tokens)], dtype=np.int32),
        block_tables=table,
        logit_rows=np.array([len(tokens) - 1], dtype=np.int64),
    )


def _greedy(shard: ObservedShard, batch: StepBatch) -> int:
    return int(shard.greedy(shard.forward(batch))[0])
