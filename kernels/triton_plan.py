"""Owns the plan of one step's attention on a GPU: which query rows meet which keys in which program, and what is merged.

A *segment* is a run of keys `[begin, end)` read through one sequence's table by the rows of all its members: the whole
context of one sequence, or a prefix that many share, read once for all of them. The plan cuts segments into *items*
(rows that fit one program x one partition of the keys). A row that only one item covers is written directly; every
other row gets a state per item and one merge, in key order.

Invariant: the items of a row cover each key that it may see exactly once, whatever the segments and partitions (K148).
Partitions are cut at multiples of their size from position 0 (K144). Made once a step, used by every layer; needs no
GPU and no Triton. Contracts: K144, K148, K149, K151, K155, K156.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from .batch import StepBatch
from .errors import KernelInputRefused, PartitionNotWholeTiles
from .interface import TILE
from .triton_config import AttentionConfig, TileConfig

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

UNLIMITED = 2**30
"""A window that no context fills."""


class Segment(msgspec.Struct, frozen=True):
    """Keys `[begin, end)` through the table of `members[0]`, which all members share there (K155)."""

    begin: int
    end: int
    members: tuple[int, ...]


@dataclass(slots=True)
class Launch:
    """Items of one program shape; `partial` ones leave states, the others write their rows."""

    tile: TileConfig
    partial: bool
    items: Int32
    """`[n, 6]`: first place in the plan's rows, rows, table row, begin, end, first state"""


@dataclass(slots=True)
class AttentionPlan:
    """What one step launches, the same in every layer."""

    launches: list[Launch]
    rows: Int32
    """Token rows, as the items refer to them"""
    num_states: int
    merge_rows: Int32
    """`[M]` token rows that have states"""
    merge_starts: Int32
    """`[M+1]` each merged row's first place in `merge_states`"""
    merge_states: Int32
    key_rows_read: int
    """K/V rows of one head that all items together load: what a shared prefix saves shows here (K158)"""


@dataclass(slots=True)
class _Items:
    """Columns of the items while they are cut."""

    first: Int64
    count: Int64
    table: Int64
    begin: Int64
    end: Int64
    wide: npt.NDArray[np.bool_]

    def take(self, index: npt.NDArray[np.integer] | npt.NDArray[np.bool_]) -> _Items:
        return _Items(
            self.first[index],
            self.count[index],
            self.table[index],
            self.begin[index],
            self.end[index],
            self.wide[index],
        )


def whole_contexts(batch: StepBatch) -> list[Segment]:
    """One segment a sequence: attention without sharing."""
    lens = batch.context_lens.tolist()
    return [Segment(0, lens[seq], (seq,)) for seq in np.flatnonzero(np.diff(batch.seq_starts)).tolist()]


def plan_attention(
    batch: StepBatch,
    group: int,
    config: AttentionConfig,
    *,
    window: int | None = None,
    segments: Sequence[Segment] | None = None,
    partition_tokens: int | None = None,
    states_only: bool = False,
) -> AttentionPlan:
    """Cut a batch into items. Without `partition_tokens` no context is split (see `partition_for`).

    states_only: the segments need not cover a context, a row may see nothing, and every row that sees something goes
    through the merge, which leaves its state.

    Raises: `KernelInputRefused` for segments that miss or double a key, a window below 1 or a config without a row for each
    head of a group; `PartitionNotWholeTiles` (nothing was planned).
    """
    if group > min(config.narrow.query_rows, config.wide.query_rows):
        raise KernelInputRefused("config", f"no row for each of {group} heads")
    if window is not None and window < 1:
        raise KernelInputRefused("window", f"{window} keys")
    if partition_tokens is not None and (partition_tokens <= 0 or partition_tokens % TILE):
        raise PartitionNotWholeTiles(partition_tokens, TILE)
    parts = whole_contexts(batch) if segments is None else list(segments)
    if segments is not None and not states_only:
        check_cover(batch, parts)
    rows, starts = _member_rows(batch, parts)
    items = _row_chunks(parts, starts, group, config)
    items = _clip(items, rows, batch.positions, window or UNLIMITED)
    if partition_tokens is not None:
        items = _partitions(items, partition_tokens)
    return _finish(batch, rows, items, config, states_only)


def partition_for(
    batch: StepBatch, group: int, config: AttentionConfig, kv_heads: int, sms: int
) -> int | None:
    """Partition size that gives each of `sms` multiprocessors a few programs; ``None`` where rows alone do.

    It depends on the whole batch: deterministic runs pass `config.partition_tokens` instead.
    """
    counts = np.diff(batch.seq_starts).astype(np.int64)
    tokens = max(1, config.narrow.query_rows // group)
    chunks = -(-counts // tokens)
    programs = int(chunks.sum()) * kv_heads
    wanted = 4 * sms
    if not programs or programs >= wanted:
        return None
    unit = max(config.narrow.key_tokens, config.wide.key_tokens)
    keys = int((chunks * batch.context_lens).sum()) * kv_heads
    size = max(2 * unit, -(-keys // wanted // unit) * unit)
    return size if size < int(batch.context_lens.max()) else None


def check_cover(batch: StepBatch, segments: Sequence[Segment]) -> None:
    """Refuse segments that do not cover every sequence's context exactly once (K148).

    Raises: `KernelInputRefused` naming the sequence.
    """
    counts = np.diff(batch.seq_starts)
    members = np.array([seq for part in segments for seq in part.members], dtype=np.int64)
    sizes = [len(part.members) for part in segments]
    begin = np.repeat([part.begin for part in segments], sizes).astype(np.int64)
    end = np.repeat([part.end for part in segments], sizes).astype(np.int64)
    if members.size and (members.min() < 0 or members.max() >= batch.num_seqs):
        raise KernelInputRefused("segments", "a member is not a sequence of the batch")
    order = np.lexsort((end, begin, members))
    members, begin, end = members[order], begin[order], end[order]
    new = np.concatenate([[True], members[1:] != members[:-1]]) if members.size else np.zeros(0, dtype=bool)
    expected = np.where(new, 0, np.concatenate([[0], end[:-1]])) if members.size else begin
    if (wrong := np.flatnonzero(begin != expected)).size:
        what = "doubled" if begin[wrong[0]] < expected[wrong[0]] else "missed"
        raise KernelInputRefused(
            "segments", f"sequence {members[wrong[0]]}: keys are {what} at {expected[wrong[0]]}"
        )
    last = np.zeros(batch.num_seqs, dtype=np.int64)
    np.maximum.at(last, members, end)
    if (wrong := np.flatnonzero((counts > 0) & (last != batch.context_lens))).size:
        raise KernelInputRefused(
            "segments", f"sequence {wrong[0]}: keys end at {last[wrong[0]]}, not its context"
        )


def _member_rows(batch: StepBatch, segments: Sequence[Segment]) -> tuple[Int32, Int64]:
    """Token rows of each segment's members, one after another, and where each segment's begin."""
    counts = np.diff(batch.seq_starts).astype(np.int64)
    sizes = np.array([len(part.members) for part in segments], dtype=np.int64)
    members = np.array([seq for part in segments for seq in part.members], dtype=np.int64)
    of_member = counts[members] if members.size else np.zeros(0, dtype=np.int64)
    rows = np.repeat(batch.seq_starts[:-1][members] if members.size else members, of_member) + _ramp(
        of_member
    )
    ends = np.concatenate([[0], np.cumsum(of_member)])[np.concatenate([[0], np.cumsum(sizes)])]
    return rows.astype(np.int32), ends


def _row_chunks(segments: Sequence[Segment], starts: Int64, group: int, config: AttentionConfig) -> _Items:
    """Cut each segment's rows to what one program takes; few rows take the narrow shape."""
    rows = np.diff(starts)
    wide = rows * group > 2 * config.narrow.query_rows
    tokens = np.where(wide, config.wide.query_rows // group, config.narrow.query_rows // group)
    chunks = -(-rows // tokens)
    of = np.repeat(np.arange(len(segments)), chunks)
    offset = _ramp(chunks) * tokens[of]
    return _Items(
        first=starts[:-1][of] + offset,
        count=np.minimum(tokens[of], rows[of] - offset),
        table=np.array([part.members[0] for part in segments], dtype=np.int64)[of],
        begin=np.array([part.begin for part in segments], dtype=np.int64)[of],
        end=np.array([part.end for part in segments], dtype=np.int64)[of],
        wide=wide[of],
    )


def _clip(items: _Items, rows: Int32, positions: Int64, window: int) -> _Items:
    """Leave out keys that no row of the item sees: after its latest row, before its earliest row's window."""
    if not items.first.size:
        return items
    at = positions[rows]
    bounds = np.stack([items.first, items.first + items.count], axis=1).reshape(-1)
    padded = np.concatenate([at, at[-1:]])
    earliest = np.minimum.reduceat(padded, bounds)[::2]
    latest = np.maximum.reduceat(padded, bounds)[::2]
    items.begin = np.maximum(items.begin, earliest - window + 1)
    items.end = np.minimum(items.end, latest + 1)
    return items.take(items.end > items.begin)


def _partitions(items: _Items, size: int) -> _Items:
    """Cut the keys at every multiple of `size`."""
    lowest = items.begin // size
    parts = -(-items.end // size) - lowest
    cut = items.take(np.repeat(np.arange(items.first.size), parts))
    number = np.repeat(lowest, parts) + _ramp(parts)
    cut.begin = np.maximum(cut.begin, number * size)
    cut.end = np.minimum(cut.end, (number + 1) * size)
    return cut


def _finish(
    batch: StepBatch, rows: Int32, items: _Items, config: AttentionConfig, states_only: bool
) -> AttentionPlan:
    """Choose which items write directly, number the states of the others and list each row's for the merge."""
    owner = np.repeat(np.arange(items.first.size), items.count)
    token_row = rows[np.repeat(items.first, items.count) + _ramp(items.count)].astype(np.int64)
    covers = np.bincount(token_row, minlength=batch.num_tokens)
    if not states_only and (covers == 0).any():
        raise KernelInputRefused("segments", f"row {int(np.flatnonzero(covers == 0)[0])} sees no key")
    partial = np.full(items.first.size, states_only)
    partial[owner[covers[token_row] > 1]] = True
    state_of = np.where(partial, np.cumsum(np.where(partial, items.count, 0)) - items.count, 0)
    kept = partial[owner]
    state = (state_of[owner] + _ramp(items.count))[kept]
    order = np.lexsort((items.begin[owner[kept]], token_row[kept]))
    merged, first = np.unique(token_row[kept][order], return_index=True)
    table = np.stack([items.first, items.count, items.table, items.begin, items.end, state_of], axis=1)
    launches = [
        Launch(tile, is_partial, table[chosen].astype(np.int32))
        for tile, is_wide in ((config.wide, True), (config.narrow, False))
        for is_partial in (False, True)
        if (chosen := (items.wide == is_wide) & (partial == is_partial)).any()
    ]
    return AttentionPlan(
        launches=launches,
        rows=rows,
        num_states=int(state.size),
        merge_rows=merged.astype(np.int32),
        merge_starts=np.append(first, state.size).astype(np.int32),
        merge_states=state[order].astype(np.int32),
        key_rows_read=int((items.end - items.begin).sum()),
    )


def _ramp(counts: Int64) -> Int64:
    """`0 .. counts[0]-1, 0 .. counts[1]-1, ...`"""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - counts, counts)
