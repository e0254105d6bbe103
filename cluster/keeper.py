"""The keeper: starts every actor of a server, watches them, and brings back what was lost.

Owns the actors' handles and the recovery rules (docs/architecture.md, failure model). Authority, coordinator and gateway
restart under Ray with their handles unchanged; the keeper completes what a fresh process of theirs does not know. A
replica is never repaired: it is ended with its ranks, proven gone, and followed by a new incarnation with an empty pool.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from copyhold.actors.authority import AuthoritySpec, NamespaceActor
from copyhold.actors.coordinator import Coordinator
from copyhold.actors.names import AUTHORITY, COORDINATOR, GATEWAY
from copyhold.models.manifest import ConvertedCheckpoint

from .gateway import Gateway, GatewaySpec
from .launch import LaunchSpec, ReadyPipe
from .ray_session import open_session
from .replica_start import ReplicaStarter, RunningReplica

_PREVIOUS_RUN_GONE = (
    "the state folder's lock passed to a new server, which found no process of an earlier run"
)
_CALL_TIMEOUT_S = 10.0
_RETRY_AFTER_S = 2.0


class Keeper:
    """Every actor of one server."""

    def __init__(self, spec: LaunchSpec, checkpoint: ConvertedCheckpoint, model_name: str) -> None:
        self._spec = spec
        self._config = spec.config
        self._checkpoint = checkpoint
        self._model_name = model_name
        self._replicas: dict[int, RunningReplica] = {}
        self._retry_at_s: dict[int, float] = {}
        self._ended: dict[str, str] = {}
        self._port = spec.config.port
        self._boot_id = ""
        self.recoveries = 0

    def start(self, pipe: ReadyPipe) -> None:
        """Start everything in order; says Ready at the end. Raises what an actor raised."""
        config = self._config
        pipe.stage("ray", f"joining {config.address}" if config.address else "starting a local cluster")
        self._session = open_session(self._spec, config.replicas * (config.tp + 1))
        self._ray = self._session.ray
        pipe.stage("authority", "opening the stores, taking a term")
        self._start_authority()
        self._starter = ReplicaStarter(self._session, self._spec, self._checkpoint, self._model_name)
        for number in range(config.replicas):
            pipe.stage(
                "replica", f"{number + 1} of {config.replicas}: loading {config.tp} ranks, first lease"
            )
            self._start_replica(number)
        pipe.stage("gateway", "listening")
        self._start_gateway()
        pipe.ready(f"http://{config.host}:{self._port}", self._spec.admin_socket)

    def tick(self) -> None:
        """One look at everything; repairs what it can and reports what it cannot on standard error."""
        for repair in (self._keep_authority, self._keep_gateway, self._report_ended, self._keep_replicas):
            try:
                repair()
            except Exception as error:  # noqa: BLE001 - one part's trouble must not keep the others from repair
                _log(f"{repair.__name__.strip('_')}: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Gateway, replicas, Ray; what does not end by itself is the supervisor's to end."""
        calls = [self._gateway.stop.remote(), *(r.replica.stop.remote() for r in self._replicas.values())]
        _done, left = self._ray.wait(calls, num_returns=len(calls), timeout=self._config.stop_grace_s / 2)
        if left:
            _log(f"{len(left)} of {len(calls)} actors did not stop in time")
        self._session.close()

    # -- start --------------------------------------------------------------------------------------------------

    def _start_authority(self) -> None:
        spec = AuthoritySpec(
            self._spec.state_dir,
            self._spec.authority_store,
            self._spec.sessions_store,
            self._config.accept_generation_loss,
            self._config.lease_s,
        )
        self._authority = self._service(NamespaceActor, AUTHORITY).remote(spec)
        self._get(self._authority.end_previous.remote(_PREVIOUS_RUN_GONE))
        self._cluster = self._get(self._authority.identity.remote())
        self._coordinator = self._service(Coordinator, COORDINATOR).remote(self._cluster)

    def _start_replica(self, number: int) -> None:
        self._replicas[number] = self._starter.start(
            number, self._cluster, self._authority, self._coordinator
        )

    def _start_gateway(self) -> None:
        spec = GatewaySpec(
            host=self._config.host,
            admin_socket=self._spec.admin_socket,
            model_path=str(self._checkpoint.path),
            model_name=self._model_name,
            max_model_len=min(self._config.max_model_len, self._checkpoint.config.max_positions),
            vocab_size=self._checkpoint.config.vocab_size,
            max_tokens_default=self._config.max_tokens_default,
            revocation_deadline_s=self._config.revocation_deadline_s,
            sessions_store=self._spec.sessions_store,
        )
        self._gateway = self._service(Gateway, GATEWAY).remote(spec, self._authority, self._coordinator)
        self._port = self._get(self._gateway.start.remote(self._port))
        self._keep_authority()

    def _service(self, kind: type, name: str) -> Any:
        """An actor that Ray restarts as often as it dies; its handle stays valid."""
        options = {"name": name, "max_concurrency": 1000, "max_restarts": -1}
        return self._ray.remote(kind).options(**options, **self._session.service_options())

    # -- recovery -----------------------------------------------------------------------------------------------

    def _keep_authority(self) -> None:
        """A restarted authority has half-done revocations to finish."""
        self._authority.note_recoveries.remote(self.recoveries)
        boot_id = self._get(self._authority.boot_id.remote())
        if boot_id != self._boot_id:
            self._boot_id = boot_id
            self._authority.resume.remote()

    def _keep_gateway(self) -> None:
        """A restarted gateway listens again, on the port that was told; one that listens is left alone."""
        self._get(self._gateway.start.remote(self._port))

    def _keep_replicas(self) -> None:
        for number in range(self._config.replicas):
            if time.monotonic() >= self._retry_at_s.get(number, 0.0):
                self._keep_replica(number)

    def _keep_replica(self, number: int) -> None:
        running = self._replicas.get(number)
        if running is not None:
            failure = self._failure_of(running)
            if not failure:
                return
            _log(f"{running.incarnation} is lost: {failure}")
            self._end_replica(running)
            self._report_ended()
        try:
            if not self._get(self._authority.store_up.remote()):
                # Nothing can register now; ranks that load only to be ended again would take the machine.
                self._retry_at_s[number] = time.monotonic() + _RETRY_AFTER_S
                return
            self._start_replica(number)
        except BaseException:
            self._retry_at_s[number] = time.monotonic() + _RETRY_AFTER_S
            raise
        self.recoveries += 1
        _log(f"{self._replicas[number].incarnation} serves")

    def _failure_of(self, running: RunningReplica) -> str:
        """Why an incarnation must be replaced; empty while it need not."""
        from ray.exceptions import GetTimeoutError, RayActorError

        dead = [process.pid for process in running.processes if not process.alive]
        if dead:
            return f"processes {dead} are gone"
        try:
            status = self._get(running.replica.status.remote())
        except (RayActorError, GetTimeoutError) as error:
            return type(error).__name__
        return "" if status["serving"] else str(status["failure"])

    def _end_replica(self, running: RunningReplica) -> None:
        """No routes, no processes; the pool went with them. The proof is kept until the authority has it."""
        self._coordinator.detach.remote(running.incarnation)
        self._ended[running.incarnation] = self._starter.end(running)
        del self._replicas[running.number]

    def _report_ended(self) -> None:
        """Tell the authority who is proven gone; what it cannot record now (its store is away) is told again."""
        for incarnation, proof in list(self._ended.items()):
            self._get(self._authority.end_incarnation.remote(incarnation, proof))
            del self._ended[incarnation]

    def _get(self, calls: Any) -> Any:
        return self._ray.get(calls, timeout=_CALL_TIMEOUT_S)


def _log(text: str) -> None:
    print(f"keeper: {text}", file=sys.stderr, flush=True)
