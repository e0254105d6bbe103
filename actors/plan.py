"""The step plan and its evidence: what a scheduler sends to every rank of a replica, and what comes back.

Owns the wire format of the token path. A plan is a slice of the replica's one log (``first_log_index`` and the
commands that follow) plus what to compute after applying it. Token ids are in the commands (Admit, Complete): a rank
reads the ids of a dispatched row from its own ledger, so block tables and token batches do not cross the wire.

Invariant: tokens of a step leave the replica only when every rank's evidence equals the scheduler's own log index and
machine digest (docs/architecture.md, "One log, TP+1 ledgers, one digest").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from copyhold.kvcore.commands import Command
from copyhold.models.sampling import SamplingParams
from copyhold.namespace.records import RankEvidence


class PurgeOrder(msgspec.Struct, frozen=True, array_like=True):
    """Asks each rank for signed evidence that nothing below ``generation_new`` is left in its pool."""

    namespace: str
    generation_new: int
    nonce: str


class KVAuditOrder(msgspec.Struct, frozen=True, array_like=True):
    """Asks each rank to recompute ``tokens`` (int32 bytes) cold in one shot and to compare sampled rows.

    ``block_ids`` are those of cache group 0, ``other_blocks`` those of the groups after it.
    """

    tokens: bytes
    block_ids: tuple[int, ...]
    positions: tuple[int, ...]
    other_blocks: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls, tokens: npt.ArrayLike, tables: Sequence[npt.NDArray[np.integer]], positions: Iterable[int]
    ) -> KVAuditOrder:
        """Of token ids and, per cache group, the blocks that hold their rows."""
        first, *others = [tuple(table.tolist()) for table in tables]
        ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        return cls(ids, first, tuple([int(position) for position in positions]), tuple(others))


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """One sampled row that is not greedy: ``sample[index]`` is its row in the dispatch.

    The position of the draw is not sent: it is where the row's span ends, so a replay draws the same number.
    """

    index: int
    params: SamplingParams


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One message to every rank.

    ``commands`` continue the log at ``first_log_index``. If the last of them is a Dispatch, its rows are computed and
    the rows at the indices ``sample`` yield one token each, greedy unless ``draws`` says how it is drawn.
    """

    incarnation: str
    step: int
    first_log_index: int
    commands: tuple[Command, ...]
    sample: tuple[int, ...] = ()
    purge: PurgeOrder | None = None
    audit: KVAuditOrder | None = None
    draws: tuple[Draw, ...] = ()


class KVAuditResult(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one rank's pool against a cold recompute; ``max_abs_difference`` in the pool's own units."""

    rank: int
    rows_compared: int
    max_abs_difference: float


class StepEvidence(msgspec.Struct, frozen=True, array_like=True):
    """What one rank reports after a plan: its ledger's position and digest, its sampled tokens, its time."""

    incarnation: str
    step: int
    rank: int
    log_index: int
    machine_digest: bytes
    tokens: tuple[int, ...] = ()
    execution_ns: int = 0
    purge: RankEvidence | None = None
    audit: KVAuditResult | None = None
    failure: str = ""


_plan_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_evidence_decoder = msgspec.msgpack.Decoder(StepEvidence)


def encode_plan(plan: StepPlan) -> bytes:
    """The plan's wire form (msgpack, arrays)."""
    return _plan_encoder.encode(plan)


def decode_plan(message: bytes) -> StepPlan:
    """Inverse of ``encode_plan``; raises ``msgspec.ValidationError`` on anything else."""
    return _plan_decoder.decode(message)


def encode_evidence(evidence: StepEvidence) -> bytes:
    """The evidence's wire form (msgpack, arrays)."""
    return _plan_encoder.encode(evidence)


def decode_evidence(message: bytes) -> StepEvidence:
    """Inverse of ``encode_evidence``."""
    return _evidence_decoder.decode(message)
