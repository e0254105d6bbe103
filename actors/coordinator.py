"""The coordinator actor: a Ray shell around the routing index.

Trusted for placement only (docs/isolation.md): it verifies that a route is asked for under a live grant, and never sees a
token or a key. It is not in the token path.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from copyhold.namespace.authority import ClusterIdentity
from copyhold.namespace.errors import NamespaceError
from copyhold.namespace.floors import Floors
from copyhold.namespace.grants import Grant

from .messages import RouteReceipt
from .routing import RoutingIndex

_ROUTES_KEPT = 64


class Coordinator:
    """Async methods over ``RoutingIndex``; created as a Ray actor named ``coordinator``."""

    def __init__(self, identity: ClusterIdentity, route_lifetime_s: float = 10.0) -> None:
        self._index = RoutingIndex(route_lifetime_s)
        self._verifier = identity.verifier()
        self._floors = Floors()
        self._routes: deque[RouteReceipt] = deque(maxlen=_ROUTES_KEPT)

    async def attach(self, replica: str, incarnation: str) -> None:
        """A replica incarnation serves from now on."""
        self._index.attach(replica, incarnation)

    async def detach(self, incarnation: str) -> None:
        """A replica incarnation is gone, and its entries with it."""
        self._index.detach(incarnation)

    async def report_load(self, incarnation: str, running: int, waiting: int) -> bool:
        """Running and waiting requests of an incarnation; ``False`` if it is not attached and should attach again."""
        return self._index.report_load(incarnation, running, waiting)

    async def publish(
        self, namespace: str, generation: int, incarnation: str, digests: Sequence[tuple[bytes, int]]
    ) -> None:
        """Publication receipt of a replica: chain digests and the tokens each stands for."""
        self._index.publish(namespace, generation, incarnation, digests)

    async def route(self, grant: Grant, digests: Sequence[bytes]) -> RouteReceipt | None:
        """A route for a granted prompt; ``None`` when no replica serves or the grant does not hold."""
        now_s = time.time()
        try:
            self._verifier.verify(grant, now_s, self._floors)
        except NamespaceError:
            return None
        route = self._index.route(grant.namespace, grant.generation, digests, now_s)
        if route is not None:
            self._routes.append(route)
        return route

    async def drop_routes(self, namespace: str, below_generation: int) -> int:
        """Forget what a revoked generation published; returns the number of digests dropped."""
        return self._index.drop(namespace, below_generation)

    async def status(self) -> dict[str, Any]:
        """Index version and size, attached replicas, and the last routes for the operator."""
        return {
            "index_version": self._index.version,
            "entries": self._index.entries(),
            "collisions": self._index.collisions,
            "replicas": self._index.attached(),
            "routes": [msgspec.to_builtins(route) for route in self._routes],
        }
