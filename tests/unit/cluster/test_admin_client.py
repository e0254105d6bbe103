"""The admin client against a real unix socket: exact bytes, typed refusals, no silence."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any, ClassVar

import pytest

from copyhold.cluster.admin_client import AdminClient
from copyhold.cluster.errors import AdminRefused, AdminUnavailable


class Handler(BaseHTTPRequestHandler):
    """Answers what the test put into ``answers`` and keeps what was asked."""

    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}
    asked: ClassVar[list[tuple[str, str, bytes]]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, body))
        status, answer = self.answers.get(self.path, (404, b"nothing here"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def admin() -> Iterator[AdminClient]:
    path = Path("/tmp", f"chadmin-{os.getpid()}.sock")
    Handler.answers, Handler.asked = {}, []
    with UnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        with AdminClient(path) as client:
            yield client
        server.shutdown()
        thread.join()
    path.unlink()


def test_requests_are_spelled_as_the_server_expects(admin: AdminClient) -> None:
    Handler.answers = {
        "/admin/tenants": (200, b'{"tenants": [{"tenant": "acme"}]}'),
        "/admin/tenants/a%20b%2Fc/keys": (201, b'{"key": "k"}'),
        "/admin/audit/kv": (200, b"{}"),
        "/admin/drain": (200, b"{}"),
    }
    assert admin.list_tenants() == [{"tenant": "acme"}]
    assert admin.create_key("a b/c") == {"key": "k"}
    admin.create_tenant("acme", ["x"])
    admin.create_tenant("bravo")
    admin.audit_kv("acme", 4)
    admin.drain()
    assert Handler.asked[2:] == [
        ("POST", "/admin/tenants", b'{"name":"acme","namespaces":["x"]}'),
        ("POST", "/admin/tenants", b'{"name":"bravo"}'),
        ("POST", "/admin/audit/kv", b'{"namespace":"acme","samples":4}'),
        ("POST", "/admin/drain", b""),
    ]


def test_a_certificate_arrives_byte_for_byte(admin: AdminClient) -> None:
    document = b'{"a" :1,\n "b": 2.50}'
    Handler.answers = {
        "/admin/revoke": (200, document),
        "/admin/certificates/acme%3A1": (200, document),
        "/admin/public-key": (200, b"0a\n"),
    }
    assert admin.revoke("acme", 0.5) == document
    assert admin.certificate("acme:1") == document
    assert admin.public_key() == b"0a\n"


def test_a_refusal_keeps_the_servers_type_and_message(admin: AdminClient) -> None:
    Handler.answers = {"/admin/status": (400, b'{"error": {"type": "NameRefused", "message": "no"}}')}
    with pytest.raises(AdminRefused) as refused:
        admin.status()
    assert (refused.value.type, refused.value.message, refused.value.exit_code) == ("name_refused", "no", 2)
    with pytest.raises(AdminRefused, match="status 404: nothing here") as refused:
        admin.pool()
    assert (refused.value.type, refused.value.exit_code) == ("http_error", 1)


def test_an_answer_that_is_not_json_is_an_error(admin: AdminClient) -> None:
    Handler.answers = {"/admin/ranks": (200, b"<html>")}
    with pytest.raises(AdminUnavailable, match="not JSON"):
        admin.ranks()


def test_nobody_at_the_socket_is_an_error(tmp_path: Path) -> None:
    with AdminClient(tmp_path / "none") as client, pytest.raises(AdminUnavailable, match="no server answers"):
        client.status()
