"""The admin port: tenants, keys, revocation, certificates, audits, drain and metrics over one ``AdminBackend``.

Owns the JSON shapes of ``/admin``. Who may connect is the listener's affair (a unix socket of mode 0600),
so there is no key here and none of these routes exists on the tenant port. Invariant: a refused call has
changed nothing but what its error's own text says, and a certificate's bytes leave exactly as they were
signed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from copyhold.actors.errors import ActorError, InvalidRequest
from copyhold.namespace.errors import (
    CertificateUnknown,
    KeyUnknown,
    NameRefused,
    NamespaceError,
    NamespaceUnknown,
    NameTaken,
    NotFound,
    RevocationUnknown,
    RightsRefused,
    TenantUnknown,
)

from .backend import AdminBackend
from .http_admission import Admission
from .http_stream import OpenStreams
from .metrics import CONTENT_TYPE, GatewayFigures, exposition

_ABSENT = (TenantUnknown, NamespaceUnknown, KeyUnknown, CertificateUnknown, RevocationUnknown, NotFound)
_BAD_VALUE = (NameRefused, RightsRefused)
_DEADLINE_MAX_S = 3600.0
_SAMPLES_DEFAULT = 8
_SAMPLES_MAX = 4096
_DRAIN_POLL_S = 0.1


class AdminRefusal(Exception):
    """A call that was wrong in itself; the backend was not asked."""

    def __init__(self, message: str, kind: str = "invalid_request") -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


def create_admin_app(
    backend: AdminBackend,
    open_streams: OpenStreams | None = None,
    admission: Admission | None = None,
    revocation_deadline_s: float = 1.0,
) -> Starlette:
    """Build the admin port's application over the tenant port's register of answers and its door.

    ``revocation_deadline_s`` is what running requests get where a revocation names no deadline.
    """
    admin = _Admin(backend, open_streams or OpenStreams(), admission or Admission(), revocation_deadline_s)
    routes = [
        Route("/admin/status", admin.status),
        Route("/admin/tenants", admin.create_tenant, methods=["POST"]),
        Route("/admin/tenants", admin.list_tenants),
        Route("/admin/tenants/{name}/keys", admin.create_key, methods=["POST"]),
        Route("/admin/keys/{key_id}", admin.set_key_enabled, methods=["POST"]),
        Route("/admin/namespaces/{name}", admin.set_namespace_enabled, methods=["POST"]),
        Route("/admin/revoke", admin.revoke, methods=["POST"]),
        Route("/admin/certificates/{certificate_id}", admin.certificate),
        Route("/admin/public-key", admin.public_key),
        Route("/admin/audit/kv", admin.audit_kv, methods=["POST"]),
        Route("/admin/audit/ledgers", admin.audit_ledgers, methods=["POST"]),
        Route("/admin/audit-trail", admin.audit_records, methods=["POST"]),
        Route("/admin/audit-trail/head", admin.audit_head, methods=["POST"]),
        Route("/admin/pool", admin.pool),
        Route("/admin/ranks", admin.ranks),
        Route("/admin/drain", admin.drain, methods=["POST"]),
        Route("/metrics", admin.metrics),
    ]
    kinds = (AdminRefusal, ActorError, NamespaceError, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _answer_error))


class _Admin:
    def __init__(
        self,
        backend: AdminBackend,
        open_streams: OpenStreams,
        admission: Admission,
        revocation_deadline_s: float,
    ) -> None:
        self._backend = backend
        self._revocation_deadline_s = revocation_deadline_s
        self._open_streams = open_streams
        self._admission = admission

    async def status(self, request: Request) -> Response:
        gateway = {"open_streams": self._open_streams.total(), "draining": self._admission.closed}
        return _json({**await self._backend.status(), "gateway": gateway})

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text format; answers when the authority is away too."""
        try:
            fleet: Mapping[str, Any] | None = await self._backend.metrics()
        except (ActorError, NamespaceError):
            fleet = None
        gateway = GatewayFigures(
            self._open_streams.total(), self._admission.closed, dict(self._admission.refused)
        )
        return Response(exposition(fleet, gateway), media_type=CONTENT_TYPE)

    async def create_tenant(self, request: Request) -> Response:
        body = await _body(request, ("name", "namespaces"))
        namespaces = body.get("namespaces")
        if namespaces is not None:
            if type(namespaces) is not list or not namespaces:
                raise AdminRefusal("namespaces must be a list of at least one name")
            for namespace in namespaces:
                if type(namespace) is not str:
                    raise AdminRefusal("namespaces must hold strings only")
        return _json(await self._backend.create_tenant(_string(body, "name"), namespaces), 201)

    async def list_tenants(self, request: Request) -> Response:
        return _json({"tenants": await self._backend.list_tenants()})

    async def create_key(self, request: Request) -> Response:
        await _body(request, ())
        return _json(await self._backend.create_key(request.path_params["name"]), 201)

    async def set_key_enabled(self, request: Request) -> Response:
        enabled = _flag(await _body(request, ("enabled",)), "enabled")
        return _json(await self._backend.set_key_enabled(request.path_params["key_id"], enabled))

    async def set_namespace_enabled(self, request: Request) -> Response:
        enabled = _flag(await _body(request, ("enabled",)), "enabled")
        return _json(await self._backend.set_namespace_enabled(request.path_params["name"], enabled))

    async def revoke(self, request: Request) -> Response:
        body = await _body(request, ("namespace", "deadline_s"))
        deadline_s = body.get("deadline_s", self._revocation_deadline_s)
        if type(deadline_s) not in (int, float) or not 0 <= deadline_s <= _DEADLINE_MAX_S:
            raise AdminRefusal(f"deadline_s must be a number from 0 to {_DEADLINE_MAX_S:g}")
        certificate = await self._backend.revoke(_string(body, "namespace"), float(deadline_s))
        return Response(certificate, media_type="application/json")

    async def certificate(self, request: Request) -> Response:
        certificate = await self._backend.certificate(request.path_params["certificate_id"])
        return Response(certificate, media_type="application/json")

    async def public_key(self, request: Request) -> Response:
        return Response(await self._backend.public_key(), media_type="text/plain; charset=utf-8")

    async def audit_kv(self, request: Request) -> Response:
        body = await _body(request, ("namespace", "samples"))
        samples = body.get("samples", _SAMPLES_DEFAULT)
        if type(samples) is not int or not 1 <= samples <= _SAMPLES_MAX:
            raise AdminRefusal(f"samples must be an integer from 1 to {_SAMPLES_MAX}")
        return _json(await self._backend.audit_kv(_string(body, "namespace"), samples))

    async def audit_ledgers(self, request: Request) -> Response:
        return _json(await self._backend.audit_ledgers())

    async def audit_records(self, request: Request) -> Response:
        first = (await _body(request, ("first",))).get("first", 1)
        if type(first) is not int or first < 1:
            raise AdminRefusal("first must be an integer from 1 on")
        return _json({"records": await self._backend.audit_records(first)})

    async def audit_head(self, request: Request) -> Response:
        return Response(await self._backend.audit_head(), media_type="application/json")

    async def pool(self, request: Request) -> Response:
        return _json(await self._backend.pool())

    async def ranks(self, request: Request) -> Response:
        return _json(await self._backend.ranks())

    async def drain(self, request: Request) -> Response:
        """Close the door, then wait up to ``wait_s`` until nothing runs: ``quiet`` says whether that came true."""
        body = await _body(request, ("wait_s",))
        wait_s = body.get("wait_s", 0)
        if type(wait_s) not in (int, float) or not 0 <= wait_s <= _DEADLINE_MAX_S:
            raise AdminRefusal(f"wait_s must be a number from 0 to {_DEADLINE_MAX_S:g}")
        self._admission.close()
        answer = await self._backend.drain()
        deadline_s = time.monotonic() + wait_s
        while not (quiet := await self._is_quiet()) and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return _json({**answer, "quiet": quiet, "open_streams": self._open_streams.total()})

    async def _is_quiet(self) -> bool:
        replicas = (await self._backend.status()).get("replicas", ())
        running = sum(replica.get("running", 0) + replica.get("waiting", 0) for replica in replicas)
        return running == 0 and self._open_streams.total() == 0


async def _body(request: Request, names: Iterable[str]) -> Mapping[str, Any]:
    """The JSON object of a call; an empty body is an empty object, an unknown name is refused."""
    raw = await request.body()
    try:
        body = msgspec.json.decode(raw) if raw else {}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise AdminRefusal(f"the body is not valid JSON: {error}") from None
    if type(body) is not dict:
        raise AdminRefusal("the body must be a JSON object")
    known = tuple(names)
    for name in body:
        if name not in known:
            raise AdminRefusal(f"unknown field {name[:64]!r}; known: {', '.join(known) or 'none'}")
    return body


def _string(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if type(value) is not str or not value:
        raise AdminRefusal(f"{name} must be a string that is not empty")
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if type(value) is not bool:
        raise AdminRefusal(f"{name} must be true or false")
    return value


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    status, kind, message = _describe(error)
    return _json({"error": {"type": kind, "message": message}}, status)


def _describe(error: Exception) -> tuple[int, str, str]:
    """Status, stable type and text of an error. The operator may read what a tenant may not."""
    if isinstance(error, AdminRefusal):
        return 400, error.kind, error.message
    if isinstance(error, InvalidRequest):
        return 400, error.kind, error.message
    if isinstance(error, ActorError):
        return 503, error.kind, str(error) or error.kind
    if isinstance(error, _ABSENT):
        return 404, error.reason, str(error)
    if isinstance(error, NameTaken):
        return 409, error.reason, str(error)
    if isinstance(error, _BAD_VALUE):
        return 400, error.reason, str(error)
    if isinstance(error, NamespaceError):
        return 503, error.reason, str(error)
    if isinstance(error, HTTPException):
        return error.status_code, "not_found" if error.status_code == 404 else "http_error", error.detail
    return 500, "internal_error", f"{type(error).__name__}: {error}"
