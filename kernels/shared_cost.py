"""The cost model of shared reads: which schedule a step takes, from prefix length, group size and suffix lengths.

Owns the prediction and the choice. Invariant: the choice is a function of the step's shape alone, so that equal logs give
equal choices; a schedule that is not expected to gain `LEAST_GAIN` over the plain one is not taken. Predictions are in
nanoseconds of one layer on the machine that the constants were measured on; only their ratios decide, and what a choice
gained is measured beside it (actors/shared_reads.py), never inferred from rows (K158).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from copyhold.kvcore.execution import ExecutionSnapshot
from copyhold.kvcore.execution_errors import GroupSizeNotDivisible, PartialBufferTooSmall

from .choices import SharedPrefix
from .shared_schedule import Ints, Schedule, chunk_attention, hydragen, plain

LEAST_GAIN = 1.05
BUFFER_ROWS = 4096
"""Saved states that chunk_attention may keep; beyond, Hydragen's two buffers of one level are what is left."""

_PASS_ROWS = 32
_MICRO_ROWS = 4


class KernelCosts(msgspec.Struct, frozen=True):
    """Nanoseconds, one thread, float32 K/V. `stream` and `work` are per K/V row and element of a head's dimension.

    `stream` is paid once for every pass of 32 query rows, `work` for every query row, `item` for every sequence or chunk
    and KV head, `call` for every kernel call, `phase` for gathering and merging once, `merge` for every element of a merged
    state. Fitted to 33 shapes of three models, within 16 % of each where K/V fits the caches; where it does not, a plain
    read costs up to a third more than predicted, so that a gain is rather told too small.
    """

    stream: float = 0.055
    work: float = 0.022
    item: float = 375.0
    call: float = 2700.0
    phase: float = 4000.0
    merge: float = 0.45


class Geometry(msgspec.Struct, frozen=True):
    """Heads of one rank."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: int = 4


class Choice(msgspec.Struct, frozen=True):
    """The schedule taken. `refused` names what could not be built, with the reason."""

    schedule: Schedule
    plain_ns: float
    predicted_ns: float
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def predicted_gain(self) -> float:
        """How many times faster than the plain schedule."""
        return self.plain_ns / self.predicted_ns


def predict_ns(
    schedule: Schedule,
    snapshot: ExecutionSnapshot,
    token_counts: Ints,
    geometry: Geometry,
    costs: KernelCosts | None = None,
) -> float:
    """Expected time of one layer's attention under a schedule."""
    costs = costs or KernelCosts()
    own_rows = snapshot.first_rows + token_counts - schedule.own_first
    total = _items_ns(own_rows, token_counts, geometry, costs)
    for phase in schedule.phases:
        lengths = phase.end_rows.astype(np.int64) - phase.first_rows
        total += _items_ns(lengths, np.diff(phase.starts).astype(np.int64), geometry, costs)
        merged = len(phase.token_rows) * geometry.heads * geometry.head_dim
        total += costs.phase + merged * costs.merge
    return total


def choose(
    snapshot: ExecutionSnapshot,
    token_counts: Ints,
    geometry: Geometry,
    mode: SharedPrefix = "auto",
    costs: KernelCosts | None = None,
) -> Choice:
    """The fastest schedule by prediction among those `mode` allows; forced modes still refuse what cannot be built.

    A forced mode that cannot be built falls back to plain, with the reason in `refused`.
    """
    own = plain(snapshot, token_counts)
    plain_ns = predict_ns(own, snapshot, token_counts, geometry, costs)
    best, best_ns = own, plain_ns
    refused: list[tuple[str, str]] = []
    for name, make in _makers(snapshot, token_counts, mode):
        try:
            schedule = make()
        except (GroupSizeNotDivisible, PartialBufferTooSmall) as refusal:
            refused.append((name, refusal.reason))
            continue
        expected_ns = predict_ns(schedule, snapshot, token_counts, geometry, costs)
        least = best_ns if best is not own else plain_ns / LEAST_GAIN
        if mode != "auto" or expected_ns < least:
            best, best_ns = schedule, expected_ns
    return Choice(best, plain_ns, best_ns, tuple(refused))


def _makers(
    snapshot: ExecutionSnapshot, token_counts: Ints, mode: SharedPrefix
) -> list[tuple[str, Callable[[], Schedule]]]:
    """Candidates in the order in which an equal one wins; thresholds leave chunks of few readers where they are."""
    if mode == "off":
        return []
    if mode == "hydragen":
        return [("hydragen", lambda: hydragen(snapshot, token_counts))]
    saved: list[tuple[str, Callable[[], Schedule]]] = [
        ("chunk", lambda: chunk_attention(snapshot, token_counts, 1, BUFFER_ROWS))
    ]
    if mode == "chunk":
        return saved
    widest = int(snapshot.coverage.max()) if len(snapshot.chunks) else 0
    if widest > 3:
        saved.append(("chunk", lambda: chunk_attention(snapshot, token_counts, 3, BUFFER_ROWS)))
    return [("hydragen", lambda: hydragen(snapshot, token_counts)), *saved]


def _items_ns(kv_rows: Ints, query_tokens: Ints, geometry: Geometry, costs: KernelCosts) -> float:
    """One kernel call over items of `kv_rows` K/V rows and `query_tokens` token rows each."""
    queries = query_tokens * (geometry.heads // geometry.kv_heads)
    passes = -(-queries // _PASS_ROWS)
    worked = -(-queries // _MICRO_ROWS) * _MICRO_ROWS
    per_row = passes * costs.stream * (geometry.kv_bytes / 4) + worked * costs.work
    busy = float((kv_rows * per_row).sum()) * geometry.head_dim
    return costs.call + geometry.kv_heads * (len(kv_rows) * costs.item + busy)
