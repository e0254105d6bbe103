"""Whether one gateway lets new generations in, and how many callers it turned away.

Owns the drain switch and the count of refused authorizations by kind. Invariant: once ``close`` was called no generation starts
on this gateway; those that run are not touched. One event loop owns it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from copyhold.namespace.errors import NotFound

from .http_errors import ApiError, draining

_KINDS = {401: "unauthenticated", 429: "rate_limited"}


class Admission:
    """The gateway's door. It opens with the process and closes once."""

    def __init__(self) -> None:
        self._closed = False
        self._refused: Counter[str] = Counter()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def refused(self) -> Mapping[str, int]:
        """Refused authorizations by kind: unauthenticated, rate_limited, not_found, unavailable."""
        return dict(self._refused)

    def close(self) -> None:
        """Let no new generation in; calling it again changes nothing."""
        self._closed = True

    def enter(self) -> None:
        """Called before a generation starts. Raises: ApiError 503 with Retry-After, nothing started."""
        if self._closed:
            raise draining()

    def count_refused(self, error: Exception) -> None:
        """Count an authorization that ended with ``error``."""
        if isinstance(error, ApiError):
            kind = _KINDS.get(error.status, "unavailable")
        else:
            kind = "not_found" if isinstance(error, NotFound) else "unavailable"
        self._refused[kind] += 1
