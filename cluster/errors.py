"""Typed errors of start-up, supervision and the command line.

Owns the family that the CLI prints as one line, ``copyhold: <type>: <message>``. ``type`` is the stable name
a script may match, ``exit_code`` follows the architecture's table (1 something does not hold, 2 the call was
wrong).
"""

from __future__ import annotations

import re


def stable_name(name: str) -> str:
    """``ModelFolderIncomplete`` as ``model_folder_incomplete``; names that are already so stay."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class ClusterError(Exception):
    """Base of this folder's errors. What is unchanged is said by each subclass."""

    type: str = "cluster_error"
    exit_code: int = 1

    @property
    def message(self) -> str:
        """The text on one line, whatever a library put into it."""
        return " ".join(str(self).split())


class PoolRefused(ClusterError):
    """The memory given to a rank does not hold what its pool must; the text says how much is missing. Nothing started."""

    type = "pool_refused"


class RankRefused(ClusterError):
    """A rank's pool or checkpoint is not that of the replica's world; the text names what differs. Its actors end."""

    type = "rank_refused"


class ConfigError(ClusterError):
    """A configuration key or value is not allowed. Nothing was started or written."""

    type = "config"
    exit_code = 2

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class UsageError(ClusterError):
    """The command line does not make sense. Nothing was started or written."""

    type = "usage"
    exit_code = 2


class PortInUse(ClusterError):
    """The tenant port cannot be bound. Nothing was started."""

    type = "port_in_use"

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port, 0 takes any free one"
        )
        self.host = host
        self.port = port


class StateInUse(ClusterError):
    """Another server holds the state folder. Neither server nor folder was touched."""

    type = "state_in_use"

    def __init__(self, state_dir: str, owner_pid: int | None) -> None:
        owner = f"process {owner_pid}" if owner_pid is not None else "another process"
        super().__init__(
            f"{owner} already serves from {state_dir}; stop it with `copyhold stop` or pass --state-dir"
        )
        self.state_dir = state_dir
        self.owner_pid = owner_pid


class RunFolderUnusable(ClusterError):
    """The private run folder cannot be made, or its socket paths would be too long. Nothing was started."""

    type = "run_folder"


class StoreFailed(ClusterError):
    """An embedded Valkey server is missing, did not start or answer. It has been ended; its files stay."""

    type = "store_failed"


class StoreRefused(ClusterError):
    """A store that the configuration names is not there, does not let us in or is not fit. Nothing was started.

    ``type`` is ``store_unavailable``, ``store_refused`` or ``store_not_durable``; the text holds no credentials.
    """

    def __init__(self, type_name: str, message: str) -> None:
        super().__init__(message)
        self.type = type_name


class DriverFailed(ClusterError):
    """The driver reported an error, ended or hung. Everything started with it has been ended and removed.

    ``reported_type`` is the driver's own name for what went wrong and becomes ``type``; ``None`` when it said nothing.
    """

    type = "driver_failed"

    def __init__(self, message: str, reported_type: str | None = None) -> None:
        super().__init__(message)
        self.reported_type = reported_type
        if reported_type is not None:
            self.type = stable_name(reported_type)


class NotRunning(ClusterError):
    """No live server is recorded in the state folder. Nothing was changed."""

    type = "not_running"


class ClusterUnavailable(ClusterError):
    """The Ray cluster of ``address`` cannot be joined from this machine. Nothing of ours runs on it."""

    type = "cluster_unavailable"

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"cannot join the Ray cluster at {address}: {reason}")
        self.address = address


class ClusterTooSmall(ClusterError):
    """The joined cluster's node cannot give the logical CPUs a server needs. Nothing of ours runs on it."""

    type = "cluster_too_small"

    def __init__(self, cpus: int, found: str) -> None:
        super().__init__(
            f"{cpus} logical CPUs are needed, one for each rank and one for each replica; {found} "
            "(fewer with --tp or --replicas)"
        )
        self.cpus = cpus


class StopFailed(ClusterError):
    """The server did not end in time. It may still be shutting down."""

    type = "stop_failed"


class AdminUnavailable(ClusterError):
    """The admin socket does not answer. Whether a request sent meanwhile was carried out is unknown."""

    type = "admin_unavailable"


class AdminRefused(ClusterError):
    """The server refused an admin request; ``type`` and message are its own. It changed nothing."""

    type = "admin_refused"

    def __init__(self, reported_type: str, message: str, status: int) -> None:
        super().__init__(message)
        self.type = stable_name(reported_type)
        self.status = status
        self.exit_code = 2 if status == 400 else 1


class CertificateInvalid(ClusterError):
    """A certificate does not verify. Nothing was changed."""

    type = "certificate_invalid"


class TenantRequestFailed(ClusterError):
    """The tenant port refused or did not answer a request. The server goes on."""

    type = "tenant_request"


class BenchInvalid(ClusterError):
    """A measurement did not measure what it should have; no figure of the run is reported."""

    type = "bench_invalid"
    exit_code = 3
