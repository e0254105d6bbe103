"""Keyed chains of prefix digests: the one serializer of prefixes outside a ledger.

Owns what a link covers: the link before it, its own tokens, and typed extras. A chain's head covers the encoding's version, the
spacing, adapter, salt and key view, so that every link depends on them; a picture, or embeddings given instead of tokens, enters
every link whose positions it touches, with its own position. Invariant: each link covers its predecessor, fields are delimited by
their lengths, digests enter whole, and a trailing short page has no link. Gateway, router, replicas and sessions use these
functions; a ledger never does: inside it tokens are compared, and `scoped_world` gives it a root of its own for extras.
Source: LEDGER "Prefix tree over cache groups" (keyed chains); contracts K041, K098, K099, K103, K105, K125; case B05.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from .contract_errors import EmptyInput, LengthMismatch, NegativeCount

Array = np.ndarray[Any, np.dtype[Any]]
DIGEST_BYTES = 32
CHAIN_VERSION = b"copyhold.chain.v2"
_TAIL_DOMAIN, _WORLD_DOMAIN = b"copyhold.tail.v1", b"copyhold.scoped-world.v1"


class ContentSpan(msgspec.Struct, frozen=True):
    """Positions [start, start + count) whose token ids stand for other content: SHA-256 `digest` of it.

    `media`: placeholder ids of a picture or sound; `embeddings`: rows given instead of looked up.
    """

    kind: Literal["media", "embeddings"]
    start: int
    count: int
    digest: bytes


class PrefixExtras(msgspec.Struct, frozen=True):
    """What rows depend on beside tokens. `adapter`: content digest of its weights; `view`: how the key is made from ids."""

    adapter: bytes = b""
    salt: bytes = b""
    spans: tuple[ContentSpan, ...] = ()
    view: str = "tokens"

    def __post_init__(self) -> None:
        """Raises: LengthMismatch for a digest that is no SHA-256 or cut short, NegativeCount for a span of nothing."""
        if self.adapter:
            _require_digest("adapter", self.adapter)
        for span in self.spans:
            _require_digest(f"{span.kind} digest", span.digest)
            if span.start < 0:
                raise NegativeCount("start", span.start, 0)
            if span.count < 1:
                raise NegativeCount("count", span.count, 1)


NO_EXTRAS = PrefixExtras()


def chain_digests(
    key: bytes,
    tokens: Array,
    every: int = 256,
    extras: PrefixExtras = NO_EXTRAS,
    *,
    link_bytes: int = DIGEST_BYTES,
) -> tuple[bytes, ...]:
    """Keyed digests (32 bytes) of the prefixes that end at each multiple of `every`; a short tail has none.

    Each covers its predecessor, so a change alters it and all that follow. `tokens` int32 [n]. Fewer `link_bytes` make collisions
    that tests can find; nothing else may use them.
    """
    if not key:
        raise ValueError("weak_salt: a chain needs a key")
    if every < 1:
        raise ValueError(f"every is {every}")
    content = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    spans, step = extras.spans, 4 * every
    link = hmac.digest(key, _head(every, extras), "sha256")[:link_bytes]
    found: list[bytes] = []
    for start in range(0, len(content) - step + 1, step):
        body = link + content[start : start + step]
        if spans:
            body += _spans_of(spans, start // 4, start // 4 + every)
        link = hmac.digest(key, body, "sha256")[:link_bytes]
        found.append(link)
    return tuple(found)


def tail_digest(
    key: bytes, parent: bytes, tokens: Array, valid_rows: int, policy: str, extras: PrefixExtras = NO_EXTRAS
) -> bytes:
    """The keyed identity of an immutable partial tail (K103): parent, tokens, valid rows, policy and extras.

    A longer tail has another identity, so nothing can be appended under this one. Raises: EmptyInput, LengthMismatch.
    """
    if not key:
        raise ValueError("weak_salt: a tail needs a key")
    if valid_rows < 1 or not policy:
        raise EmptyInput("valid_rows" if policy else "policy")
    if len(tokens) < valid_rows:
        raise LengthMismatch("tokens", valid_rows, len(tokens))
    content = np.ascontiguousarray(tokens[:valid_rows], dtype="<i4").tobytes()
    first = _fields(_TAIL_DOMAIN, parent, valid_rows.to_bytes(8, "little"), policy.encode())
    return hmac.digest(key, first + _fields(content, _head(0, extras), _all_spans(extras)), "sha256")


def scoped_world(world: bytes, extras: PrefixExtras) -> bytes:
    """The world of a `Scope` whose rows depend on extras: `world` itself where there are none.

    All extras of the request enter, so prefixes of two requests meet in a ledger only if all their extras are equal: a picture
    that comes later keeps them apart too. That loses hits and can make none.
    """
    if extras == NO_EXTRAS:
        return world
    return hashlib.sha256(_fields(_WORLD_DOMAIN, world, _head(0, extras), _all_spans(extras))).digest()


def _head(every: int, extras: PrefixExtras) -> bytes:
    parts = (CHAIN_VERSION, every.to_bytes(8, "little"), extras.adapter, extras.salt, extras.view.encode())
    return _fields(*parts)


def _spans_of(spans: Sequence[ContentSpan], start: int, end: int) -> bytes:
    """Spans that touch positions [start, end), in the order given."""
    return b"".join([_span(span) for span in spans if span.start < end and start < span.start + span.count])


def _all_spans(extras: PrefixExtras) -> bytes:
    return b"".join([_span(span) for span in extras.spans])


def _span(span: ContentSpan) -> bytes:
    place = span.start.to_bytes(8, "little") + span.count.to_bytes(8, "little")
    return _fields(span.kind.encode(), place, span.digest)


def _fields(*parts: bytes) -> bytes:
    """Each part after its length."""
    return b"".join([len(part).to_bytes(8, "little") + part for part in parts])


def _require_digest(name: str, digest: bytes) -> None:
    if len(digest) != DIGEST_BYTES:
        raise LengthMismatch(name, DIGEST_BYTES, len(digest))
