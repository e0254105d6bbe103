"""Zeroing and copying on one rank: every block a receipt names is zeroed, then copied, before the step writes.

Owns the tally per namespace that a revocation's evidence is made of. Invariant: zeroed blocks are read back from the
pool's own memory at once, before anything can be written to them again; the tally is of bytes found there, not of the
ledger's opinion (SECURITY.md, "Rank evidence").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from copyhold.kernels.pool import KVPool
from copyhold.kvcore.commands import AdvanceGeneration, Command, Release, Scope
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.receipts import (
    AdvanceReceipt,
    CompleteReceipt,
    DispatchReceipt,
    ReleaseReceipt,
)
from copyhold.namespace.records import RankEvidence

from .plan import PurgeOrder


@dataclass(slots=True)
class Tally:
    """Blocks and bytes of one namespace since its floor last rose."""

    generation: int = 0
    inventory_before_blocks: int = 0
    blocks_released: int = 0
    blocks_zeroed: int = 0
    bytes_zeroed: int = 0
    nonzero_bytes: int = 0


class Scrubber:
    """Applies commands to a ledger, zeroes and copies what their receipts name."""

    def __init__(self, ledger: Ledger, pool: KVPool) -> None:
        self._ledger = ledger
        self._pool = pool
        self._tallies: dict[str, Tally] = {}

    def apply(self, index: int, command: Command) -> None:
        """Apply one log record and zero what it released. Raises: the ledger's refusals; nothing is zeroed then."""
        if isinstance(command, AdvanceGeneration):
            before = len(self._ledger.residue(command.namespace, command.generation))
            receipt = self._ledger.apply_at(index, command)
            assert isinstance(receipt, AdvanceReceipt)
            tally = Tally(generation=command.generation, inventory_before_blocks=before)
            self._tallies[command.namespace] = tally
            self._scrub_for(tally, receipt.scrub, receipt.freed_blocks)
            return
        if isinstance(command, Release):
            scope = self._ledger.request(command.request).scope
            receipt = self._ledger.apply_at(index, command)
            assert isinstance(receipt, ReleaseReceipt)
            self._scrub_of(scope, receipt.scrub, receipt.freed_blocks)
            return
        receipt = self._ledger.apply_at(index, command)
        if isinstance(receipt, CompleteReceipt):
            self._scrub_completed(receipt)
            return
        self._pool.zero_blocks(getattr(receipt, "scrub", ()))
        if isinstance(receipt, DispatchReceipt) and receipt.copies:
            copies = receipt.copies
            self._pool.copy_rows(
                [copy.source for copy in copies],
                [copy.target for copy in copies],
                [copy.rows for copy in copies],
            )

    def evidence(self, order: PurgeOrder, incarnation: str, rank: int, floor_digest: bytes) -> RankEvidence:
        """What this rank measured for ``order``; unsigned. ``floor_digest``: the ledger's machine digest now."""
        tally = self._tallies.get(order.namespace, Tally())
        return RankEvidence(
            nonce=order.nonce,
            incarnation=incarnation,
            rank=rank,
            namespace=order.namespace,
            generation_new=order.generation_new,
            log_index=self._ledger.log_index,
            machine_digest=floor_digest.hex(),
            inventory_before_blocks=tally.inventory_before_blocks,
            inventory_after_blocks=len(self._ledger.residue(order.namespace, order.generation_new)),
            blocks_released=tally.blocks_released,
            blocks_zeroed=tally.blocks_zeroed,
            bytes_zeroed=tally.bytes_zeroed,
            nonzero_bytes=tally.nonzero_bytes,
        )

    def _scrub_for(self, tally: Tally, blocks: Sequence[int], released: int) -> None:
        self._pool.zero_blocks(blocks)
        tally.blocks_released += released
        tally.blocks_zeroed += len(blocks)
        tally.bytes_zeroed += len(blocks) * self._pool.block_bytes
        tally.nonzero_bytes += self._pool.count_nonzero_bytes(blocks)

    def _scrub_of(self, scope: Scope, blocks: Sequence[int], released: int) -> None:
        """Zero what a request of ``scope`` left behind, tallied if its generation is below the floor."""
        tally = self._tallies.get(scope.namespace)
        if tally is not None and scope.generation < tally.generation:
            self._scrub_for(tally, blocks, released)
        else:
            self._pool.zero_blocks(blocks)

    def _scrub_completed(self, receipt: CompleteReceipt) -> None:
        """Sources of copies, then what truncations and releases left behind that waited for their step."""
        deferred = (*receipt.truncated, *receipt.released)
        sources = len(receipt.scrub) - sum(len(facts.scrub) for facts in deferred)
        self._pool.zero_blocks(receipt.scrub[:sources])
        for facts in deferred:
            self._scrub_of(facts.scope, facts.scrub, facts.freed_blocks)
