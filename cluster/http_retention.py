"""How a body asks for its prefix to be kept: ``cache_priority``, ``cache_ttl_s``, ``cache_no_store``.

Owns their types and their lower bounds; what a namespace may ask at most is the replica's to say, which refuses by the same
field names. Absent or null fields ask for nothing: kept until evicted, at priority 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from copyhold.actors.retention import DEFAULT_RETENTION, Retention

from .http_errors import invalid
from .http_rules import is_number, wrong_type

RETENTION_NAMES = frozenset({"cache_priority", "cache_ttl_s", "cache_no_store"})


def parse_retention(body: Mapping[str, Any]) -> Retention:
    """Check the retention fields. Raises: ApiError 400 that names the field."""
    if not RETENTION_NAMES & body.keys():
        return DEFAULT_RETENTION
    no_store = body.get("cache_no_store")
    if no_store is not None and type(no_store) is not bool:
        raise wrong_type("cache_no_store", no_store, "a boolean")
    priority = body.get("cache_priority")
    if priority is not None and type(priority) is not int:
        raise wrong_type("cache_priority", priority, "an integer")
    if priority is not None and priority < 0:
        raise invalid("cache_priority", f"cache_priority is {priority}; it must be at least 0.")
    ttl_s = body.get("cache_ttl_s")
    if ttl_s is not None and not is_number(ttl_s):
        raise wrong_type("cache_ttl_s", ttl_s, "a number")
    if ttl_s is not None and not 0 < ttl_s < float("inf"):
        raise invalid("cache_ttl_s", f"cache_ttl_s is {ttl_s}; it must be above 0.")
    if no_store and (priority or ttl_s is not None):
        field = "cache_priority" if priority else "cache_ttl_s"
        raise invalid("cache_no_store", f"cache_no_store keeps nothing; {field} asks to keep it.")
    return Retention(priority or 0, None if ttl_s is None else float(ttl_s), no_store is True)
