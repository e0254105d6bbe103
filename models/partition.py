"""Owns how one model is cut over tensor-parallel ranks: by KV heads, uneven where they do not divide.

Torch-free and pure. Invariant: the ranges of all ranks, in rank order, cover each axis exactly once; no rank
is empty on any axis and none holds the whole vocabulary when there are several. The KV-head ranges are part
of the world's identity.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from .config import ModelConfig
from .errors import InvalidRankCount, TooManyRanks

_WIDEST_UNIT = 64
"""Columns an ffn or vocabulary range is a multiple of, where the axis allows it: whole cache lines."""


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Half-open `[start, stop)`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        return slice(self.start, self.stop)


class RankPartition(msgspec.Struct, frozen=True):
    """What rank `rank` of `tp_size` holds."""

    rank: int
    tp_size: int
    kv_heads: Range
    q_heads: Range
    ffn: Range
    vocab: Range


def partition(config: ModelConfig, tp_size: int) -> tuple[RankPartition, ...]:
    """Cut the model over `tp_size` ranks; the first ranks get the KV heads that do not divide.

    The ffn follows the KV heads. The vocabulary goes the other way: ranks with fewer layer weights take more
    of it, so that the step's slowest rank is as fast as it can be.

    Raises: `InvalidRankCount`, `TooManyRanks`.
    """
    if tp_size < 1:
        raise InvalidRankCount(f"tensor-parallel size must be at least 1, is {tp_size}")
    if tp_size > config.num_kv_heads:
        raise TooManyRanks(tp_size, config.num_kv_heads)
    whole, extra = divmod(config.num_kv_heads, tp_size)
    heads = [whole + (rank < extra) for rank in range(tp_size)]
    kv = _ranges(heads)
    ffn = _proportional(config.intermediate_size, heads)
    vocab = _ranges(_vocab_sizes(config, heads, ffn))
    group = config.group_size
    return tuple(
        RankPartition(
            rank=rank,
            tp_size=tp_size,
            kv_heads=kv[rank],
            q_heads=Range(kv[rank].start * group, kv[rank].stop * group),
            ffn=ffn[rank],
            vocab=vocab[rank],
        )
        for rank in range(tp_size)
    )


def _ranges(sizes: list[int]) -> list[Range]:
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [Range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def _unit(total: int, parts: int) -> int:
    unit = _WIDEST_UNIT
    while unit > 1 and (total % unit or total // unit < 2 * parts):
        unit //= 2
    return unit


def _proportional(total: int, weights: list[int]) -> list[Range]:
    """Cut `total` at multiples of a unit, near the running share of `weights`, no part empty."""
    unit = _unit(total, len(weights))
    units = total // unit
    cuts = [0]
    for rank in range(1, len(weights) + 1):
        near = (2 * units * sum(weights[:rank]) + sum(weights)) // (2 * sum(weights))
        cuts.append(min(max(near, cuts[-1] + 1), units - (len(weights) - rank)))
    return [Range(a * unit, b * unit) for a, b in pairwise(cuts)]


def _vocab_sizes(config: ModelConfig, heads: list[int], ffn: list[Range]) -> list[int]:
    """Vocabulary rows per rank that even out the weights read per token; at least 1/4 of a fair share."""
    ranks = len(heads)
    unit = _unit(config.vocab_size, ranks)
    units = config.vocab_size // unit
    floor = max(1, units // (4 * ranks))
    attention = 2 * config.head_dim * (config.group_size + 1)
    load = [config.num_layers * (attention * h + 3 * len(f)) for h, f in zip(heads, ffn, strict=True)]
    sizes = [floor] * ranks
    left = units - floor * ranks
    while left:
        totals = [load[rank] + sizes[rank] * unit for rank in range(ranks)]
        lowest = totals.index(min(totals))
        above = [total for total in totals if total > totals[lowest]]
        step = max(1, min(left, ((min(above) - totals[lowest]) // unit) if above else left // ranks))
        sizes[lowest] += step
        left -= step
    return [size * unit for size in sizes]
