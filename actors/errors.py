"""Errors of the actors' room; each says what is unchanged when it is raised."""

from __future__ import annotations


class ActorError(Exception):
    """Base of this folder's errors; ``kind`` is the stable name a client sees."""

    kind = "internal_error"


class InvalidRequest(ActorError):
    """The request can never be served as it is; nothing was admitted. ``param`` names the field at fault."""

    kind = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str | None]]:
        return type(self), (self.message, self.param)


class ServiceUnavailable(ActorError):
    """No replica can take work now; nothing was admitted, the call may be repeated."""

    kind = "service_unavailable"


class StaleRoute(ActorError):
    """The route names another incarnation or has expired; nothing was admitted, ask for a new route."""

    kind = "stale_route"


class ReplicaStopped(ActorError):
    """The replica stopped itself (rank lost, ranks differ, lease lost); no token of the failing step left it."""

    kind = "replica_stopped"


class RanksDiffer(ReplicaStopped):
    """A rank's log index or digest is not the scheduler's; the step's tokens were withheld."""

    kind = "ranks_differ"

    def __init__(self, rank: int, expected: str, found: str) -> None:
        super().__init__(f"rank {rank} reports {found}, the scheduler holds {expected}")
        self.rank, self.expected, self.found = rank, expected, found

    def __reduce__(self) -> tuple[type[RanksDiffer], tuple[int, str, str]]:
        return type(self), (self.rank, self.expected, self.found)


class TransportClosed(ActorError):
    """The peer of a step channel is gone; whatever was not acknowledged was not applied."""

    kind = "transport_closed"


class NoRoom(ActorError):
    """The blocks cannot be given now; nothing was reserved or evicted. The scheduler waits or preempts.

    ``namespace``: whose own ceiling is in the way; ``None``: the pool is.
    """

    kind = "out_of_memory"

    def __init__(self, missing_blocks: int, evictable_blocks: int, namespace: str | None = None) -> None:
        where = "the pool" if namespace is None else f"the share of {namespace}"
        super().__init__(f"{missing_blocks} blocks are missing in {where}, {evictable_blocks} can be evicted")
        self.missing_blocks, self.evictable_blocks = missing_blocks, evictable_blocks
        self.namespace = namespace


class NamespaceRevoked(ActorError):
    """The request's namespace generation has been revoked; nothing was admitted."""

    kind = "namespace_revoked"


class PoolAllotted(ActorError):
    """Strict isolation has no share left for a namespace that asks for the first time; nothing was admitted."""

    kind = "pool_allotted"

    def __init__(self, share_blocks: int, left_blocks: int) -> None:
        super().__init__(f"a namespace's share is {share_blocks} blocks, {left_blocks} of the pool are left")
        self.share_blocks, self.left_blocks = share_blocks, left_blocks

    def __reduce__(self) -> tuple[type[PoolAllotted], tuple[int, int]]:
        return type(self), (self.share_blocks, self.left_blocks)


class CacheGroupsUnfit(ActorError):
    """A log's cache groups fit neither this scheduler's policies nor this rank's pools; nothing was applied."""

    kind = "unsupported_cache_groups"

    def __init__(self, group: str, why: str) -> None:
        super().__init__(f"cache group {group}: {why}")
        self.group, self.why = group, why

    def __reduce__(self) -> tuple[type[CacheGroupsUnfit], tuple[str, str]]:
        return type(self), (self.group, self.why)
