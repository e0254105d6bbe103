"""The routing index: which replica probably holds which prefix, from publication receipts.

Owns keyed chain digests by replica incarnation. Digests are keyed per namespace generation (docs/isolation.md), so an entry
can only be asked for by who was granted the key; a hit here is a hint that the replica proves again by token ids, and what it
does not prove is counted there: evicted meanwhile, or two prefixes under one digest.
Every entry belongs to one incarnation and dies with it; a revoked generation's entries are dropped by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .messages import RouteReceipt

DIGEST_EVERY_TOKENS = 256


class ReplicaEntry(msgspec.Struct):
    """A live replica, its last reported load and what was routed to it since."""

    replica: str
    incarnation: str
    running: int = 0
    waiting: int = 0
    routed: int = 0

    @property
    def load(self) -> int:
        """Requests it has or will have."""
        return self.running + self.waiting + self.routed


class _Key(msgspec.Struct, frozen=True):
    namespace: str
    generation: int
    incarnation: str


class RoutingIndex:
    """Longest expected hit, then least load, then name. Plain and single-threaded."""

    def __init__(self, route_lifetime_s: float) -> None:
        self._route_lifetime_s = route_lifetime_s
        self._replicas: dict[str, ReplicaEntry] = {}
        self._digests: dict[_Key, dict[bytes, int]] = {}
        self.version = 0
        self.collisions = 0

    def attach(self, replica: str, incarnation: str) -> None:
        """A replica began to serve; an older incarnation of the same name is dropped with its entries."""
        for old in [entry for entry in self._replicas.values() if entry.replica == replica]:
            self.detach(old.incarnation)
        self._replicas[incarnation] = ReplicaEntry(replica, incarnation)
        self.version += 1

    def detach(self, incarnation: str) -> None:
        """Forget an incarnation and everything it published; unknown ones change nothing."""
        if self._replicas.pop(incarnation, None) is not None:
            self._digests = {
                key: value for key, value in self._digests.items() if key.incarnation != incarnation
            }
            self.version += 1

    def report_load(self, incarnation: str, running: int, waiting: int) -> bool:
        """Load of an attached replica; ``False`` and ignored when it is not attached."""
        entry = self._replicas.get(incarnation)
        if entry is None:
            return False
        entry.running, entry.waiting, entry.routed = running, waiting, 0
        return True

    def attached(self) -> list[str]:
        """Incarnations that can be routed to."""
        return sorted(self._replicas)

    def publish(
        self, namespace: str, generation: int, incarnation: str, digests: Sequence[tuple[bytes, int]]
    ) -> None:
        """Prefixes (chain digest, tokens) an incarnation now holds; one digest for two lengths is counted as a collision."""
        if incarnation not in self._replicas:
            return
        held = self._digests.setdefault(_Key(namespace, generation, incarnation), {})
        for digest, tokens in digests:
            if held.setdefault(digest, tokens) != tokens:
                self.collisions += 1
        self.version += 1

    def drop(self, namespace: str, below_generation: int) -> int:
        """Forget a namespace's entries below a generation; returns how many digests went."""
        gone = [k for k in self._digests if k.namespace == namespace and k.generation < below_generation]
        dropped = sum(len(self._digests.pop(key)) for key in gone)
        self.version += 1
        return dropped

    def route(
        self, namespace: str, generation: int, digests: Sequence[bytes], now_s: float
    ) -> RouteReceipt | None:
        """The receipt for the best live replica, ``None`` when none is attached.

        ``digests``: keyed chain digests of the prompt, one every ``DIGEST_EVERY_TOKENS`` tokens, in order.
        """
        best: tuple[int, int, str] | None = None
        chosen: tuple[ReplicaEntry, int] | None = None
        for entry in self._replicas.values():
            held = self._digests.get(_Key(namespace, generation, entry.incarnation), {})
            hit_tokens = 0
            for digest in digests:
                tokens = held.get(digest)
                if tokens is None:
                    break
                hit_tokens = tokens
            rank = (-hit_tokens, entry.load, entry.replica)
            if best is None or rank < best:
                best, chosen = rank, (entry, hit_tokens)
        if chosen is None:
            return None
        entry, hit_tokens = chosen
        entry.routed += 1
        return RouteReceipt(
            entry.replica, entry.incarnation, self.version, hit_tokens, now_s + self._route_lifetime_s
        )

    def entries(self) -> int:
        """Digests held, over all replicas."""
        return sum(len(held) for held in self._digests.values())
