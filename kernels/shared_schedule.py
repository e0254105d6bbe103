"""Schedules over an execution snapshot: which rows are read once for many sequences, and in which order states are merged.

Owns `Schedule` and its three makers. Invariant: a sequence's rows are its shared chunks, each in exactly one `Phase`, and
its own rows from `own_first` on, so that every row is covered once (K148); states are merged into the sequence's own state
in the order of the phases, which is root first. `hydragen` takes a level at a time and needs two buffers of one level;
`chunk_attention` saves the states of all shared chunks and merges them after; both are exact whatever they share.
Source: Hydragen (shared and unique part, levels), ChunkAttention (chunk-first, then sequence-first); contracts K155 to K158.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from copyhold.kvcore.execution import BEGIN, END, END_ROW, FIRST_ROW, LEVEL, ExecutionSnapshot
from copyhold.kvcore.execution_errors import GroupSizeNotDivisible, PartialBufferTooSmall

Ints = npt.NDArray[np.int64]

STATE_BYTES = 4
"""Bytes of each of a saved state's two scalars (maximum and sum, or their log-sum-exp and the empty flag); float32."""


class Phase(msgspec.Struct, frozen=True):
    """One call over shared rows. Chunk i's query rows are `token_rows[starts[i] : starts[i + 1]]`.

    `leaders` [chunks]: the sequence (position in the step) whose table is read; `first_rows`, `end_rows` [chunks].
    """

    token_rows: Ints
    starts: npt.NDArray[np.int32]
    leaders: Ints
    first_rows: npt.NDArray[np.int32]
    end_rows: npt.NDArray[np.int32]


class RowLedger(msgspec.Struct, frozen=True):
    """K/V rows of one layer and KV head that a schedule reads; a model of payload, not of time (K158).

    `logical_pairs` counts a K/V row once for every sequence that sees it, `physical_rows` once for all that read it
    together; `partial_rows` are the states that are saved, one a query row and shared chunk.
    """

    logical_pairs: int
    physical_rows: int
    partial_rows: int

    @property
    def saved_reads(self) -> int:
        return self.logical_pairs - self.physical_rows


class Schedule(msgspec.Struct, frozen=True):
    """`own_first` int32 [sequences]: first row of each sequence's own part; 0 where it shares nothing."""

    mode: str
    phases: tuple[Phase, ...]
    own_first: npt.NDArray[np.int32]
    buffer_rows: int
    rows: RowLedger


def plain(snapshot: ExecutionSnapshot, token_counts: Ints) -> Schedule:
    """Every sequence reads all its rows itself; `token_counts` int64 [sequences]: rows the step computes of each."""
    nothing = np.zeros(len(snapshot.chunks), dtype=bool)
    return _schedule("plain", snapshot, token_counts, nothing, ())


def hydragen(snapshot: ExecutionSnapshot, token_counts: Ints, threshold: int = 1) -> Schedule:
    """A phase for every level of chunks that more than `threshold` sequences read.

    Raises: GroupSizeNotDivisible where the groups of a level are not one regular product; nothing was made.
    """
    wanted = snapshot.coverage > threshold
    starts = _starts(token_counts)
    sizes = _group_sizes(snapshot, token_counts)
    phases: list[Phase] = []
    above = 0
    for level in range(int(snapshot.chunks[wanted, LEVEL].max()) + 1 if wanted.any() else 0):
        chosen = np.flatnonzero(wanted & (snapshot.chunks[:, LEVEL] == level))
        level_sizes = tuple(sizes[chosen].tolist())
        if len(set(level_sizes)) > 1 or (above and above % level_sizes[0]):
            raise GroupSizeNotDivisible(level, level_sizes)
        above = level_sizes[0]
        phases.append(_phase(snapshot, starts, chosen))
    return _schedule("hydragen", snapshot, token_counts, wanted, tuple(phases))


def chunk_attention(
    snapshot: ExecutionSnapshot, token_counts: Ints, threshold: int = 1, buffer_rows: int | None = None
) -> Schedule:
    """One chunk-first phase over every chunk that more than `threshold` sequences read, all its states saved.

    Raises: PartialBufferTooSmall for a buffer of fewer rows than the saved states need; nothing was made.
    """
    wanted = snapshot.coverage > threshold
    chosen = np.flatnonzero(wanted)
    phases = (_phase(snapshot, _starts(token_counts), chosen),) if len(chosen) else ()
    made = _schedule("chunk", snapshot, token_counts, wanted, phases)
    if buffer_rows is not None and made.buffer_rows > buffer_rows:
        raise PartialBufferTooSmall(made.buffer_rows, buffer_rows)
    return made


def partial_buffer_bytes(rows: int, value_dim: int, scalar_bytes: int) -> int:
    """Bytes of saved states of one head: an output row each, and two scalars at higher precision (K157)."""
    return rows * (value_dim * scalar_bytes + 2 * STATE_BYTES)


def _phase(snapshot: ExecutionSnapshot, starts: Ints, chosen: Ints) -> Phase:
    members = [snapshot.order[chunk[BEGIN] : chunk[END]] for chunk in snapshot.chunks[chosen]]
    rows = [
        np.concatenate(
            [np.arange(int(starts[sequence]), int(starts[sequence + 1])) for sequence in sequences]
        )
        for sequences in members
    ]
    return Phase(
        token_rows=np.concatenate(rows),
        starts=_starts(np.array([len(part) for part in rows])).astype(np.int32),
        leaders=np.array([sequences[0] for sequences in members], dtype=np.int64),
        first_rows=snapshot.chunks[chosen, FIRST_ROW].astype(np.int32),
        end_rows=snapshot.chunks[chosen, END_ROW].astype(np.int32),
    )


def _schedule(
    mode: str,
    snapshot: ExecutionSnapshot,
    token_counts: Ints,
    wanted: npt.NDArray[np.bool_],
    phases: tuple[Phase, ...],
) -> Schedule:
    own_first = snapshot.shared_rows(wanted)
    saved = [int(phase.starts[-1]) for phase in phases]
    return Schedule(
        mode=mode,
        phases=phases,
        own_first=own_first.astype(np.int32),
        buffer_rows=max(saved, default=0),
        rows=_count_rows(snapshot, token_counts, own_first, wanted, sum(saved)),
    )


def _count_rows(
    snapshot: ExecutionSnapshot,
    token_counts: Ints,
    own_first: Ints,
    wanted: npt.NDArray[np.bool_],
    saved: int,
) -> RowLedger:
    own = int((snapshot.first_rows + token_counts - own_first).sum())
    lengths = snapshot.chunks[wanted, END_ROW] - snapshot.chunks[wanted, FIRST_ROW]
    return RowLedger(
        logical_pairs=own + int(lengths @ snapshot.coverage[wanted]),
        physical_rows=own + int(lengths.sum()),
        partial_rows=saved,
    )


def _group_sizes(snapshot: ExecutionSnapshot, token_counts: Ints) -> Ints:
    """Query rows under each chunk."""
    running = _starts(token_counts[snapshot.order])
    return running[snapshot.chunks[:, END]] - running[snapshot.chunks[:, BEGIN]]


def _starts(counts: Ints) -> Ints:
    """Running sums from 0, int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
