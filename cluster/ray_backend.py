"""The gateway's backend on Ray: authority, coordinator and replicas behind the gateway's protocol.

Owns the handles of replicas and one subscription to each. Order of every tenant call: authorize at the authority, then route,
then generate; a stale route is asked for again once. Refusals travel as values, not as remote exceptions, so that no traceback
crosses and equal refusals stay equal (docs/isolation.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import ray
from ray.exceptions import RayError

from copyhold.actors.errors import ActorError, ServiceUnavailable
from copyhold.actors.messages import Failed, Finished, GenerateRequest, ReuseReceipt, RouteReceipt, StreamItem
from copyhold.actors.receipt_store import load_receipt
from copyhold.actors.retention import DEFAULT_RETENTION, Retention
from copyhold.actors.routing import DIGEST_EVERY_TOKENS
from copyhold.kvcore.identity import chain_digests
from copyhold.models.sampling import SamplingParams
from copyhold.namespace.authority import Authorization
from copyhold.namespace.errors import NamespaceError
from copyhold.namespace.grants import Grant
from copyhold.namespace.sessions import SessionStore

from .ray_retry import RetryingGeneration
from .ray_subscription import Items, Subscription

_READY_TIMEOUT_S = 4.0


class RayGeneration:
    """One running request on a replica actor."""

    def __init__(self, replica: Any, request: GenerateRequest, items: Items) -> None:
        self._replica = replica
        self._request = request
        self._items = items

    async def __aiter__(self) -> AsyncIterator[StreamItem]:
        while True:
            item = await self._items.get()
            yield item
            if isinstance(item, Finished | Failed):
                return

    async def cancel(self) -> None:
        """Release the request's blocks; a request that has ended is left alone."""
        await self._ask(self._replica.cancel, self._request.request_id)

    async def finish(self, completion_tokens: int) -> None:
        """End the request as stopped; one that has ended is left alone."""
        await self._ask(self._replica.finish, self._request.request_id, completion_tokens)

    async def amend(self, receipt: ReuseReceipt) -> None:
        """Have the replica keep this receipt instead of its own."""
        await self._ask(self._replica.amend, self._request, receipt)

    async def _ask(self, method: Any, *arguments: Any) -> None:
        try:
            await method.remote(*arguments)
        except RayError as error:
            raise ServiceUnavailable(f"the replica is gone ({type(error).__name__})") from error


class RayTenantBackend:
    """``TenantBackend`` over actor handles."""

    def __init__(self, authority: Any, coordinator: Any, sessions: SessionStore) -> None:
        self._authority = authority
        self._coordinator = coordinator
        self._sessions = sessions
        self._replicas: dict[str, Any] = {}
        self._subscriptions: dict[str, Subscription] = {}

    async def authorize(self, credential: str, namespace: str | None, request_id: str) -> Authorization:
        """Raises ``Unauthenticated``, ``NotFound``, ``ServiceUnavailable``."""
        try:
            answer = await self._authority.authorize.remote(credential, namespace, request_id)
        except RayError as error:
            raise ServiceUnavailable(f"the authority is gone ({type(error).__name__})") from error
        return _raised(answer)

    async def generate(
        self,
        authorization: Authorization,
        request_id: str,
        tokens: bytes,
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        retention: Retention = DEFAULT_RETENTION,
    ) -> RetryingGeneration:
        """Route and start; the returned stream begins with ``Admitted`` or a ``Failed``."""
        request = GenerateRequest(
            request_id=request_id,
            grant=authorization.grant,
            secret=authorization.secret,
            route=await self._route(authorization.grant, authorization.secret, tokens),
            tokens=tokens,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            sampling=sampling,
            retention=retention,
        )
        return RetryingGeneration(request, self._started(request), self._restarted)

    async def _restarted(self, request: GenerateRequest) -> RayGeneration:
        """The same request under a fresh route. Raises ``ServiceUnavailable`` while none serves."""
        route = await self._route(request.grant, request.secret, request.tokens)
        return self._started(msgspec.structs.replace(request, route=route))

    def _started(self, request: GenerateRequest) -> RayGeneration:
        incarnation = request.route.incarnation
        replica = self._replica(incarnation)
        subscription = self._subscriptions.get(incarnation)
        if subscription is None or subscription.over:
            self._subscriptions = {name: one for name, one in self._subscriptions.items() if not one.over}
            subscription = self._subscriptions[incarnation] = Subscription(replica)
        return RayGeneration(replica, request, subscription.start(request))

    async def receipt(self, authorization: Authorization, receipt_id: str) -> ReuseReceipt:
        """The tenant's own receipt. Raises ``NotFound`` for an absent, foreign or revoked one alike."""
        return await asyncio.to_thread(
            load_receipt, self._sessions, authorization.grant, authorization.secret, receipt_id
        )

    async def ready(self) -> bool:
        """Whether some replica serves now."""
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                await self._coordinator.status.remote()
                return await self._authority.serving.remote()
        except (RayError, TimeoutError):
            return False

    async def _route(self, grant: Grant, secret: bytes, tokens: bytes) -> RouteReceipt:
        digests = chain_digests(secret, np.frombuffer(tokens, dtype="<i4"), DIGEST_EVERY_TOKENS)
        try:
            route = await self._coordinator.route.remote(grant, digests)
        except RayError as error:
            raise ServiceUnavailable(f"the coordinator is gone ({type(error).__name__})") from error
        if route is None:
            raise ServiceUnavailable("no replica serves now")
        return route

    def _replica(self, name: str) -> Any:
        """The actor of a replica incarnation. Raises ``ServiceUnavailable`` when it is gone."""
        if name not in self._replicas:
            try:
                self._replicas[name] = ray.get_actor(name)
            except ValueError as error:
                raise ServiceUnavailable(f"{name} is gone") from error
        return self._replicas[name]


class RayAdminBackend:
    """``AdminBackend`` over the authority actor; the operator's calls, each audited there."""

    def __init__(self, authority: Any) -> None:
        self._authority = authority

    async def status(self) -> dict[str, Any]:
        return await self._ask("status")

    async def create_tenant(self, name: str, namespaces: list[str] | None) -> dict[str, Any]:
        return await self._ask("create_tenant", name, namespaces)

    async def list_tenants(self) -> list[dict[str, Any]]:
        return await self._ask("list_tenants")

    async def create_key(self, tenant: str) -> dict[str, Any]:
        return await self._ask("create_key", tenant)

    async def set_key_enabled(self, key_id: str, enabled: bool) -> dict[str, Any]:
        return await self._ask("set_key_enabled", key_id, enabled)

    async def set_namespace_enabled(self, namespace: str, enabled: bool) -> dict[str, Any]:
        return await self._ask("set_namespace_enabled", namespace, enabled)

    async def revoke(self, namespace: str, deadline_s: float) -> bytes:
        return await self._ask("revoke", namespace, deadline_s)

    async def certificate(self, certificate_id: str) -> bytes:
        return await self._ask("certificate", certificate_id)

    async def public_key(self) -> bytes:
        return await self._ask("public_key")

    async def audit_kv(self, namespace: str, samples: int) -> dict[str, Any]:
        return await self._ask("audit_kv", namespace, samples)

    async def audit_ledgers(self) -> dict[str, Any]:
        return await self._ask("audit_ledgers")

    async def audit_records(self, first: int) -> list[dict[str, Any]]:
        return await self._ask("audit_records", first)

    async def audit_head(self) -> bytes:
        return await self._ask("audit_head")

    async def pool(self) -> dict[str, Any]:
        return await self._ask("pool")

    async def ranks(self) -> dict[str, Any]:
        return await self._ask("ranks")

    async def drain(self) -> dict[str, Any]:
        return await self._ask("drain")

    async def metrics(self) -> dict[str, Any]:
        return await self._ask("metrics")

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            answer = await getattr(self._authority, method).remote(*arguments)
        except RayError as error:
            raise ServiceUnavailable(f"the authority is gone ({type(error).__name__})") from error
        return _raised(answer)


def _raised(answer: Any) -> Any:
    """An actor's answer, or the refusal it came as."""
    if isinstance(answer, NamespaceError | ActorError):
        raise answer
    return answer
