"""The tensor-parallel worker actor: one rank in a process of its own, driven over a step channel.

Owns the process's model shard, pool and collective; the Ray methods are start-up and status only, no token passes
through them. Invariant: after the first failed step the channel is closed with the reason and nothing is computed.
"""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from copyhold.kernels.choices import BackendChoice, KVChoice, SharedPrefix
from copyhold.kernels.dispatch import KernelChoice
from copyhold.kvcore.contract_errors import ContractRefusal
from copyhold.models.layout import CollectiveChoice

from .agreement import ledger_findings
from .errors import TransportClosed
from .plan import StepEvidence, decode_plan, encode_evidence
from .transport import connect, receive_message, send_message

if TYPE_CHECKING:
    from copyhold.models.collective import Collective, RendezvousStore


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a rank needs to start; paths are on its own host. No secret is in it."""

    rank: int
    ranks: int
    incarnation: str
    model_path: str
    block_size: int
    num_blocks: int
    threads: int
    max_step_tokens: int
    collective_timeout_s: float
    channel_path: str
    world: bytes
    collective: CollectiveChoice = "auto"
    deterministic: bool = False
    shared_prefix: SharedPrefix = "auto"
    kernel_backend: BackendChoice = "auto"
    kv_dtype: KVChoice = "auto"


class WorkerStatus(msgspec.Struct, frozen=True):
    """Where a rank stands. ``kernel_compilations``: kernels this process had to compile (0 with a warm cache).

    ``collective``: what ranks add through: none, shm or gloo. ``layout``: the RankLayoutDigest of its pool.
    ``shared_reads``: a ``SharedReadsReport`` as builtins.
    ``kernels``: which backend serves, what K/V looks like, and what became of the other backends.
    """

    rank: int
    pid: int
    steps: int
    log_index: int
    pool_bytes: int
    kernel_compilations: int
    failure: str
    collective: str = ""
    deterministic: bool = False
    layout: str = ""
    shared_reads: dict[str, Any] = {}
    kernels: KernelChoice | None = None


class TPWorker:
    """Created as a Ray actor; imports torch only in its own process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._signer_seed = secrets.token_bytes(32)
        self._thread: threading.Thread | None = None
        self._store: RendezvousStore | None = None
        self._steps = 0
        self._failure = ""
        self._layout = ""
        self._kernel_compilations = 0

    def pid(self) -> int:
        """The actor's process id."""
        return os.getpid()

    def load(self) -> str | ContractRefusal:
        """Map the pool and check its layout; the rank's public key in hexadecimal.

        A layout that is not that of the replica's world is returned as the refusal: the rank is of no use then.
        """
        import torch

        from copyhold.kernels.dispatch import choose_kernels
        from copyhold.kernels.pool import KVPool
        from copyhold.models.manifest import load_checkpoint
        from copyhold.namespace.certificate import RankSigner

        from .rank_layout import attach
        from .world import world_manifest

        torch.set_num_threads(self._spec.threads)
        torch.set_grad_enabled(False)
        checkpoint = load_checkpoint(Path(self._spec.model_path))
        self._checkpoint = checkpoint
        self._partition = checkpoint.partitions[self._spec.rank]
        kv_heads, head_dim = len(self._partition.kv_heads), checkpoint.config.head_dim
        self._choice = choose_kernels(
            self._spec.kernel_backend, self._spec.kv_dtype, kv_heads, head_dim, self._spec.block_size
        )
        self._pool = KVPool(
            checkpoint.config.num_layers,
            self._spec.num_blocks,
            kv_heads,
            head_dim,
            self._spec.block_size,
            self._choice.kv_dtype,
        )
        try:
            self._layout = attach(
                world_manifest(checkpoint, self._spec.block_size, self._choice.kv_dtype),
                self._spec.world,
                self._spec.rank,
                self._spec.num_blocks,
                self._pool,
            )
        except ContractRefusal as refusal:
            return refusal
        self._signer = RankSigner(self._signer_seed)
        return self._signer.public_key.hex()

    def kernels(self) -> KernelChoice:
        """Which backend this rank chose, after ``load``."""
        return self._choice

    def open_store(self) -> int:
        """Rank 0: open the rendezvous store of this incarnation's process group; returns its port."""
        from copyhold.models.collective import RendezvousStore

        self._store = RendezvousStore.open(self._spec.collective_timeout_s)
        return self._store.port

    def join(self, port: int) -> None:
        """Join the process group and load this rank's shard."""
        from copyhold.kernels.dispatch import backend_named
        from copyhold.models.llama import LlamaShard

        from .rank import Rank

        self._shard = LlamaShard(
            self._checkpoint.config,
            self._partition,
            self._checkpoint.shard_path(self._spec.rank),
            self._pool,
            self._collective(port),
            self._spec.max_step_tokens,
            self._checkpoint.dtype,
            self._spec.deterministic,
            backend_named(self._choice.backend),
        )
        self._rank = Rank(
            self._spec.rank,
            self._spec.incarnation,
            self._shard,
            self._signer,
            self._spec.shared_prefix,
        )

    def warm_up(self) -> int:
        """One step on a block that is zeroed again; returns how many loops had to be compiled."""
        from copyhold.kernels import cpu, exchange
        from copyhold.kernels.dispatch import backend_named
        from copyhold.kvcore import warm_up as ledger

        from .rank import warm_up_step

        cpu.warm_up(self._choice.kv_dtype)  # the pool's own loops are the cpu's, whoever attends
        backend_named(self._choice.backend).warm_up(self._choice.kv_dtype)
        exchange.warm_up()
        ledger.warm_up()
        warm_up_step(self._shard)
        counts = [loops.compile_counts().values() for loops in (cpu, exchange, ledger)]
        self._kernel_compilations = sum(misses for loops in counts for _, misses in loops)
        return self._kernel_compilations

    def serve(self) -> None:
        """Connect to the replica and start taking plans."""
        sock = connect(Path(self._spec.channel_path), self._spec.rank, self._spec.collective_timeout_s)

        def loop() -> None:
            with sock:
                try:
                    while True:
                        plan = decode_plan(receive_message(sock))
                        send_message(sock, encode_evidence(self._rank.execute(plan)))
                        self._steps += 1
                except TransportClosed as error:
                    self._failure = str(error)
                except Exception as error:  # noqa: BLE001 - the thread's last frame: the replica is told and stops
                    self._failure = f"{type(error).__name__}: {error}"
                    send_message(sock, encode_evidence(self._failed_evidence()))

        self._thread = threading.Thread(target=loop, name="copyhold-rank", daemon=True)
        self._thread.start()

    def audit_ledger(self) -> list[str]:
        """Everything in which this rank's ledger contradicts itself, recomputed from scratch; empty is right."""
        return ledger_findings(self._rank.ledger)

    def status(self) -> WorkerStatus:
        """Position and health of the rank."""
        return WorkerStatus(
            rank=self._spec.rank,
            pid=os.getpid(),
            steps=self._steps,
            log_index=self._rank.ledger.log_index,
            pool_bytes=self._pool.total_bytes,
            kernel_compilations=self._kernel_compilations,
            failure=self._failure,
            collective=self._shard.collective.kind,
            layout=self._layout,
            deterministic=self._shard.deterministic,
            shared_reads=msgspec.to_builtins(self._rank.shared_reads.report()),
            kernels=self._choice,
        )

    def _collective(self, port: int) -> Collective:
        from copyhold.models.collective import RendezvousStore, SingleProcess
        from copyhold.models.shm_collective import join_ranks

        spec = self._spec
        if spec.ranks == 1:
            return SingleProcess()
        if self._store is None:
            self._store = RendezvousStore.connect(port, spec.collective_timeout_s)
        return join_ranks(spec.collective, self._store, spec.rank, spec.ranks, 1, spec.collective_timeout_s)

    def _failed_evidence(self) -> StepEvidence:
        ledger = self._rank.ledger
        return StepEvidence(
            self._spec.incarnation,
            0,
            self._spec.rank,
            ledger.log_index,
            ledger.machine_digest,
            failure=self._failure,
        )
