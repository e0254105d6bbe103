"""The gateway's view of the cluster behind it.

Owns the protocol between HTTP and everything that serves it, so that the HTTP applications know neither Ray nor Redis.
Every tenant call starts with ``authorize``; nothing looks at an index, a receipt or a session before it (K013).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from copyhold.actors.messages import ReuseReceipt, StreamItem
from copyhold.actors.retention import DEFAULT_RETENTION, Retention
from copyhold.models.sampling import SamplingParams
from copyhold.namespace.authority import Authorization


class Generation(Protocol):
    """One running request. Iterating yields ``StreamItem``; ``cancel`` is idempotent and frees its blocks.

    A caller that needs no more (a stop string matched) calls ``finish`` with the tokens it took and reads on to the
    last item: a ``Finished`` with that count, or the engine's own if the request had ended before. Then it calls
    ``amend`` with the receipt that is true for what it took.
    """

    def __aiter__(self) -> AsyncIterator[StreamItem]: ...

    async def cancel(self) -> None: ...

    async def finish(self, completion_tokens: int) -> None: ...

    async def amend(self, receipt: ReuseReceipt) -> None: ...


class TenantBackend(Protocol):
    """What the tenant port may ask for.

    Errors: ``namespace.errors.Unauthenticated`` (one identical 401), ``namespace.errors.NotFound`` (one identical
    404), ``actors.errors.ServiceUnavailable`` and its kin (503). A call that raised has changed nothing.
    """

    async def authorize(self, credential: str, namespace: str | None, request_id: str) -> Authorization: ...

    async def generate(
        self,
        authorization: Authorization,
        request_id: str,
        tokens: bytes,
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        retention: Retention = DEFAULT_RETENTION,
    ) -> Generation: ...

    async def receipt(self, authorization: Authorization, receipt_id: str) -> ReuseReceipt: ...

    async def ready(self) -> bool: ...


class AdminBackend(Protocol):
    """What the admin unix socket may ask for; every value is JSON-ready."""

    async def status(self) -> dict[str, Any]: ...

    async def create_tenant(self, name: str, namespaces: list[str] | None) -> dict[str, Any]: ...

    async def list_tenants(self) -> list[dict[str, Any]]: ...

    async def create_key(self, tenant: str) -> dict[str, Any]: ...

    async def set_key_enabled(self, key_id: str, enabled: bool) -> dict[str, Any]: ...

    async def set_namespace_enabled(self, namespace: str, enabled: bool) -> dict[str, Any]: ...

    async def revoke(self, namespace: str, deadline_s: float) -> bytes: ...

    async def certificate(self, certificate_id: str) -> bytes: ...

    async def public_key(self) -> bytes: ...

    async def audit_kv(self, namespace: str, samples: int) -> dict[str, Any]: ...

    async def audit_ledgers(self) -> dict[str, Any]: ...

    async def audit_records(self, first: int) -> list[dict[str, Any]]: ...

    async def audit_head(self) -> bytes: ...

    async def pool(self) -> dict[str, Any]: ...

    async def ranks(self) -> dict[str, Any]: ...

    async def drain(self) -> dict[str, Any]: ...

    async def metrics(self) -> dict[str, Any]: ...
