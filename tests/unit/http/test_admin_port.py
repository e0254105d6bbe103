"""The admin application: shapes, certificate bytes, and typed refusals."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from live_server import LiveServer

from copyhold.actors.errors import ServiceUnavailable
from copyhold.cluster.admin_app import create_admin_app
from copyhold.namespace.errors import (
    CertificateUnknown,
    NameRefused,
    NamespaceUnknown,
    NameTaken,
    RevocationStalled,
    TenantUnknown,
)

CERTIFICATE = b'{"certificate": {"namespace":"a" },\n "signature": "00"}'


class ScriptedAdmin:
    """Answers every call with what it was asked; ``refuse`` is raised instead."""

    def __init__(self) -> None:
        self.refuse: Exception | None = None
        self.calls: list[tuple[Any, ...]] = []

    def _called(self, *call: Any) -> dict[str, Any]:
        self.calls.append(call)
        if self.refuse is not None:
            raise self.refuse
        return {"call": list(call)}

    async def status(self) -> dict[str, Any]:
        return self._called("status")

    async def create_tenant(self, name: str, namespaces: list[str] | None) -> dict[str, Any]:
        return self._called("create_tenant", name, namespaces)

    async def list_tenants(self) -> list[dict[str, Any]]:
        return [self._called("list_tenants")]

    async def create_key(self, tenant: str) -> dict[str, Any]:
        return self._called("create_key", tenant)

    async def set_key_enabled(self, key_id: str, enabled: bool) -> dict[str, Any]:
        return self._called("set_key_enabled", key_id, enabled)

    async def set_namespace_enabled(self, namespace: str, enabled: bool) -> dict[str, Any]:
        return self._called("set_namespace_enabled", namespace, enabled)

    async def revoke(self, namespace: str, deadline_s: float) -> bytes:
        self._called("revoke", namespace, deadline_s)
        return CERTIFICATE

    async def certificate(self, certificate_id: str) -> bytes:
        self._called("certificate", certificate_id)
        return CERTIFICATE

    async def public_key(self) -> bytes:
        self._called("public_key")
        return b"-----BEGIN PUBLIC KEY-----\n"

    async def audit_kv(self, namespace: str, samples: int) -> dict[str, Any]:
        return self._called("audit_kv", namespace, samples)

    async def audit_ledgers(self) -> dict[str, Any]:
        return self._called("audit_ledgers")

    async def audit_records(self, first: int) -> list[dict[str, Any]]:
        self._called("audit_records", first)
        return []

    async def audit_head(self) -> bytes:
        self._called("audit_head")
        return b"{}"

    async def pool(self) -> dict[str, Any]:
        return self._called("pool")

    async def ranks(self) -> dict[str, Any]:
        return self._called("ranks")

    async def drain(self) -> dict[str, Any]:
        return self._called("drain")

    async def metrics(self) -> dict[str, Any]:
        return self._called("metrics")


@pytest.fixture
def admin() -> ScriptedAdmin:
    return ScriptedAdmin()


@pytest.fixture
def http(live_server: LiveServer, admin: ScriptedAdmin) -> httpx.Client:
    live_server.app = create_admin_app(admin)
    return live_server.http(key=None)


@pytest.mark.parametrize(
    "method, path, body, status, call",
    [
        ("GET", "/admin/pool", None, 200, ["pool"]),
        ("POST", "/admin/audit/ledgers", None, 200, ["audit_ledgers"]),
        ("POST", "/admin/keys/k1", {"enabled": False}, 200, ["set_key_enabled", "k1", False]),
        ("POST", "/admin/namespaces/acme", {"enabled": True}, 200, ["set_namespace_enabled", "acme", True]),
        ("GET", "/admin/ranks", None, 200, ["ranks"]),
        ("POST", "/admin/tenants", {"name": "a"}, 201, ["create_tenant", "a", None]),
        ("POST", "/admin/tenants", {"name": "a", "namespaces": ["x"]}, 201, ["create_tenant", "a", ["x"]]),
        ("POST", "/admin/tenants/a/keys", None, 201, ["create_key", "a"]),
        ("POST", "/admin/audit/kv", {"namespace": "a"}, 200, ["audit_kv", "a", 8]),
        ("POST", "/admin/audit/kv", {"namespace": "a", "samples": 3}, 200, ["audit_kv", "a", 3]),
    ],
)
def test_a_call_reaches_the_backend(
    http: httpx.Client, method: str, path: str, body: Any, status: int, call: list[Any]
) -> None:
    response = http.request(method, path, json=body) if body is not None else http.request(method, path)
    assert (response.status_code, response.json()) == (status, {"call": call})


def test_tenants_are_listed_under_a_name(http: httpx.Client) -> None:
    assert http.get("/admin/tenants").json() == {"tenants": [{"call": ["list_tenants"]}]}


def test_a_certificate_leaves_byte_for_byte(http: httpx.Client, admin: ScriptedAdmin) -> None:
    assert http.post("/admin/revoke", json={"namespace": "a", "deadline_s": 2}).content == CERTIFICATE
    assert http.post("/admin/revoke", json={"namespace": "a"}).content == CERTIFICATE
    response = http.get("/admin/certificates/cert-1")
    assert response.content == CERTIFICATE and response.headers["content-type"] == "application/json"
    assert admin.calls == [("revoke", "a", 2.0), ("revoke", "a", 1.0), ("certificate", "cert-1")]
    assert http.get("/admin/public-key").text.startswith("-----BEGIN PUBLIC KEY-----")


@pytest.mark.parametrize(
    "path, body",
    [
        ("/admin/tenants", b"{"),
        ("/admin/tenants", b"[]"),
        ("/admin/tenants", b"{}"),
        ("/admin/tenants", b'{"name": ""}'),
        ("/admin/tenants", b'{"name": 1}'),
        ("/admin/tenants", b'{"name": "a", "namespaces": []}'),
        ("/admin/tenants", b'{"name": "a", "namespaces": [1]}'),
        ("/admin/tenants", b'{"name": "a", "namespace": ["x"]}'),
        ("/admin/revoke", b'{"namespace": "a", "deadline_s": true}'),
        ("/admin/revoke", b'{"namespace": "a", "deadline_s": -1}'),
        ("/admin/revoke", b'{"namespace": "a", "deadline_s": 1e9}'),
        ("/admin/audit/kv", b'{"namespace": "a", "samples": 0}'),
        ("/admin/audit/kv", b'{"namespace": "a", "samples": 1.0}'),
        ("/admin/drain", b'{"now": 1}'),
    ],
)
def test_a_wrong_call_is_refused_and_asks_nothing(
    http: httpx.Client, admin: ScriptedAdmin, path: str, body: bytes
) -> None:
    response = http.post(path, content=body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request")
    assert admin.calls == []


@pytest.mark.parametrize(
    "error, status, kind",
    [
        (TenantUnknown("t"), 404, "tenant_unknown"),
        (NamespaceUnknown("n"), 404, "namespace_unknown"),
        (CertificateUnknown("n", 3), 404, "certificate_unknown"),
        (NameTaken("t"), 409, "name_taken"),
        (NameRefused("T!"), 400, "name_refused"),
        (RevocationStalled("n", "closing", "no answer"), 503, "purge_incomplete"),
        (ServiceUnavailable("no replica"), 503, "service_unavailable"),
        (RuntimeError("boom"), 500, "internal_error"),
    ],
)
def test_a_typed_error_has_its_status_and_text(
    http: httpx.Client, admin: ScriptedAdmin, error: Exception, status: int, kind: str
) -> None:
    admin.refuse = error
    response = http.get("/admin/status")
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert str(error) in response.json()["error"]["message"]


def test_tenant_paths_do_not_exist_on_the_admin_port(http: httpx.Client) -> None:
    response = http.get("/v1/models")
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found")


def test_the_trail_is_read_from_a_record_on_and_its_head_as_signed(
    http: httpx.Client, admin: ScriptedAdmin
) -> None:
    assert http.post("/admin/audit-trail", json={"first": 7}).json() == {"records": []}
    assert http.post("/admin/audit-trail/head").content == b"{}"
    assert admin.calls == [("audit_records", 7), ("audit_head",)]
    for first in (0, -1, "1", True, 1.5):
        assert http.post("/admin/audit-trail", json={"first": first}).status_code == 400
