"""Owns one tensor-parallel rank of a Llama: the forward pass over a paged pool, and the choice of tokens.

Invariant: all ranks make the same collective calls in the same order for equal batches: one all-reduce for
the embedding, two per layer, one gather for the greedy rows, one for the drawn rows. A batch is checked before
the first K/V row is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from copyhold.kernels import cpu
from copyhold.kernels.batch import StepBatch
from copyhold.kernels.errors import KernelContractMismatch
from copyhold.kernels.pool import KVPool, split_table

from .collective import Collective
from .config import ModelConfig
from .errors import NonFiniteLogits, PositionOutOfRange, TokenOutOfVocabulary
from .partition import RankPartition
from .partition import partition as partitions_of
from .rope import rope_tables
from .sampling import RowDraw, sample_token
from .scratch import Scratch
from .weights import load_weights


class LlamaShard:
    """Rank `partition.rank` of the model; owns its weights and scratch, borrows pool and collective.

    Raises: `ModelFileMissing`, `ModelFileInvalid`, `KernelContractMismatch` for a pool of another geometry.
    """

    def __init__(
        self,
        config: ModelConfig,
        partition: RankPartition,
        shard_path: Path,
        pool: KVPool,
        collective: Collective,
        max_batch_tokens: int = 512,
    ) -> None:
        expected = (config.num_layers, len(partition.kv_heads), config.head_dim)
        found = (pool.num_layers, pool.kv_heads, pool.head_dim)
        if expected != found:
            raise KernelContractMismatch(
                f"pool (layers, KV heads, head dim) is {found}, model needs {expected}"
            )
        self.config = config
        self.partition = partition
        self.pool = pool
        self.collective = collective
        self._vocab_sizes = [len(part.vocab) for part in partitions_of(config, partition.tp_size)]
        self._weights = load_weights(shard_path, config, partition)
        cos, sin = rope_tables(config)
        self._cos, self._sin = cos.numpy(), sin.numpy()
        self._eps = np.float32(config.rms_eps)
        self._scale = np.float32(1 / math.sqrt(config.head_dim))
        self._scratch = Scratch(config, partition, max_batch_tokens)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the batch's K/V rows and return logits `[L, local_vocab]` float32 of its `logit_rows`.

        Raises: `KernelInputRefused`, `TokenOutOfVocabulary`, `PositionOutOfRange` (no row was written);
        `CollectiveError` (the batch's own rows hold unspecified values).
        """
        if batch.num_tokens > self._scratch.capacity:
            self._scratch = Scratch(self.config, self.partition, batch.num_tokens)
        hidden = self.hidden_states(batch, self.pool, self._scratch)
        rows = hidden.index_select(
            0, torch.from_numpy(np.ascontiguousarray(batch.logit_rows, dtype=np.int64))
        )
        return torch.mm(rows, self._weights.head)

    def hidden_states(self, batch: StepBatch, pool: KVPool, scratch: Scratch) -> torch.Tensor:
        """All layers and the final norm against `pool`; the result is a `[T, hidden]` view of `scratch`."""
        batch.check(pool.num_blocks, pool.block_size)
        self._check_ids(batch)
        views = scratch.views(batch.num_tokens)
        tables = np.array(split_table(batch.block_tables, pool.tiles_per_block), dtype=np.int32)
        starts = np.array(batch.seq_starts, dtype=np.int32)
        lens = np.array(batch.context_lens, dtype=np.int32)
        positions = np.array(batch.positions, dtype=np.int64)
        slots = np.array(batch.slots, dtype=np.int64)
        self._embed(batch, views.delta)
        views.x.zero_()
        for layer, w in enumerate(self._weights.layers):
            k, v = pool.k[layer], pool.v[layer]
            cpu.add_rms_norm(views.x_np, views.delta_np, w.attn_norm, self._eps, views.normed_np)
            torch.mm(views.normed, w.qkv, out=views.qkv)
            cpu.rotate_and_write(views.qkv_np, self._cos, self._sin, positions, slots, k, v, views.q_np)
            cpu.paged_attention(views.q_np, k, v, tables, starts, lens, self._scale, views.attended_np)
            torch.mm(views.attended, w.o, out=views.delta)
            self.collective.all_reduce(views.delta)
            cpu.add_rms_norm(views.x_np, views.delta_np, w.ffn_norm, self._eps, views.normed_np)
            torch.mm(views.normed, w.gate_up, out=views.gate_up)
            cpu.silu_mul(views.gate_up_np, views.activated_np)
            torch.mm(views.activated, w.down, out=views.delta)
            self.collective.all_reduce(views.delta)
        cpu.add_rms_norm(views.x_np, views.delta_np, self._weights.norm, self._eps, views.normed_np)
        return views.normed

    def greedy(self, logits: torch.Tensor) -> np.ndarray:
        """Ids `[L]` int64 of the largest logit over the whole vocabulary; the lowest id wins a tie.

        Raises: `NonFiniteLogits`, `CollectiveError`.
        """
        if logits.shape[0] == 0:
            return np.empty(0, dtype=np.int64)
        best, index = logits.max(dim=1)
        pair = torch.stack([best.double(), (index + self.partition.vocab.start).double()])
        pairs = torch.stack(self.collective.all_gather(pair)).numpy()
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

    def _embed(self, batch: StepBatch, out: torch.Tensor) -> None:
        vocab = self.partition.vocab
        mine = (batch.tokens >= vocab.start) & (batch.tokens < vocab.stop)
        local = np.where(mine, batch.tokens - vocab.start, 0).astype(np.int64)
        out.copy_(self._weights.embedding(torch.from_numpy(local)))
        if not mine.all():
            out[torch.from_numpy(~mine)] = 0
        self.collective.all_reduce(out)
