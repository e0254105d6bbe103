"""What crosses the border between gateway, authority, coordinator and replica.

Owns the frozen values of one request's journey (docs/architecture.md, "One request, as data"). Token ids travel as
little-endian int32 bytes. Nothing here holds state; every value is written once by its producer.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from copyhold.models.sampling import GREEDY, SamplingParams
from copyhold.namespace.grants import Grant

from .retention import DEFAULT_RETENTION, Retention


class RouteReceipt(msgspec.Struct, frozen=True):
    """Where the coordinator sends a request, and why; valid until ``expires_at`` for that incarnation only.

    ``expected_hit_tokens`` is a routing estimate from keyed digests; the replica matches token ids again.
    """

    replica: str
    incarnation: str
    index_version: int
    expected_hit_tokens: int
    expires_at: float


class GenerateRequest(msgspec.Struct, frozen=True):
    """One verified prompt on its way to a replica.

    ``tokens`` is int32 little-endian; ``secret`` is the generation's K(ns, g), never stored; nor is the seed.
    """

    request_id: str
    grant: Grant
    secret: bytes
    route: RouteReceipt
    tokens: bytes
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParams = GREEDY
    retention: Retention = DEFAULT_RETENTION


class ReuseReceipt(msgspec.Struct, frozen=True):
    """What a tenant may learn of one request's prefix reuse: own lengths, own limit, own timing, an opaque id.

    Lengths are tokens (K092-K095, K109). ``limit`` names the length that bounded the hit; ``reason`` says why the hit is
    not longer. ``time_to_first_token_ms`` is measured in the replica from arrival; 0.0 until the first token.
    ``deterministic``: its logits did not depend on what else the replica computed.
    """

    receipt_id: str
    request_id: str
    namespace: str
    model: str
    created_at: float
    prompt_tokens: int
    cached_tokens: int
    semantic_tokens: int
    indexed_tokens: int
    cap_tokens: int
    block_size: int
    limit: str
    reason: str
    time_to_first_token_ms: float = 0.0
    completion_tokens: int = 0
    finish_reason: str = "running"
    deterministic: bool = False
    junction_tokens: int = 0


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """First item of every stream: the request holds its blocks."""

    receipt: ReuseReceipt


class TokenChunk(msgspec.Struct, frozen=True, tag="tokens"):
    """Tokens released by one engine step, after every rank's digest matched."""

    tokens: tuple[int, ...]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Last item of a stream that ended well; ``reason`` is ``stop`` or ``length``."""

    reason: str
    receipt: ReuseReceipt


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Last item of a stream that did not end well; ``kind`` is a stable name such as ``namespace_revoked``."""

    kind: str
    message: str


StreamItem = Admitted | TokenChunk | Finished | Failed


class ServedModel(Protocol):
    """What a gateway must know of the model it fronts."""

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...
