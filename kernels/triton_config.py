"""Owns the launch shapes of the Triton kernels: one table by head dim, element size and SM, instead of autotuning.

A table is the same on every run, so a row's sums have the same order on every run, and it can be compiled ahead of time
for machines that are not at hand. The figures follow from shared memory and registers; no GPU has measured them yet.
Invariant: every entry fits the shared memory of its SM, which the compile checks prove. Contracts: K144, K145.
"""

from __future__ import annotations

import msgspec

from .errors import KernelContractMismatch

SHARED_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory that one program may ask for, by SM."""

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

MAX_HEAD_DIM = 256
_MAX_QUERY_ROWS = 128


class TileConfig(msgspec.Struct, frozen=True):
    """Shape of one program: `query_rows` (token x head of a group) against `key_tokens` keys at a time."""

    query_rows: int
    key_tokens: int
    num_warps: int
    num_stages: int


class AttentionConfig(msgspec.Struct, frozen=True):
    """`narrow` for few query rows over many keys, `wide` for many; `partition_tokens` is K144's unit."""

    narrow: TileConfig
    wide: TileConfig
    partition_tokens: int

    def for_group(self, group: int) -> AttentionConfig:
        """The same shapes, with at least a row for each query head of a group.

        Raises: `KernelContractMismatch` for more heads than a program has rows.
        """
        rows = power_of_two(group)
        if rows > _MAX_QUERY_ROWS:
            raise KernelContractMismatch(
                f"{group} query heads on one KV head: at most {_MAX_QUERY_ROWS} are served"
            )
        narrow, wide = (
            msgspec.structs.replace(tile, query_rows=max(tile.query_rows, rows))
            for tile in (self.narrow, self.wide)
        )
        return AttentionConfig(narrow, wide, self.partition_tokens)


_SMALL_MEMORY = {86, 89, 120}

_TABLE: dict[tuple[int, int], tuple[TileConfig, TileConfig]] = {
    (32, 2): (TileConfig(16, 128, 4, 3), TileConfig(128, 64, 4, 3)),
    (64, 2): (TileConfig(16, 128, 4, 3), TileConfig(128, 64, 4, 3)),
    (128, 2): (TileConfig(16, 64, 4, 3), TileConfig(128, 64, 8, 3)),
    (256, 2): (TileConfig(16, 32, 4, 3), TileConfig(64, 32, 4, 3)),
    (32, 4): (TileConfig(16, 64, 4, 3), TileConfig(64, 32, 4, 3)),
    (64, 4): (TileConfig(16, 64, 4, 3), TileConfig(64, 32, 4, 3)),
    (128, 4): (TileConfig(16, 32, 4, 3), TileConfig(32, 32, 4, 3)),
    (256, 4): (TileConfig(16, 16, 4, 3), TileConfig(32, 16, 8, 3)),
}
"""(padded head dim, element bytes) -> (narrow, wide)."""

_PARTITION_TOKENS = 512


def power_of_two(least: int) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << (least - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """What a program's vectors of `head_dim` are padded to: 16 is the smallest edge of a tensor-core product."""
    return max(16, power_of_two(head_dim))


def attention_config(head_dim: int, dtype: str, sm: int, group: int) -> AttentionConfig:
    """The table's entry; a group of more heads than `narrow` has rows widens it.

    Raises: `KernelContractMismatch` for a head dim, dtype, SM or group that no entry serves.
    """
    if dtype not in ELEMENT_BYTES:
        raise KernelContractMismatch(f"the triton backend has no kernels for {dtype}")
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise KernelContractMismatch(
            f"head dim {head_dim}: a multiple of 8 from 8 to {MAX_HEAD_DIM} is needed"
        )
    if sm < 80:
        raise KernelContractMismatch(f"sm_{sm} is older than sm_80, which the triton backend starts from")
    narrow, wide = _TABLE[max(32, padded_dim(head_dim)), ELEMENT_BYTES[dtype]]
    if sm in _SMALL_MEMORY:
        narrow, wide = (
            TileConfig(t.query_rows, min(t.key_tokens, 32), t.num_warps, 2) for t in (narrow, wide)
        )
    return AttentionConfig(narrow, wide, _PARTITION_TOKENS).for_group(group)
