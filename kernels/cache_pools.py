"""Owns the K/V pools of one rank by cache group, and which layer lies in which of them.

A group is a set of layers with a block size and blocks of its own; each has one `KVPool` that holds those layers only.
Invariant: every layer of the model lies in exactly one pool; all pools have the same heads and the same storage type, so
that one kernel serves them all. Groups stand in the ledger's order. Contracts: K004, K031, K143.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .errors import KernelContractMismatch
from .interface import KVRows, widen_rows
from .pool import KVPool


class CachePools:
    """One pool a cache group. Raises: `KernelContractMismatch` for layers or geometries that do not fit together."""

    def __init__(self, pools: Sequence[KVPool], layers: Sequence[Sequence[int]]) -> None:
        """`layers[g]`: the model's layers of group `g`, in the order in which its pool holds them."""
        self.pools = tuple(pools)
        self.layers = tuple(tuple(group) for group in layers)
        if not self.pools or [pool.num_layers for pool in self.pools] != [
            len(group) for group in self.layers
        ]:
            raise KernelContractMismatch(f"pools do not hold the layers {self.layers}")
        places = {layer: (group, at) for group, own in enumerate(self.layers) for at, layer in enumerate(own)}
        count = sum(len(group) for group in self.layers)
        if sorted(places) != list(range(count)):
            raise KernelContractMismatch(f"layers {self.layers} are not each layer of a model once")
        shapes = {(pool.kv_heads, pool.head_dim, pool.kv_dtype) for pool in self.pools}
        if len(shapes) > 1:
            raise KernelContractMismatch(f"pools of one rank differ in heads or type: {sorted(shapes)}")
        self.places = tuple(places[layer] for layer in range(count))
        """Group and place in its pool of each layer"""
        self.planes: tuple[tuple[KVRows, KVRows, int], ...] = tuple(
            (self.pools[group].k[at], self.pools[group].v[at], group) for group, at in self.places
        )
        """K, V and group of each layer"""

    def __len__(self) -> int:
        return len(self.pools)

    @property
    def first(self) -> KVPool:
        """The pool of group 0."""
        return self.pools[0]

    @property
    def num_layers(self) -> int:
        return len(self.places)

    @property
    def total_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self.pools)

    def zero_blocks(self, parts: Iterable[Sequence[int]]) -> None:
        """Write zeros over these blocks of each group. Raises: `BlockOutOfRange`."""
        for group, blocks in enumerate(parts):
            if blocks:
                self.pools[group].zero_blocks(blocks)

    def count_nonzero_bytes(self, parts: Iterable[Sequence[int]]) -> int:
        """Bytes that are not zero in these blocks of each group. Raises: `BlockOutOfRange`."""
        return sum(self.pools[group].count_nonzero_bytes(blocks) for group, blocks in enumerate(parts))

    def largest_value(self) -> float:
        """The largest magnitude that any pool holds, K or V; not a number where one is."""
        parts = [part for pool in self.pools for part in (pool.k, pool.v)]
        return float(np.max([np.abs(widen_rows(part)).max() for part in parts]))


def as_pools(pool: KVPool | CachePools) -> CachePools:
    """A pool alone is the pool of a single group with all its layers."""
    return pool if isinstance(pool, CachePools) else CachePools((pool,), (range(pool.num_layers),))
