"""Who is calling: the API key of a request, and a brake on guessing before the authority is asked.

Owns the token bucket per source address and the gateway's memory of keys that worked. Invariant: a source
that has failed too often costs the authority nothing, a key that worked is never locked out by somebody
else's failures behind the same address, and a missing key is refused exactly as a wrong one.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable

from starlette.requests import Request

from copyhold.namespace.authority import Authorization
from copyhold.namespace.errors import NotFound, Unauthenticated

from .backend import TenantBackend
from .http_errors import ApiError, too_many_failures, unauthenticated
from .http_schema import GatewaySettings

NAMESPACE_HEADER = "x-copyhold-namespace"


class FailureBuckets:
    """One token bucket per source; an attempt takes a token and gets it back when it succeeds."""

    def __init__(self, burst: int, refill_per_s: float, max_sources: int, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._refill_per_s = refill_per_s
        self._max_sources = max_sources
        self._clock = clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, source: str) -> None:
        """Take a token. Raises: ApiError 429, nothing taken."""
        level = self._level(source)
        if level < 1.0:
            raise too_many_failures(math.ceil((1.0 - level) / self._refill_per_s))
        self._store(source, level - 1.0)

    def give_back(self, source: str) -> None:
        self._store(source, min(self._level(source) + 1.0, self._burst))

    def _level(self, source: str) -> float:
        level, since = self._levels.get(source, (float(self._burst), self._clock()))
        return min(level + (self._clock() - since) * self._refill_per_s, self._burst)

    def _store(self, source: str, level: float) -> None:
        self._levels[source] = (level, self._clock())
        self._levels.move_to_end(source)
        if len(self._levels) > self._max_sources:
            self._levels.popitem(last=False)


class Gatekeeper:
    """Asks the authority about a request's key, at most as often as its source may fail."""

    def __init__(self, backend: TenantBackend, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._buckets = FailureBuckets(
            settings.auth_failure_burst, settings.auth_failures_per_s, settings.auth_sources, clock
        )
        self._max_known = settings.auth_sources
        self._fingerprint_key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._first_attempts: dict[bytes, asyncio.Future[None]] = {}

    async def authorize(self, request: Request, request_id: str) -> Authorization:
        """Authorize the request for its namespace.

        Raises: ApiError 401 or 429; NotFound for a namespace that is not the caller's; ServiceUnavailable.
        """
        source = source_address(request)
        credential = bearer_credential(request)
        if credential is None:
            self._buckets.take(source)
            raise unauthenticated()
        namespace = request.headers.get(NAMESPACE_HEADER)
        fingerprint = hashlib.blake2b(credential.encode(), key=self._fingerprint_key).digest()
        # Requests that bring a new key at the same moment wait for the first of them, so that a burst of a
        # good key does not look like a burst of guesses.
        while fingerprint not in self._known and fingerprint in self._first_attempts:
            await asyncio.wait([self._first_attempts[fingerprint]])
        if fingerprint in self._known:
            return await self._ask(credential, namespace, request_id, fingerprint)
        self._buckets.take(source)
        attempt = asyncio.get_running_loop().create_future()
        self._first_attempts[fingerprint] = attempt
        refused = False
        try:
            return await self._ask(credential, namespace, request_id, fingerprint)
        except ApiError:
            refused = True
            raise
        finally:
            del self._first_attempts[fingerprint]
            attempt.set_result(None)
            if not refused:
                # Success, a foreign namespace or an authority out of reach: none of them is a guess at a key.
                self._buckets.give_back(source)

    async def _ask(
        self, credential: str, namespace: str | None, request_id: str, fingerprint: bytes
    ) -> Authorization:
        try:
            authorization = await self._backend.authorize(credential, namespace, request_id)
        except Unauthenticated:
            self._known.pop(fingerprint, None)
            raise unauthenticated() from None
        except NotFound:
            # The authority checks the key first: the key is good, the namespace is not the caller's.
            self._remember(fingerprint)
            raise
        self._remember(fingerprint)
        return authorization

    def _remember(self, fingerprint: bytes) -> None:
        self._known[fingerprint] = None
        self._known.move_to_end(fingerprint)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)


def bearer_credential(request: Request) -> str | None:
    """The key of ``Authorization: Bearer``, or None when there is none to check."""
    scheme, _, credential = request.headers.get("authorization", "").partition(" ")
    credential = credential.strip()
    return credential if scheme.lower() == "bearer" and credential else None


def source_address(request: Request) -> str:
    """What the brake counts by: an IPv4 address, an IPv6 /64, or one name for local sockets."""
    if request.client is None:
        return "local"
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return request.client.host
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
