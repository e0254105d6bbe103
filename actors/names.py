"""Names of actors in the cluster's Ray namespace. A Ray namespace is no security boundary (SECURITY.md).

A replica's actors carry its incarnation in their names, so that a name is never given out twice.
"""

RAY_NAMESPACE = "copyhold"
AUTHORITY = "authority"
COORDINATOR = "coordinator"
GATEWAY = "gateway"


def replica_name(number: int) -> str:
    """Name of the replica with this number; its incarnations follow one another under it."""
    return f"replica-{number}"


def worker_name(incarnation: str, rank: int) -> str:
    """Name of one tensor-parallel rank's actor of one replica incarnation."""
    return f"{incarnation}-rank-{rank}"
