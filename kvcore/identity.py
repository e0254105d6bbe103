"""Identities that cross a process border: manifests' digests and keyed prefix chains, under one name.

Owns nothing: manifests live in manifests.py, chains in chains.py. Invariant: everything that gateway, router, workers and stores
hash is serialized by one of these two modules.
Source: LEDGER "Two identities", "Prefix tree over cache groups" (keyed chains); contracts K098, K099, K105.
"""

from __future__ import annotations

from .chains import (
    NO_EXTRAS,
    ContentSpan,
    PrefixExtras,
    chain_digests,
    scoped_world,
    tail_digest,
)
from .manifests import (
    CacheGroupManifest,
    GroupLayout,
    RankLayout,
    WorldManifest,
    rank_layout_digest,
    world_digest,
)

__all__ = [
    "NO_EXTRAS",
    "CacheGroupManifest",
    "ContentSpan",
    "GroupLayout",
    "PrefixExtras",
    "RankLayout",
    "WorldManifest",
    "chain_digests",
    "rank_layout_digest",
    "scoped_world",
    "tail_digest",
    "world_digest",
]
