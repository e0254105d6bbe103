"""Names of actors in the cluster's Ray namespace. A Ray namespace is no security boundary (SECURITY.md)."""

RAY_NAMESPACE = "copyhold"
AUTHORITY = "authority"
COORDINATOR = "coordinator"
GATEWAY = "gateway"


def replica_name(number: int) -> str:
    """Name of the replica with this number."""
    return f"replica-{number}"


def worker_name(replica: str, rank: int) -> str:
    """Name of one tensor-parallel rank of a replica."""
    return f"{replica}-rank-{rank}"
