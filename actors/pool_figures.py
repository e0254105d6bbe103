"""The figures of a replica's pool: how many blocks, why, and what they cost on each rank."""

from __future__ import annotations

from typing import Literal

import msgspec


class PoolFigures(msgspec.Struct, frozen=True):
    """Tuples are by rank; budget = used + unused bytes. ``num_blocks`` is the least of ``affordable_blocks``."""

    source: Literal["pool_tokens", "pool_mb"]
    num_blocks: int
    block_size: int
    block_bytes: tuple[int, ...]
    affordable_blocks: tuple[int, ...]
    budget_bytes: tuple[int, ...]
    used_bytes: tuple[int, ...]
    unused_bytes: tuple[int, ...]
