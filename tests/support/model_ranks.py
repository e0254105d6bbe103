"""All tensor-parallel ranks of a converted checkpoint in one process: one thread a rank, gloo between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from copyhold.kernels import cpu
from copyhold.kernels.choices import KVDtype
from copyhold.kernels.interface import KernelBackend
from copyhold.kernels.pool import KVPool
from copyhold.models.collective import Collective, GlooCollective, RendezvousStore, SingleProcess
from copyhold.models.llama import LlamaShard
from copyhold.models.manifest import ConvertedCheckpoint

Result = TypeVar("Result")


class ModelRanks:
    """One `LlamaShard` a rank, each with a pool of its own; `each` runs something on all of them in lock step."""

    def __init__(
        self,
        checkpoint: ConvertedCheckpoint,
        num_blocks: int,
        block_size: int = 16,
        kv_dtype: KVDtype = "float32",
        kernels: KernelBackend = cpu,
    ) -> None:
        self._checkpoint = checkpoint
        self._num_blocks, self._block_size = num_blocks, block_size
        self._kv_dtype: KVDtype = kv_dtype
        self._kernels = kernels
        self._threads = ThreadPoolExecutor(checkpoint.tp_size)
        self._store = RendezvousStore.open(20.0) if checkpoint.tp_size > 1 else None
        self.shards: list[LlamaShard] = list(self._threads.map(self._load, range(checkpoint.tp_size)))

    def _load(self, rank: int) -> LlamaShard:
        config, part = self._checkpoint.config, self._checkpoint.partitions[rank]
        collective: Collective = SingleProcess()
        if self._store is not None:
            mine = self._store if rank == 0 else RendezvousStore.connect(self._store.port, 20.0)
            collective = GlooCollective(mine, rank, self._checkpoint.tp_size, 1, 20.0)
        heads = len(part.kv_heads)
        pool = KVPool(
            config.num_layers, self._num_blocks, heads, config.head_dim, self._block_size, self._kv_dtype
        )
        path, dtype = self._checkpoint.shard_path(rank), self._checkpoint.dtype
        return LlamaShard(config, part, path, pool, collective, 64, dtype, False, self._kernels)

    def each(self, work: Callable[[LlamaShard], Result]) -> list[Result]:
        return list(self._threads.map(work, self.shards))
