"""Names of actors in a server's Ray namespace, which is named after its run and is no security boundary (docs/isolation.md).

Actors find each other by name in the namespace they run in, so that servers on one cluster do not meet. A replica's
actors carry its incarnation in their names, so that a name is never given out twice.
"""

AUTHORITY = "authority"
COORDINATOR = "coordinator"
GATEWAY = "gateway"


def replica_name(number: int) -> str:
    """Name of the replica with this number; its incarnations follow one another under it."""
    return f"replica-{number}"


def worker_name(incarnation: str, rank: int) -> str:
    """Name of one tensor-parallel rank's actor of one replica incarnation."""
    return f"{incarnation}-rank-{rank}"
