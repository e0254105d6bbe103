"""Owns one tensor-parallel rank of a Llama: the forward pass over a paged pool, and the choice of tokens.

Invariant: all ranks make the same collective calls in the same order for equal batches: one all-reduce for
the embedding, two per layer, one gather for the greedy rows, one for the drawn rows. A batch is checked before
the first K/V row is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from copyhold.kernels import cpu
from copyhold.kernels.batch import StepBatch
from copyhold.kernels.cache_pools import CachePools, as_pools
from copyhold.kernels.errors import KernelContractMismatch
from copyhold.kernels.interface import KernelBackend
from copyhold.kernels.pool import KVPool, split_table

from .collective import Collective
from .config import ModelConfig
from .deterministic import in_rank_order
from .errors import NonFiniteLogits, PositionOutOfRange, TokenOutOfVocabulary
from .layout import Dtype
from .partition import RankPartition
from .partition import partition as partitions_of
from .rope import rope_tables
from .sampling import RowDraw, sample_token
from .scratch import Scratch, kernel_view
from .weights import load_weights


class Attention(Protocol):
    """Attention of one layer over a step's rows: q `[T, heads, head_dim]` float32 into `out` of the same shape."""

    def __call__(
        self, q: np.ndarray, k_layer: np.ndarray, v_layer: np.ndarray, scale: np.float32, out: np.ndarray
    ) -> None: ...


class LlamaShard:
    """Rank `partition.rank` of the model; owns its weights and scratch, borrows pools and collective.

    `deterministic`: a row's bits depend on its own tokens only, not on its step (models/deterministic.py). A kernel whose
    sums depend on who else is in the step must not be chosen then.

    Raises: `ModelFileMissing`, `ModelFileInvalid`, `KernelContractMismatch` for a pool of another geometry,
    `DeterminismUnavailable`.
    """

    def __init__(
        self,
        config: ModelConfig,
        partition: RankPartition,
        shard_path: Path,
        pool: KVPool | CachePools,
        collective: Collective,
        max_batch_tokens: int = 512,
        dtype: Dtype = "float32",
        deterministic: bool = False,
        kernels: KernelBackend = cpu,
    ) -> None:
        pools = as_pools(pool)
        expected = (config.num_layers, len(partition.kv_heads), config.head_dim)
        found = (pools.num_layers, pools.first.kv_heads, pools.first.head_dim)
        if expected != found:
            raise KernelContractMismatch(
                f"pool (layers, KV heads, head dim) is {found}, model needs {expected}"
            )
        self.config = config
        self.partition = partition
        self.pools = pools
        """One a cache group; each layer attends through the table of its own group"""
        self.kernels = kernels
        self.deterministic = deterministic
        self.collective = in_rank_order(collective) if deterministic else collective
        self._vocab_sizes = [len(part.vocab) for part in partitions_of(config, partition.tp_size)]
        self._weights = load_weights(shard_path, config, partition, dtype, deterministic)
        cos, sin = rope_tables(config)
        self._cos, self._sin = cos.numpy(), sin.numpy()
        self._eps = np.float32(config.rms_eps)
        self._scale = np.float32(1 / math.sqrt(config.head_dim))
        self._dtype: Dtype = dtype
        self._scratch = self.new_scratch(max_batch_tokens)

    @property
    def pool(self) -> KVPool:
        """The pool of cache group 0."""
        return self.pools.first

    def new_scratch(self, rows: int) -> Scratch:
        """Activation buffers for batches of up to `rows` rows of this shard."""
        return Scratch(self.config, self.partition, rows, self._dtype)

    def forward(self, batch: StepBatch, attentions: Sequence[Attention | None] = ()) -> torch.Tensor:
        """Write the batch's K/V rows and return logits `[L, local_vocab]` float32 of its `logit_rows`.

        `attentions`: by cache group, what stands in for the plain kernel, for this batch only.

        Raises: `KernelInputRefused`, `TokenOutOfVocabulary`, `PositionOutOfRange` (no row was written);
        `CollectiveError` (the batch's own rows hold unspecified values).
        """
        if batch.num_tokens > self._scratch.capacity:
            self._scratch = self.new_scratch(batch.num_tokens)
        hidden = self.hidden_states(batch, self.pools, self._scratch, attentions)
        rows = hidden.index_select(
            0, torch.from_numpy(np.ascontiguousarray(batch.logit_rows, dtype=np.int64))
        )
        return self._weights.head(rows).float()

    def hidden_states(
        self,
        batch: StepBatch,
        pools: CachePools,
        scratch: Scratch,
        attentions: Sequence[Attention | None] = (),
    ) -> torch.Tensor:
        """All layers and the final norm against `pools`; the result is a `[T, hidden]` view of `scratch`."""
        batch.check(pools.first.num_blocks, pools.first.block_size)
        if len(pools) > 1 or batch.others:
            batch.check_others([(pool.num_blocks, pool.block_size) for pool in pools.pools[1:]])
        self._check_ids(batch)
        views = scratch.views(batch.num_tokens)
        starts = np.array(batch.seq_starts, dtype=np.int32)
        lens = np.array(batch.context_lens, dtype=np.int32)
        positions = np.array(batch.positions, dtype=np.int64)
        places = [_places(batch.slots, batch.block_tables, pools.first)]
        for rows, pool in zip(batch.others, pools.pools[1:], strict=True):
            places.append(_places(rows.slots, rows.block_tables, pool))
        views.x.fill(0)
        kernels = self.kernels
        delta = self._embed(batch)
        for w, (k, v, group) in zip(self._weights.layers, pools.planes, strict=True):
            slots, tables = places[group]
            attention = attentions[group] if attentions else None
            kernels.add_rms_norm(views.x, kernel_view(delta), w.attn_norm, self._eps, views.normed_np)
            qkv = kernel_view(w.qkv(views.normed))
            kernels.rotate_and_write(qkv, self._cos, self._sin, positions, slots, k, v, views.q)
            if attention is None:
                kernels.paged_attention(views.q, k, v, tables, starts, lens, self._scale, views.attended_np)
            else:
                attention(views.q, k, v, self._scale, views.attended_np)
            delta = self._summed(w.o(views.attended))
            kernels.add_rms_norm(views.x, kernel_view(delta), w.ffn_norm, self._eps, views.normed_np)
            kernels.silu_mul(kernel_view(w.gate_up(views.normed)), views.activated_np)
            delta = self._summed(w.down(views.activated))
        kernels.add_rms_norm(views.x, kernel_view(delta), self._weights.norm, self._eps, views.normed_np)
        return views.normed

    def greedy(self, logits: torch.Tensor) -> np.ndarray:
        """Ids `[L]` int64 of the largest logit over the whole vocabulary; the lowest id wins a tie.

        Raises: `NonFiniteLogits`, `CollectiveError`.
        """
        if logits.shape[0] == 0:
            return np.empty(0, dtype=np.int64)
        rows = logits.numpy()
        index = rows.argmax(axis=1)  # a NaN counts as largest, and is found below
        pair = np.stack([rows[np.arange(len(rows)), index], index + self.partition.vocab.start]).astype(
            np.float64
        )
        pairs = torch.stack(self.collective.all_gather(torch.from_numpy(pair))).numpy()
        if np.isnan(pairs[:, 0]).any():
            raise NonFiniteLogits("a row's best logit is not a number")
        winner = pairs[:, 0].argmax(axis=0)
        return pairs[winner, 1, np.arange(pairs.shape[2])].astype(np.int64)

    def choose(self, logits: torch.Tensor, draws: Sequence[RowDraw] = ()) -> np.ndarray:
        """Ids `[L]` int64: the rows that `draws` name are drawn, the others are greedy.

        Every rank computes the same ids, since all of them hold the same bits of a drawn row after the gather.

        Raises: `NonFiniteLogits`, `CollectiveError`.
        """
        if not draws:
            return self.greedy(logits)
        drawn = np.array([draw.row for draw in draws], dtype=np.int64)
        rest = np.setdiff1d(np.arange(logits.shape[0]), drawn)
        chosen = np.empty(logits.shape[0], dtype=np.int64)
        chosen[rest] = self.greedy(logits[torch.from_numpy(rest)])
        rows = self.full_rows(logits[torch.from_numpy(drawn)])
        for draw, row in zip(draws, rows, strict=True):
            chosen[draw.row] = sample_token(row, draw.params, draw.position)
        return chosen

    def full_rows(self, logits: torch.Tensor) -> np.ndarray:
        """Logits `[R, vocab]` float32 of every rank's `[R, local_vocab]`, gathered at the widest shard's width.

        Raises: `CollectiveError`.
        """
        padded = logits.new_zeros((logits.shape[0], max(self._vocab_sizes)))
        padded[:, : logits.shape[1]] = logits
        parts = self.collective.all_gather(padded)
        trimmed = [part[:, :size] for part, size in zip(parts, self._vocab_sizes, strict=True)]
        return torch.cat(trimmed, dim=1).numpy()

    def _check_ids(self, batch: StepBatch) -> None:
        tokens, positions = batch.tokens, batch.positions
        bad = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
        if bad.size:
            raise TokenOutOfVocabulary(int(bad[0]), self.config.vocab_size)
        if positions.size and positions.max() >= self.config.max_positions:
            raise PositionOutOfRange(int(positions.max()), self.config.max_positions)

    def _summed(self, part: torch.Tensor) -> torch.Tensor:
        """A layer's output over all ranks; ranks add in float32, so that only their own products are rounded."""
        if self.partition.tp_size == 1:
            return part
        whole = part.float()
        self.collective.all_reduce(whole)
        return whole

    def _embed(self, batch: StepBatch) -> torch.Tensor:
        """Embedding rows `[T, hidden]` float32 of the batch's tokens, from whichever ranks hold them."""
        vocab = self.partition.vocab
        mine = (batch.tokens >= vocab.start) & (batch.tokens < vocab.stop)
        local = np.where(mine, batch.tokens - vocab.start, 0).astype(np.int64)
        rows = self._weights.embedding.index_select(0, torch.from_numpy(local)).float()
        if not mine.all():
            rows[torch.from_numpy(~mine)] = 0
        self.collective.all_reduce(rows)
        return rows


def _places(slots: np.ndarray, block_tables: np.ndarray, pool: KVPool) -> tuple[np.ndarray, np.ndarray]:
    """Slots `[T]` and tile tables `[S, max_tiles]` of one cache group, as kernels take them."""
    tables = split_table(block_tables, pool.tiles_per_block)
    return np.array(slots, dtype=np.int64), np.array(tables, dtype=np.int32)
