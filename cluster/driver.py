"""The driver: the one process that talks to Ray for a server's whole life.

Owns the Ray session (private folder inside the run folder, token authentication, loopback) and the order in which actors
start: authority, coordinator, ranks, replica, gateway. Invariant: ``Ready`` is sent only after every rank's pool is mapped,
a warm-up step has run on all ranks and both listeners answer. SIGTERM ends everything in the reverse order.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from .launch import Failed, LaunchSpec, ReadyPipe, Stage, decode_report, read_launch_spec
from .prepare import PreparedModel, prepared_model

_OBJECT_STORE_BYTES = 80 << 20
_SMALLEST_POOL_BLOCKS = 4
_PREVIOUS_RUN_GONE = (
    "the state folder's lock passed to a new server, which found no process of an earlier run"
)


class StartFailed(Exception):
    """Start-up cannot go on; ``name`` is stable, the message one line. The supervisor cleans up."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def main(argv: list[str] | None = None) -> int:
    """``driver --launch FILE --ready-fd N``; returns 0 after SIGTERM, 1 when start-up failed."""
    parser = argparse.ArgumentParser(prog="copyhold-driver")
    parser.add_argument("--launch", required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    pipe = ReadyPipe(arguments.ready_fd)
    spec = read_launch_spec(arguments.launch)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stopped.set())
    try:
        prepared = _prepare(spec, pipe)
        pipe.stage("ray", "starting a local cluster")
        cluster = Cluster(spec, prepared)
        cluster.start(pipe, stopped)
    except StartFailed as error:
        pipe.failed(error.name, str(error))
        return 1
    except Exception as error:
        pipe.failed(type(error).__name__, str(error) or type(error).__name__)
        raise
    stopped.wait()
    cluster.stop()
    return 0


def _prepare(spec: LaunchSpec, pipe: ReadyPipe) -> PreparedModel:
    """Convert and compile in a process of its own; relay its progress."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "copyhold.cluster.prepare",
        str(Path(spec.run_dir) / "launch.json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            report = decode_report(line)
            if isinstance(report, Failed):
                raise StartFailed(report.error, report.message)
            assert isinstance(report, Stage)
            pipe.stage(report.stage, report.detail)
    if process.returncode != 0:
        raise StartFailed("PrepareFailed", f"model preparation ended with status {process.returncode}")
    return prepared_model(spec.run_dir)


class Cluster:
    """Every actor of one server, started in order."""

    def __init__(self, spec: LaunchSpec, prepared: PreparedModel) -> None:
        from copyhold.models.manifest import load_checkpoint

        self._spec = spec
        self._config = spec.config
        self._checkpoint = load_checkpoint(Path(prepared.path))
        self._incarnation = f"replica-0-{secrets.token_hex(8)}"
        self._actors: list[Any] = []
        self._gateway: Any = None
        self._replica: Any = None

    def start(self, pipe: ReadyPipe, stopped: threading.Event) -> None:
        """Start everything; raises ``StartFailed`` or what an actor raised."""
        ray = self._init_ray()
        pipe.stage("authority", "opening the stores, taking a term")
        authority, identity = self._start_authority(ray)
        coordinator = self._actor(ray, "Coordinator").remote(identity)
        pipe.stage("ranks", f"loading {self._config.tp} tensor-parallel ranks")
        workers = self._start_workers(ray)
        if stopped.is_set():
            raise StartFailed("Stopped", "the start was interrupted")
        pipe.stage("replica", "taking the first serving lease")
        self._replica = self._start_replica(ray, identity, authority, coordinator, workers)
        pipe.stage("gateway", "listening")
        port = self._start_gateway(ray, authority, coordinator)
        pipe.ready(f"http://{self._config.host}:{port}", self._spec.admin_socket)

    def stop(self) -> None:
        """Gateway, replica, the rest, Ray; what does not end by itself is the supervisor's to end."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        for actor in (self._gateway, self._replica):
            try:
                ray.get(actor.stop.remote(), timeout=self._config.stop_grace_s / 2)
            except (RayError, GetTimeoutError) as error:
                print(f"stop: {type(error).__name__}: {error}", file=sys.stderr)
        ray.shutdown()

    # -- one step each ------------------------------------------------------------------------------------------

    def _init_ray(self) -> Any:
        token_path = Path(self._spec.run_dir) / "ray-token"
        descriptor = os.open(token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token_path),
            RAY_USAGE_STATS_ENABLED="0",
            RAY_DEDUP_LOGS="0",
            OMP_NUM_THREADS=str(self._config.threads_per_rank),
            MKL_NUM_THREADS=str(self._config.threads_per_rank),
            GLOO_SOCKET_IFNAME="lo",
        )
        import ray

        from copyhold.actors.names import RAY_NAMESPACE

        ray.init(
            num_cpus=self._config.tp + 1,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            namespace=RAY_NAMESPACE,
            _temp_dir=self._spec.ray_dir,
            _node_ip_address="127.0.0.1",
        )
        return ray

    def _actor(self, ray: Any, kind: str) -> Any:
        from copyhold.actors.authority import NamespaceActor
        from copyhold.actors.coordinator import Coordinator
        from copyhold.actors.names import AUTHORITY, COORDINATOR, GATEWAY

        if kind == "NamespaceActor":
            return ray.remote(NamespaceActor).options(name=AUTHORITY, num_cpus=0, max_concurrency=1000)
        if kind == "Coordinator":
            return ray.remote(Coordinator).options(name=COORDINATOR, num_cpus=0, max_concurrency=1000)
        from .gateway import Gateway

        return ray.remote(Gateway).options(name=GATEWAY, num_cpus=0, max_concurrency=1000)

    def _start_authority(self, ray: Any) -> tuple[Any, Any]:
        from copyhold.actors.authority import AuthoritySpec

        spec = AuthoritySpec(self._spec.state_dir, self._spec.authority_socket, self._spec.sessions_socket)
        authority = self._actor(ray, "NamespaceActor").remote(spec)
        ray.get(authority.end_previous.remote(_PREVIOUS_RUN_GONE))
        return authority, ray.get(authority.identity.remote())

    def _num_blocks(self) -> int:
        blocks = self._config.pool_tokens // self._config.block_size
        if blocks < _SMALLEST_POOL_BLOCKS:
            raise StartFailed("PoolTooSmall", f"pool_tokens {self._config.pool_tokens} gives {blocks} blocks")
        return blocks

    def _max_model_len(self) -> int:
        return min(self._config.max_model_len, self._checkpoint.config.max_positions)

    def _channel_path(self) -> str:
        return str(Path(self._spec.run_dir) / "replica-0.sock")

    def _start_workers(self, ray: Any) -> list[Any]:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from copyhold.actors.names import replica_name, worker_name
        from copyhold.actors.worker import TPWorker, WorkerSpec

        tp = self._config.tp
        self._group = placement_group([{"CPU": 1}] * (tp + 1), strategy="STRICT_PACK")
        ray.get(self._group.ready())
        workers = []
        for rank in range(tp):
            spec = WorkerSpec(
                rank=rank,
                ranks=tp,
                incarnation=self._incarnation,
                model_path=str(self._checkpoint.path),
                block_size=self._config.block_size,
                num_blocks=self._num_blocks(),
                threads=self._config.threads_per_rank,
                max_step_tokens=self._config.step_budget_tokens,
                collective_timeout_s=self._config.collective_timeout_s,
                channel_path=self._channel_path(),
            )
            strategy = PlacementGroupSchedulingStrategy(self._group, rank + 1)
            options = {"name": worker_name(replica_name(0), rank), "num_cpus": 1, "max_concurrency": 2}
            workers.append(ray.remote(TPWorker).options(**options, scheduling_strategy=strategy).remote(spec))
        self._rank_keys = tuple(ray.get([worker.load.remote() for worker in workers]))
        port = ray.get(workers[0].open_store.remote())
        ray.get([worker.join.remote(port) for worker in workers])
        ray.get([worker.warm_up.remote() for worker in workers])
        return workers

    def _start_replica(
        self, ray: Any, identity: Any, authority: Any, coordinator: Any, workers: list[Any]
    ) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from copyhold.actors.names import replica_name
        from copyhold.actors.replica import Replica, ReplicaSpec

        config = self._config
        spec = ReplicaSpec(
            name=replica_name(0),
            incarnation=self._incarnation,
            ranks=config.tp,
            world=self._world(),
            model=self._model_name(),
            block_size=config.block_size,
            num_blocks=self._num_blocks(),
            max_requests=config.max_requests,
            max_model_len=self._max_model_len(),
            step_tokens=config.step_budget_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            channel_path=self._channel_path(),
            step_timeout_s=config.collective_timeout_s,
            cluster=identity,
            sessions_store=self._spec.sessions_socket,
            receipt_ttl_s=config.receipt_ttl_s,
        )
        strategy = PlacementGroupSchedulingStrategy(self._group, 0)
        options = {"name": spec.name, "num_cpus": 1, "max_concurrency": 1000}
        replica = ray.remote(Replica).options(**options, scheduling_strategy=strategy).remote(spec)
        ray.get(replica.listening.remote())
        starting = replica.start.remote(authority, coordinator, self._rank_keys)
        ray.get([worker.serve.remote() for worker in workers])
        ray.get(starting)
        ray.get(authority.attach.remote({self._incarnation: replica}, workers, coordinator))
        return replica

    def _start_gateway(self, ray: Any, authority: Any, coordinator: Any) -> int:
        from copyhold.actors.names import GATEWAY

        from .gateway import GatewaySpec

        spec = GatewaySpec(
            host=self._config.host,
            port=self._config.port,
            admin_socket=self._spec.admin_socket,
            model_path=str(self._checkpoint.path),
            model_name=self._model_name(),
            max_model_len=self._max_model_len(),
            vocab_size=self._checkpoint.config.vocab_size,
            max_tokens_default=self._config.max_tokens_default,
            sessions_store=self._spec.sessions_socket,
        )
        self._gateway = self._actor(ray, "Gateway").remote(spec, authority, coordinator)
        port = ray.get(self._gateway.start.remote())
        ray.get(authority.attach_gateway.remote(GATEWAY, self._gateway))
        return port

    def _model_name(self) -> str:
        from copyhold.models.manifest import read_manifest

        if self._config.served_model_name:
            return self._config.served_model_name
        source = read_manifest(self._checkpoint.path).source_name.removesuffix(".gguf")
        return re.sub(r"[.-](?:Q\d\w*|[BF]F?16|F32)$", "", source, flags=re.IGNORECASE)

    def _world(self) -> bytes:
        from copyhold.actors.world import world_of

        return world_of(self._checkpoint, self._config.block_size)


if __name__ == "__main__":
    sys.exit(main())
