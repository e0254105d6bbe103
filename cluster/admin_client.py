"""The operator's client: HTTP over the admin unix socket.

Owns the spelling of the admin requests. Invariant: every answer is either the server's value or a typed error
with the server's own type and message; the socket's file permission is what lets the caller in.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from .errors import AdminRefused, AdminUnavailable


class AdminClient:
    """Synchronous, one connection; use as a context manager or call ``close``."""

    def __init__(self, socket_path: str | Path, timeout_s: float = 60.0) -> None:
        self._socket_path = str(socket_path)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=self._socket_path), base_url="http://admin", timeout=timeout_s
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the client is not used afterwards."""
        self._http.close()

    def status(self) -> dict[str, Any]:
        return self._json("GET", "/admin/status")

    def create_tenant(self, name: str, namespaces: list[str] | None = None) -> dict[str, Any]:
        """Make a tenant with its first key: ``{"tenant", "namespaces", "key"}``. Shown this once."""
        body: dict[str, Any] = {"name": name}
        if namespaces:
            body["namespaces"] = namespaces
        return self._json("POST", "/admin/tenants", body)

    def list_tenants(self) -> list[dict[str, Any]]:
        answer = self._json("GET", "/admin/tenants")
        return answer["tenants"] if isinstance(answer, dict) else answer

    def create_key(self, tenant: str) -> dict[str, Any]:
        """Make one more key of ``tenant``: ``{"key"}``."""
        return self._json("POST", f"/admin/tenants/{quote(tenant, safe='')}/keys")

    def set_key_enabled(self, key_id: str, enabled: bool) -> dict[str, Any]:
        return self._json("POST", f"/admin/keys/{quote(key_id, safe='')}", {"enabled": enabled})

    def set_namespace_enabled(self, namespace: str, enabled: bool) -> dict[str, Any]:
        return self._json("POST", f"/admin/namespaces/{quote(namespace, safe='')}", {"enabled": enabled})

    def revoke(self, namespace: str, deadline_s: float | None = None) -> bytes:
        """Revoke the namespace's current generation; the certificate's exact bytes.

        ``deadline_s`` is what running requests get; without it the server's own setting holds.
        """
        body: dict[str, Any] = {"namespace": namespace}
        if deadline_s is not None:
            body["deadline_s"] = deadline_s
        # The server may need the deadline, a lost replica's lease and the evidence pass before it answers.
        return self._send("POST", "/admin/revoke", body, timeout_s=(deadline_s or 600.0) + 120.0).content

    def certificate(self, certificate_id: str) -> bytes:
        return self._send("GET", f"/admin/certificates/{quote(certificate_id, safe='')}").content

    def public_key(self) -> bytes:
        """The certificate key's public half, as the file that verification reads."""
        return self._send("GET", "/admin/public-key").content

    def audit_kv(self, namespace: str, samples: int) -> dict[str, Any]:
        """Compare sampled K/V rows of every rank with a cold recompute."""
        body = {"namespace": namespace, "samples": samples}
        return self._json("POST", "/admin/audit/kv", body, timeout_s=300.0)

    def audit_ledgers(self) -> dict[str, Any]:
        """What audits of every ledger found wrong, by actor; empty lists are right."""
        return self._json("POST", "/admin/audit/ledgers", timeout_s=300.0)

    def audit_head(self) -> bytes:
        """A head of the audit trail signed now, as a file's content."""
        return self._send("POST", "/admin/audit-trail/head").content

    def audit_records(self, first: int) -> list[dict[str, Any]]:
        """Records of the audit trail from ``first`` on, as many as the server sends at once."""
        return self._json("POST", "/admin/audit-trail", {"first": first})["records"]

    def pool(self) -> dict[str, Any]:
        return self._json("GET", "/admin/pool")

    def ranks(self) -> dict[str, Any]:
        return self._json("GET", "/admin/ranks")

    def drain(self, wait_s: float = 0.0) -> dict[str, Any]:
        """Stop admission and wait up to ``wait_s`` until no request runs; ``quiet`` says whether that came true."""
        body = {"wait_s": wait_s} if wait_s else None
        return self._json("POST", "/admin/drain", body, timeout_s=wait_s + 60.0)

    def metrics(self) -> str:
        """Prometheus's text format."""
        return self._send("GET", "/metrics").text

    def _json(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0
    ) -> Any:
        response = self._send(method, path, body, timeout_s)
        try:
            return response.json()
        except ValueError as error:
            raise AdminUnavailable(f"{method} {path} was answered with something that is not JSON") from error

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise AdminUnavailable(f"{method} {path} was not answered within {timeout_s:g} s") from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise AdminUnavailable(f"no server answers on {self._socket_path}: {reason}") from error
        if response.is_error:
            raise _refusal(response)
        return response


def _refusal(response: httpx.Response) -> AdminRefused:
    try:
        error = response.json()["error"]
        return AdminRefused(str(error["type"]), str(error["message"]), response.status_code)
    except (ValueError, KeyError, TypeError):
        text = response.text.strip()[:200] or response.reason_phrase
        return AdminRefused("http_error", f"status {response.status_code}: {text}", response.status_code)
