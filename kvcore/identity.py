"""Identities: what must be equal for K/V to be exchangeable, as canonical SHA-256 digests, and keyed prefix
chains.

Owns WorldManifest (equal on every rank, keys the prefix roots), RankLayout (one rank's local layout, checked
once when it attaches) and the chain of keyed digests that routing and sessions use. Invariant: any change of
a field changes the digest; labels such as tokenizer name or request id are not fields. Encoding: domain, then
each field as name, type tag and length-prefixed bytes, in declared order, so that no two manifests share an
encoding.
Source: LEDGER "Two identities"; contracts K002, K003, K006, K007, K098, K099, K105.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgspec
import numpy as np

from .digest import Array

_WORLD_DOMAIN = b"copyhold.world.v1"
_LAYOUT_DOMAIN = b"copyhold.rank-layout.v1"
_CHAIN_DOMAIN = b"copyhold.chain.v1"


class CacheGroupManifest(msgspec.Struct, frozen=True):
    """One cache group over all ranks: the layers it covers and what one of their rows is."""

    name: str
    layers: tuple[int, ...]
    block_size: int
    kv_heads: int
    head_dim: int
    window: int


class WorldManifest(msgspec.Struct, frozen=True):
    """Everything that decides K/V values and their logical shape. `kv_head_partition` counts heads of each
    rank.
    """

    model_digest: bytes
    model_revision: str
    adapter_digest: bytes
    cache_abi: str
    groups: tuple[CacheGroupManifest, ...]
    position_contract: str
    quantization: str
    tp_degree: int
    kv_head_partition: tuple[int, ...]


class RankLayout(msgspec.Struct, frozen=True):
    """How one rank's K/V bytes lie in memory."""

    rank: int
    kv_heads: int
    axis_order: tuple[str, ...]
    strides: tuple[int, ...]
    dtype: str
    inner_tile: int
    physical_mode: str


def world_digest(manifest: WorldManifest) -> bytes:
    """32 bytes. Raises: ValueError when the partition or the layer coverage contradicts itself."""
    if len(manifest.kv_head_partition) != manifest.tp_degree:
        raise ValueError(f"tp_degree {manifest.tp_degree}, partition {manifest.kv_head_partition}")
    if not manifest.model_digest:
        raise ValueError("missing_logical_abi: the model's digest is empty")
    layers = [layer for group in manifest.groups for layer in group.layers]
    if len(set(layers)) != len(layers):
        raise ValueError("layer_in_two_groups")
    if sorted(layers) != list(range(len(layers))):
        raise ValueError("layer_gap")
    return hashlib.sha256(_WORLD_DOMAIN + _canonical(manifest)).digest()


def rank_layout_digest(layout: RankLayout) -> bytes:
    """32 bytes. Raises: ValueError for a doubled axis."""
    if len(set(layout.axis_order)) != len(layout.axis_order):
        raise ValueError("duplicate_axis")
    return hashlib.sha256(_LAYOUT_DOMAIN + _canonical(layout)).digest()


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


def _canonical(value: Any) -> bytes:
    """Self-delimiting bytes of a manifest: type tag, length, content."""
    if isinstance(value, msgspec.Struct):
        fields = [(name, getattr(value, name)) for name in value.__struct_fields__]
        content = b"".join(_canonical(name) + _canonical(item) for name, item in fields)
        return _framed(b"S", content)
    if isinstance(value, tuple):
        return _framed(b"T", b"".join(_canonical(item) for item in value))
    if isinstance(value, str):
        return _framed(b"s", value.encode())
    if isinstance(value, bytes):
        return _framed(b"b", value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _framed(b"i", str(value).encode())
    raise TypeError(f"no canonical form for {type(value).__name__}")


def _framed(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content
