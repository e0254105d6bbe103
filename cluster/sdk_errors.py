"""Errors of the client SDK; each says what may have happened on the server.

Invariant: every failure of a call is one of these, so that ``except CopyholdError`` is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class CopyholdError(Exception):
    """Base of the SDK's errors. ``code`` is the server's stable name, ``param`` the field at fault."""

    def __init__(
        self, message: str, *, code: str = "", param: str | None = None, status: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.status = status


class AuthenticationError(CopyholdError):
    """The key is missing or not valid. Nothing was looked up or started."""


class NotFoundError(CopyholdError):
    """The model, namespace or receipt does not exist for this key. Nothing was started."""


class InvalidRequestError(CopyholdError):
    """The request can never be served as it is; ``param`` names the field. Nothing was started."""


class NamespaceRevoked(CopyholdError):
    """The namespace was revoked while the request ran. Its state is gone; the call may be repeated, cold."""


class ServiceUnavailable(CopyholdError):
    """The service could not finish this request now. It may be repeated."""


class RateLimited(ServiceUnavailable):
    """Too many failed authentications from this address. Nothing was looked up; wait ``retry_after_s``."""

    retry_after_s: float = 1.0


class ConnectionFailed(CopyholdError):
    """The server was not reached, or the connection broke or timed out. The request may have run."""


def error_of_response(status: int, body: bytes, headers: Mapping[str, str]) -> CopyholdError:
    """The typed error of an HTTP answer that is not a success."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        value = None
    fields = value.get("error") if isinstance(value, dict) else None
    error = error_of_fields(status, fields if isinstance(fields, dict) else {})
    if isinstance(error, RateLimited) and headers.get("retry-after", "").isdecimal():
        error.retry_after_s = float(headers["retry-after"])
    return error


def error_of_fields(status: int | None, fields: Mapping[str, Any]) -> CopyholdError:
    """The typed error of an OpenAI error object; ``status`` is None inside a stream."""
    code = str(fields.get("code") or "")
    message = str(fields.get("message") or f"the server answered with status {status}")
    param = fields.get("param")
    kind = _kind(status, code, str(fields.get("type") or ""))
    return kind(message, code=code, param=param if isinstance(param, str) else None, status=status)


def _kind(status: int | None, code: str, error_type: str) -> type[CopyholdError]:
    if code == "namespace_revoked":
        return NamespaceRevoked
    if code == "invalid_api_key":
        return AuthenticationError
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status is None and error_type == "invalid_request_error":
        return InvalidRequestError
    if status is None or status >= 500:
        return ServiceUnavailable
    return InvalidRequestError


_BY_STATUS: dict[int | None, type[CopyholdError]] = {
    401: AuthenticationError,
    404: NotFoundError,
    429: RateLimited,
}
