"""What a tenant sees when a request is refused: OpenAI's error body and nothing about anybody else.

Owns the one 401 body, the one 404 body and the map from the rooms' typed errors to HTTP. Invariant: a body
depends on the caller's own request only; replica, rank and incarnation names never reach it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from copyhold.actors.errors import ActorError, InvalidRequest, ServiceUnavailable
from copyhold.namespace.errors import (
    GrantBelowFloor,
    GrantKeyDisabled,
    GrantNamespaceDisabled,
    NamespaceError,
    NotFound,
    SessionTampered,
    Unauthenticated,
)

INVALID_REQUEST = "invalid_request_error"

# Kinds a tenant may read; others are folded onto a public one, since their names would describe the cluster.
_PUBLIC_KINDS: dict[str, tuple[int, str]] = {
    "namespace_revoked": (409, "The namespace was revoked while the request ran; it may be repeated."),
    "service_unavailable": (503, "The service cannot take this request now; it may be repeated."),
    "replica_stopped": (503, "The replica stopped while the request ran; the request may be repeated."),
    "pool_allotted": (503, "No share of the cache is left for this namespace; its operator can give it one."),
    "deadline_exceeded": (503, "The request reached its maximum lifetime."),
    "cancelled": (503, "The request was cancelled."),
    "internal_error": (500, "The service failed on this request."),
}
_REPEATABLE_KINDS = ("service_unavailable", "replica_stopped")
_RETRY_S = 1
_DRAINING_RETRY_S = 5
_FOLDED_KINDS = {"ranks_differ": "replica_stopped", "transport_closed": "replica_stopped"}


class StreamCut(Exception):
    """The answer's namespace generation was closed; nothing of the answer is written after this."""


class GenerationFailed(Exception):
    """The engine ended a generation with a failure; ``kind`` is its stable name. Its blocks are released."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class ApiError(Exception):
    """A refusal with its HTTP status and OpenAI error fields; raising it has changed nothing.

    ``param`` is the field at fault, ``code`` a stable name.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        kind: str = INVALID_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON value ``{"error": {...}}`` in OpenAI's field order."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.body()), self.status, self.headers, media_type="application/json"
        )


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, code, param)


def unauthenticated() -> ApiError:
    """The one refusal for a missing, unknown, wrong, expired or disabled key."""
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, "The API key is missing or not valid.", "invalid_api_key", headers=headers)


def not_found() -> ApiError:
    """The one refusal for an absent, foreign or revoked namespace, receipt or explanation."""
    return ApiError(404, "Not found.", "not_found")


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"The model {name!r} does not exist here.", "model_not_found", "model")


def body_too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"The body is longer than {limit_bytes} bytes.", "body_too_large")


def too_many_failures(retry_after_s: int) -> ApiError:
    """The refusal of a source that failed to authenticate too often; the authority was not asked."""
    message = "Too many failed authentications from this address; wait before the next attempt."
    headers = {"retry-after": str(retry_after_s)}
    return ApiError(429, message, "rate_limit_exceeded", kind="rate_limit_error", headers=headers)


def draining() -> ApiError:
    """The refusal of a server that an operator drains; what runs goes on."""
    message = "The service is being stopped and takes no new requests; another may take it."
    headers = {"retry-after": str(_DRAINING_RETRY_S)}
    return ApiError(503, message, ServiceUnavailable.kind, kind=ServiceUnavailable.kind, headers=headers)


def failure(kind: str, message: str = "", param: str | None = None) -> ApiError:
    """The public form of a failure kind; only ``invalid_request`` keeps its message."""
    if kind == InvalidRequest.kind:
        return invalid(param, message or "The request cannot be served as it is.", kind)
    if kind == "not_authorized":
        # The key was disabled, or its grant ran out, between the gateway's question and the admission.
        return unauthenticated()
    public = _FOLDED_KINDS.get(kind, kind)
    if public not in _PUBLIC_KINDS:
        public = ServiceUnavailable.kind
    status, text = _PUBLIC_KINDS[public]
    headers = {"retry-after": str(_RETRY_S)} if public in _REPEATABLE_KINDS else None
    return ApiError(status, text, public, kind=public, headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """Map a typed error of the rooms below to what the tenant sees."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Unauthenticated | GrantKeyDisabled):
        return unauthenticated()
    if isinstance(error, NotFound | GrantNamespaceDisabled | SessionTampered):
        return not_found()
    if isinstance(error, GrantBelowFloor | StreamCut):
        return failure("namespace_revoked")
    if isinstance(error, InvalidRequest):
        return failure(error.kind, error.message, error.param)
    if isinstance(error, GenerationFailed):
        return failure(error.kind, error.message)
    if isinstance(error, ActorError):
        return failure(error.kind)
    if isinstance(error, NamespaceError):
        return failure(ServiceUnavailable.kind)
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return not_found()
        return ApiError(
            error.status_code, error.detail, "method_not_allowed", headers=dict(error.headers or {})
        )
    return failure("internal_error")


async def answer_nobody(request: Request, error: Exception) -> Response:
    """The client went while its body was read; the server drops what is written to it."""
    return Response(status_code=400)


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler: every refusal leaves in the one format."""
    return to_api_error(error).response()


def exception_handlers() -> dict[Any, Any]:
    """Handlers for every error an endpoint may raise; the last one also logs (Starlette raises it again)."""
    kinds = (ApiError, StreamCut, GenerationFailed, ActorError, NamespaceError, HTTPException, Exception)
    return {**dict.fromkeys(kinds, answer_error), ClientDisconnect: answer_nobody}
