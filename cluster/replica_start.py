"""Starting and ending one replica incarnation: its placement group, its ranks, the replica actor.

Owns the order: ranks map their pools and join their process group, all run a warm-up step, the replica listens, ranks
connect, the incarnation registers and takes its first lease. An incarnation that could not be started leaves no actor.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from copyhold.actors.names import replica_name, worker_name
from copyhold.actors.replica import Replica, ReplicaSpec
from copyhold.actors.worker import TPWorker, WorkerSpec
from copyhold.actors.world import world_of
from copyhold.kernels.choices import BackendChoice, KVChoice, SharedPrefix
from copyhold.kernels.dispatch import KernelChoice
from copyhold.kernels.errors import KernelContractMismatch
from copyhold.kvcore.contract_errors import ContractRefusal
from copyhold.models.layout import CollectiveChoice
from copyhold.models.manifest import ConvertedCheckpoint
from copyhold.namespace.authority import ClusterIdentity

from .cache_config import cache_settings
from .config import Config
from .errors import RankRefused
from .launch import LaunchSpec
from .processes import ProcessIdentity, end_processes, identity
from .ray_session import RaySession

_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0


@dataclass
class RunningReplica:
    """One incarnation's actors and processes."""

    number: int
    incarnation: str
    group: Any
    workers: list[Any] = field(default_factory=list)
    replica: Any = None
    kernels: KernelChoice | None = None
    processes: list[ProcessIdentity] = field(default_factory=list)


class ReplicaStarter:
    """Starts incarnations of one server's replicas."""

    def __init__(
        self, session: RaySession, spec: LaunchSpec, checkpoint: ConvertedCheckpoint, model_name: str
    ) -> None:
        self._session = session
        self._ray = session.ray
        self._spec = spec
        self._config: Config = spec.config
        self._checkpoint = checkpoint
        self._model_name = model_name
        self._max_model_len = min(self._config.max_model_len, checkpoint.config.max_positions)

    def start(
        self, number: int, cluster: ClusterIdentity, authority: Any, coordinator: Any
    ) -> RunningReplica:
        """Start a new incarnation of replica ``number``; it serves when this returns."""
        incarnation = f"{replica_name(number)}-{secrets.token_hex(4)}"
        tp = self._config.tp
        group = self._session.reserve(tp + 1)
        running = RunningReplica(number, incarnation, group)
        try:
            self._get(group.ready())
            keys = self._start_ranks(running)
            self._start_replica(running, cluster)
            starting = running.replica.start.remote(authority, coordinator, keys)
            self._get([worker.serve.remote() for worker in running.workers])
            self._get(starting)
        except BaseException:
            self.end(running)
            raise
        return running

    def end(self, running: RunningReplica) -> str:
        """Kill an incarnation's actors and wait for their processes; returns the proof that they are gone."""
        for actor in [running.replica, *running.workers]:
            if actor is not None:
                self._ray.kill(actor)
        left = end_processes(lambda: {p for p in running.processes if p.alive}, 2.0, _END_TIMEOUT_S)
        remove_placement_group(running.group)
        Path(self._channel_path(running.incarnation)).unlink(missing_ok=True)
        if left:
            raise TimeoutError(f"processes {sorted(p.pid for p in left)} of {running.incarnation} do not end")
        return f"processes {sorted(p.pid for p in running.processes)} of {running.incarnation} are gone"

    def _start_ranks(self, running: RunningReplica) -> tuple[str, ...]:
        config = self._config
        for rank in range(config.tp):
            spec = WorkerSpec(
                rank=rank,
                ranks=config.tp,
                incarnation=running.incarnation,
                model_path=str(self._checkpoint.path),
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                threads=config.threads_per_rank,
                max_step_tokens=config.step_budget_tokens,
                collective_timeout_s=config.collective_timeout_s,
                channel_path=self._channel_path(running.incarnation),
                world=world_of(self._checkpoint, config.block_size, config.kv_storage),
                collective=msgspec.convert(config.collective, CollectiveChoice),
                deterministic=config.deterministic,
                shared_prefix=msgspec.convert(config.shared_prefix, SharedPrefix),
                kernel_backend=msgspec.convert(config.kernel_backend, BackendChoice),
                kv_dtype=msgspec.convert(config.kv_dtype, KVChoice),
            )
            options = self._options(running, rank + 1) | {"max_concurrency": 2}
            name = worker_name(running.incarnation, rank)
            running.workers.append(self._ray.remote(TPWorker).options(name=name, **options).remote(spec))
        self._note_processes(running, self._get([worker.pid.remote() for worker in running.workers]))
        keys = self._get([worker.load.remote() for worker in running.workers])
        for rank, refusal in enumerate(keys):
            if isinstance(refusal, ContractRefusal):
                raise RankRefused(f"rank {rank} of {running.incarnation}: {refusal}")
        running.kernels = self._kernels(running)
        port = self._get(running.workers[0].open_store.remote())
        self._get([worker.join.remote(port) for worker in running.workers])
        self._get([worker.warm_up.remote() for worker in running.workers])
        return tuple(keys)

    def _kernels(self, running: RunningReplica) -> KernelChoice:
        """What the ranks chose, which must be one backend and one K/V type. Raises: KernelContractMismatch."""
        first, *others = self._get([worker.kernels.remote() for worker in running.workers])
        for rank, other in enumerate(others, start=1):
            if (other.backend, other.kv_dtype) != (first.backend, first.kv_dtype):
                raise KernelContractMismatch(
                    f"rank {rank} has {other.backend} kernels over {other.kv_dtype}, rank 0 {first.backend} "
                    f"over {first.kv_dtype}"
                )
        return first

    def _start_replica(self, running: RunningReplica, cluster: ClusterIdentity) -> None:
        config, kernels = self._config, running.kernels
        assert kernels is not None, "ranks start before their replica"
        spec = ReplicaSpec(
            name=replica_name(running.number),
            incarnation=running.incarnation,
            ranks=config.tp,
            world=world_of(self._checkpoint, config.block_size, config.kv_storage),
            model=self._model_name,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            max_requests=config.max_requests,
            max_model_len=self._max_model_len,
            vocab_size=self._checkpoint.config.vocab_size,
            step_tokens=config.step_budget_tokens,
            prefill_chunk_tokens=config.prefill_chunk_tokens,
            channel_path=self._channel_path(running.incarnation),
            step_timeout_s=config.collective_timeout_s,
            cluster=cluster,
            sessions_store=self._spec.sessions_store,
            receipt_ttl_s=config.receipt_ttl_s,
            request_lifetime_s=config.request_lifetime_s,
            cache=cache_settings(config),
            deterministic=config.deterministic,
            kernels=kernels,
            recording=config.recording,
            pool=self._spec.pool,
        )
        options = self._options(running, 0) | {"max_concurrency": 1000}
        running.replica = self._ray.remote(Replica).options(name=running.incarnation, **options).remote(spec)
        self._note_processes(running, [self._get(running.replica.listening.remote())])

    def _options(self, running: RunningReplica, bundle: int) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(running.group, bundle)
        return {"num_cpus": 1, "scheduling_strategy": strategy}

    def _note_processes(self, running: RunningReplica, pids: list[int]) -> None:
        running.processes += [found for found in map(identity, pids) if found is not None]

    def _get(self, calls: Any) -> Any:
        return self._ray.get(calls, timeout=_START_TIMEOUT_S)

    def _channel_path(self, incarnation: str) -> str:
        return str(Path(self._spec.run_dir) / f"{incarnation}.sock")
