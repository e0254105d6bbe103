"""HTTP under the client SDK: one connection pool, every failure a ``CopyholdError``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import msgspec

from .sdk_errors import ConnectionFailed, error_of_response

_CONNECT_TIMEOUT_S = 10.0
# A proxy of the environment is for the network, not for a server on this machine.
_DIRECT = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class Transport:
    """Sends JSON with the key and namespace of one client."""

    def __init__(self, base_url: str, api_key: str, namespace: str | None, timeout_s: float) -> None:
        headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        if namespace is not None:
            headers["x-copyhold-namespace"] = namespace
        root = base_url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        mounts: dict[str, httpx.BaseTransport | None] = dict.fromkeys(_DIRECT)
        self._http = httpx.Client(base_url=root, headers=headers, timeout=timeout, mounts=mounts)

    def get(self, path: str) -> bytes:
        """The body of a successful GET. Raises: CopyholdError."""
        return self._send("GET", path, None).content

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """A successful POST. Raises: CopyholdError."""
        return self._send("POST", path, body)

    def open_stream(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """A successful POST whose body has not been read; the caller closes it. Raises: CopyholdError."""
        with connection_errors():
            request = self._http.build_request("POST", path, content=msgspec.json.encode(body))
            response = self._http.send(request, stream=True)
            if response.is_success:
                return response
            try:
                content = response.read()
            finally:
                response.close()
        raise error_of_response(response.status_code, content, response.headers)

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        content = None if body is None else msgspec.json.encode(body)
        with connection_errors():
            response = self._http.request(method, path, content=content)
        if not response.is_success:
            raise error_of_response(response.status_code, response.content, response.headers)
        return response


@contextlib.contextmanager
def connection_errors() -> Iterator[None]:
    """Turn httpx's transport errors into ``ConnectionFailed``."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise ConnectionFailed(f"{type(error).__name__}: {error}", code="connection_failed") from error
