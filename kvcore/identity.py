"""Keyed prefix chains, beside the manifests' public names.

Owns the chain of keyed digests that routing and sessions use; manifests live in manifests.py and are offered
here too. Invariant: each link covers its predecessor, so that a changed token alters its link and all after it.
Source: LEDGER "Prefix tree over cache groups" (keyed chains); contracts K098, K099, K105.
"""

from __future__ import annotations

import hmac

import numpy as np

from .checked import Array
from .manifests import (
    CacheGroupManifest,
    GroupLayout,
    RankLayout,
    WorldManifest,
    rank_layout_digest,
    world_digest,
)

__all__ = [
    "CacheGroupManifest",
    "GroupLayout",
    "RankLayout",
    "WorldManifest",
    "chain_digests",
    "rank_layout_digest",
    "world_digest",
]

_CHAIN_DOMAIN = b"copyhold.chain.v1"


def chain_digests(key: bytes, tokens: Array, every: int = 256) -> tuple[bytes, ...]:
    """Keyed digests (32 bytes) of the prefixes that end at each multiple of `every`; a short tail has none.

    Each covers its predecessor, so a change alters it and all that follow. `tokens` int32 [n].
    """
    if not key:
        raise ValueError("weak_salt: a chain needs a key")
    if every < 1:
        raise ValueError(f"every is {every}")
    content = memoryview(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    step = 4 * every
    link = hmac.digest(key, _CHAIN_DOMAIN + every.to_bytes(8, "little"), "sha256")
    found: list[bytes] = []
    for start in range(0, len(content) - step + 1, step):
        link = hmac.digest(key, link + content[start : start + step], "sha256")
        found.append(link)
    return tuple(found)
