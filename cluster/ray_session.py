"""The Ray session of a server: a private cluster of its own, or a place on a cluster that is there already.

Owns the environment Ray runs under (it is read at import, so it is set before) and the connection. Invariant: every actor
and placement group of a server lives on the driver's node, in a Ray namespace named after the run, and ends with the
session. A private cluster's token is made here: whoever has it not can neither join nor submit (FACTS: Ray's ports listen
on all interfaces, whatever address it is told). On a joined cluster all of that is the cluster's: its environment is taken
as given, and how `copyhold` reaches its workers is ``ray_package``'s.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ClusterTooSmall, ClusterUnavailable
from .launch import RUN_MARK, LaunchSpec
from .ray_package import shipped_package

_OBJECT_STORE_BYTES = 80 << 20
_CONNECT_TIMEOUT_S = 5.0
_FREE_CPUS_TIMEOUT_S = 15.0
_TOKEN_HINT = "a cluster that wants a token gets it from RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH"


def enter_environment(spec: LaunchSpec) -> None:
    """Set what Ray and the numeric libraries read when they are imported; call before anything imports Ray."""
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported before its environment was set")
    os.environ.update(_thread_limits(spec), RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")
    if spec.config.address:
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
        return
    token_path = Path(spec.run_dir) / "ray-token"
    descriptor = os.open(token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    # Ray runs its workers at niceness 15; ours answer people, and compete with whatever else the machine does.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token_path), RAY_worker_niceness="0")


class RaySession:
    """A connected Ray; ``ray`` is the module, ``node_id`` the node that carries the server."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.node_id: str = ray.get_runtime_context().get_node_id()

    def service_options(self) -> dict[str, Any]:
        """Options of an actor that needs no logical CPU."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node_id, soft=False),
        }

    def reserve(self, cpus: int) -> Any:
        """A placement group of ``cpus`` bundles of one logical CPU, on this node; it ends with the session."""
        from ray.util.placement_group import placement_group

        on_this_node = [{"ray.io/node-id": self.node_id}] * cpus
        return placement_group(
            [{"CPU": 1}] * cpus, strategy="STRICT_PACK", bundle_label_selector=on_this_node
        )

    def close(self) -> None:
        """Disconnect; a private cluster ends, a joined one ends what this session made."""
        self.ray.shutdown()


def open_session(spec: LaunchSpec, cpus: int) -> RaySession:
    """Start a private cluster of ``cpus`` logical CPUs, or join the one that the configuration names.

    Raises:
        ClusterUnavailable: there is none, it does not let us in, or not on this machine.
        ClusterTooSmall: it cannot give ``cpus`` logical CPUs on this node. Nothing of ours runs on it then.
    """
    if not spec.config.address:
        return _start_private(spec, cpus)
    session = _join(spec, {})
    try:
        _check_cpus(session, cpus)
        package = shipped_package(session)
    except BaseException:
        session.close()
        raise
    if package is not None:
        session.close()
        session = _join(spec, {"py_modules": [str(package)]})
    return session


def _start_private(spec: LaunchSpec, cpus: int) -> RaySession:
    import ray

    with _own_signal_handlers():
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            namespace=_namespace(spec),
            _temp_dir=spec.ray_dir,
            _node_ip_address="127.0.0.1",
        )
    return RaySession(ray)


def _join(spec: LaunchSpec, shipped: Mapping[str, Any]) -> RaySession:
    """Workers get the mark of the run, by which the supervisor finds them: a raylet started them, not we."""
    address = spec.config.address
    variables = _thread_limits(spec) | {RUN_MARK: spec.run_dir, "TMPDIR": str(Path(spec.run_dir) / "tmp")}
    _check_listening(address)
    try:
        import ray

        with _own_signal_handlers():
            ray.init(
                address=address,
                log_to_driver=False,
                namespace=_namespace(spec),
                runtime_env={"env_vars": variables, **shipped},
            )
    except Exception as error:
        raise ClusterUnavailable(address, f"{str(error) or type(error).__name__} ({_TOKEN_HINT})") from error
    return RaySession(ray)


def _check_listening(address: str) -> None:
    """Ray's own client gives up on a silent address only after long, and by ending the process."""
    known = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = known.rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterUnavailable(known, f"nothing listens there: {error.strerror or error}") from error


def _check_cpus(session: RaySession, cpus: int) -> None:
    """Whether the node has so many logical CPUs, and whether they are free or soon will be."""
    from ray.util.placement_group import remove_placement_group

    nodes = {node["NodeID"]: node["Resources"] for node in session.ray.nodes()}
    total = int(nodes[session.node_id].get("CPU", 0))
    if total < cpus:
        raise ClusterTooSmall(cpus, f"this node has {total}")
    trial = session.reserve(cpus)
    try:
        if not trial.wait(_FREE_CPUS_TIMEOUT_S):
            raise ClusterTooSmall(cpus, f"this node has {total}, but not so many are free")
    finally:
        remove_placement_group(trial)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Connecting puts Ray's handlers in place of ours, and its SIGTERM ends the process before anything is stopped."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _namespace(spec: LaunchSpec) -> str:
    """The run folder's name: two servers on one cluster do not see each other's actors."""
    return Path(spec.run_dir).name


def _thread_limits(spec: LaunchSpec) -> dict[str, str]:
    threads = str(spec.config.threads_per_rank)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
