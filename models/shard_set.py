"""Owns all tensor-parallel ranks of a converted checkpoint in one process: one thread a rank, sums in rank order.

For runs without workers: verification, simulation, tests. Weights are loaded once; pools are replaced as often as a run
wants a fresh memory of another geometry. The logits of each rank's last forward pass are kept, so that a caller who drives
the ranks through step plans can still look at them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from copyhold.kernels.batch import StepBatch
from copyhold.kernels.cache_pools import CachePools
from copyhold.kernels.choices import KVDtype
from copyhold.kernels.errors import KernelContractMismatch
from copyhold.kernels.pool import KVPool

from .collective import Collective, SingleProcess
from .layer_groups import LayerGroup, one_group
from .llama import Attention, LlamaShard
from .manifest import ConvertedCheckpoint
from .thread_collective import ThreadMeeting

_Result = TypeVar("_Result")
_MEETING_S = 300.0
"""A rank in this process cannot be lost; it may be slow."""


class ObservedShard(LlamaShard):
    """A shard that keeps the logits `[L, local_vocab]` of its last forward pass."""

    last_logits: torch.Tensor

    def forward(self, batch: StepBatch, attentions: Sequence[Attention | None] = ()) -> torch.Tensor:
        """As `LlamaShard.forward`."""
        self.last_logits = super().forward(batch, attentions)
        return self.last_logits


class ShardSet:
    """Every rank of one checkpoint; `each` runs something on all of them in lock step.

    Raises: what `LlamaShard` raises.
    """

    def __init__(
        self,
        checkpoint: ConvertedCheckpoint,
        deterministic: bool = False,
        max_batch_tokens: int = 512,
        kv_dtype: KVDtype = "float32",
    ) -> None:
        self.checkpoint = checkpoint
        self.deterministic = deterministic
        self.kv_dtype: KVDtype = kv_dtype
        self._max_batch_tokens = max_batch_tokens
        self._meeting = ThreadMeeting(checkpoint.tp_size, _MEETING_S)
        self._threads = ThreadPoolExecutor(checkpoint.tp_size, thread_name_prefix="copyhold-shard")
        self.shards: list[ObservedShard] = [self._load(rank) for rank in range(checkpoint.tp_size)]

    @property
    def tp_size(self) -> int:
        return self.checkpoint.tp_size

    def new_pools(self, num_blocks: int, block_size: int) -> list[CachePools]:
        """Give every rank a fresh pool for all layers; the old ones are dropped with their K/V."""
        return self.new_group_pools(one_group(self.checkpoint.config.num_layers, block_size), [num_blocks])

    def new_group_pools(self, groups: Sequence[LayerGroup], num_blocks: Sequence[int]) -> list[CachePools]:
        """Give every rank fresh pools, one a group. Raises: `KernelContractMismatch` for groups that are no division
        of the model's layers; nothing was replaced then."""
        made = [self._pools(len(shard.partition.kv_heads), groups, num_blocks) for shard in self.shards]
        for shard, pools in zip(self.shards, made, strict=True):
            shard.pools = pools
        return made

    def each(self, work: Callable[[ObservedShard], _Result]) -> list[_Result]:
        """`work` on every rank at once, results in rank order; the first failure is raised."""

        def without_gradients(shard: ObservedShard) -> _Result:
            with torch.no_grad():
                return work(shard)

        return list(self._threads.map(without_gradients, self.shards))

    def last_logits(self) -> npt.NDArray[np.float32]:
        """`[L, vocab]` of the ranks' last forward pass, joined."""
        parts = [shard.last_logits[:, : len(shard.partition.vocab)] for shard in self.shards]
        return torch.cat(parts, dim=1).numpy()

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    def _load(self, rank: int) -> ObservedShard:
        checkpoint = self.checkpoint
        part = checkpoint.partitions[rank]
        alone = checkpoint.tp_size == 1
        collective: Collective = SingleProcess() if alone else self._meeting.collective(rank)
        return ObservedShard(
            checkpoint.config,
            part,
            checkpoint.shard_path(rank),
            self._pools(len(part.kv_heads), one_group(checkpoint.config.num_layers, 16), [1]),
            collective,
            self._max_batch_tokens,
            checkpoint.dtype,
            self.deterministic,
        )

    def _pools(self, kv_heads: int, groups: Sequence[LayerGroup], num_blocks: Sequence[int]) -> CachePools:
        config = self.checkpoint.config
        covered = sum(len(group.layers) for group in groups)
        if covered != config.num_layers:
            raise KernelContractMismatch(f"groups of {covered} layers for a model of {config.num_layers}")
        pools = [
            KVPool(len(group.layers), count, kv_heads, config.head_dim, group.block_size, self.kv_dtype)
            for group, count in zip(groups, num_blocks, strict=True)
        ]
        return CachePools(pools, [group.layers for group in groups])
