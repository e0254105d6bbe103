"""Shared-prefix attention of one step on the chosen backend: shared rows once for all that read them, own rows each, merged.

Owns the buffers of partial states and the order of calls. Invariant: a token row's output is its own part merged with the
states of its shared chunks, root first, each weighed by its mass (K149); states are float32 whatever the storage (K157).
The result equals the plain kernel's within rounding, not bit for bit (K152), so deterministic mode does not come here.
Source: Hydragen, ChunkAttention; contracts K148 to K157.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from .interface import Activations, Floats, Int32s, KernelBackend, KVRows
from .shared_schedule import Phase, Schedule


class StateBuffers:
    """Room for partial states and own states, kept between steps; grows on demand."""

    def __init__(self, heads: int, head_dim: int) -> None:
        self._heads, self._head_dim = heads, head_dim
        self._rows: dict[str, tuple[Floats, Floats]] = {}

    def room(self, name: str, rows: int) -> tuple[Floats, Floats]:
        """(`[rows, heads, head_dim]`, `[rows, heads]`) float32 under a name, holding anything."""
        found = self._rows.get(name)
        if found is None or len(found[0]) < rows:
            found = (
                np.empty((rows, self._heads, self._head_dim), np.float32),
                np.empty((rows, self._heads), np.float32),
            )
            self._rows[name] = found
        return found[0][:rows], found[1][:rows]


class SharedAttention:
    """One step's attention over one schedule; prepared once, called for every layer."""

    def __init__(
        self,
        kernels: KernelBackend,
        schedule: Schedule,
        tile_tables: Int32s,
        seq_starts: Int32s,
        context_lens: Int32s,
        buffers: StateBuffers,
    ) -> None:
        """tile_tables `[S, max_tiles]`, seq_starts `[S+1]`, context_lens `[S]`: the step's, which stay as they are."""
        self._kernels = kernels
        self.schedule = schedule
        self._tables, self._starts, self._lens = tile_tables, seq_starts, context_lens
        self._buffers = buffers
        self._leaders = [np.ascontiguousarray(tile_tables[phase.leaders]) for phase in schedule.phases]

    def plainly(
        self, q: Floats, k_layer: KVRows, v_layer: KVRows, scale: np.float32, out: Activations
    ) -> None:
        """The same attention with every sequence reading for itself: what sharing is measured against."""
        where = (self._tables, self._starts, self._lens)
        self._kernels.paged_attention(q, k_layer, v_layer, *where, scale, out)

    def __call__(
        self, q: Floats, k_layer: KVRows, v_layer: KVRows, scale: np.float32, out: Activations
    ) -> None:
        """Attention `[T, heads, head_dim]` of one layer into `out`, float32 or the bits of bfloat16."""
        own, mass = self._buffers.room("own", len(q))
        narrow = out.dtype != np.float32
        if not narrow:
            own = cast(Floats, out)
        self._kernels.paged_attention_states(
            q,
            k_layer,
            v_layer,
            self._tables,
            self._starts,
            self.schedule.own_first,
            self._lens,
            True,
            scale,
            own,
            mass,
        )
        for phase, tables in zip(self.schedule.phases, self._leaders, strict=True):
            self._share(phase, tables, q, k_layer, v_layer, scale, own, mass)
        if narrow:
            self._kernels.narrow_rows(own, out)

    def _share(
        self,
        phase: Phase,
        tables: Int32s,
        q: Floats,
        k_layer: KVRows,
        v_layer: KVRows,
        scale: np.float32,
        own: Floats,
        mass: Floats,
    ) -> None:
        rows = phase.token_rows
        queries, _ = self._buffers.room("queries", len(rows))
        np.take(q, rows, axis=0, out=queries, mode="clip")  # any other mode fills a buffer first
        part, part_mass = self._buffers.room("partial", len(rows))
        self._kernels.paged_attention_states(
            queries,
            k_layer,
            v_layer,
            tables,
            phase.starts,
            phase.first_rows,
            phase.end_rows,
            False,
            scale,
            part,
            part_mass,
        )
        self._kernels.merge_rows(own, mass, rows, part, part_mass)
