"""The requests that a replica has taken and not ended, by request id, those still on their way to the engine included.

Owns their entries and secrets. Invariant: a cancel is never lost: one that comes while its request is being submitted takes
effect as soon as the engine has it. An id is forgotten when its stream ends, whichever way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from .submission import Entry


class OpenRequests:
    """Entries by request id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._secrets: dict[str, bytes] = {}
        self._cancelled: set[str] = set()

    def opening(self, request_id: str, secret: bytes) -> None:
        """The request is being handed to the engine; ``secret`` keys its chain digests until it is closed."""
        self._secrets[request_id] = secret

    def opened(self, request_id: str, entry: Entry) -> bool:
        """The engine has it; whether it was cancelled meanwhile."""
        self._entries[request_id] = entry
        return request_id in self._cancelled

    def secret(self, request_id: str) -> bytes | None:
        """None for a request that is not open."""
        return self._secrets.get(request_id)

    def entry(self, request_id: str) -> Entry | None:
        """None for a request that is not open, or only being opened."""
        return self._entries.get(request_id)

    def cancel(self, request_id: str) -> Entry | None:
        """The entry to cancel now; None where there is nothing to cancel, or not yet."""
        if request_id in self._secrets:
            self._cancelled.add(request_id)
        return self._entries.get(request_id)

    def closed(self, request_id: str) -> None:
        """The request has ended, or never came to be."""
        self._secrets.pop(request_id, None)
        self._cancelled.discard(request_id)
        self._entries.pop(request_id, None)


def cancelled_unheard(cancel: Callable[[Entry], object]) -> Callable[[Future[Entry]], None]:
    """For a submission whose caller has gone: whatever becomes of it is cancelled, since nobody would hear it."""

    def done(submitted: Future[Entry]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            cancel(submitted.result())

    return done
