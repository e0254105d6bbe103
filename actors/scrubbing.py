"""Zeroing and copying on one rank: every block a receipt names is zeroed, then copied, before the step writes.

Owns the tally per namespace that a revocation's evidence is made of; it adds up all cache groups, each in a pool of its own.
Invariant: zeroed blocks are read back from the pools' own memory at once, before anything can be written to them again; the
tally is of bytes found there, not of the ledger's opinion (docs/isolation.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from copyhold.kernels.cache_pools import CachePools, as_pools
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.commands import AdvanceGeneration, Command, Release, Scope
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.receipts import (
    AdvanceReceipt,
    BlockCopy,
    CompleteReceipt,
    DispatchReceipt,
    ReleaseReceipt,
)
from copyhold.namespace.records import RankEvidence

from .plan import PurgeOrder

_Parts = tuple[tuple[int, ...], ...]
"""Blocks by cache group."""


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

    def __init__(self, ledger: Ledger, pool: KVPool | CachePools) -> None:
        self._ledger = ledger
        self._pools = as_pools(pool)
        self._tallies: dict[str, Tally] = {}

    def apply(self, index: int, command: Command) -> None:
        """Apply one log record and zero what it released. Raises: the ledger's refusals; nothing is zeroed then."""
        if isinstance(command, AdvanceGeneration):
            before = self._residue(command.namespace, command.generation)
            receipt = self._ledger.apply_at(index, command)
            assert isinstance(receipt, AdvanceReceipt)
            tally = Tally(generation=command.generation, inventory_before_blocks=before)
            self._tallies[command.namespace] = tally
            self._scrub_for(tally, (receipt.scrub, *receipt.scrub_others), receipt.freed_blocks)
            return
        if isinstance(command, Release):
            scope = self._ledger.request(command.request).scope
            receipt = self._ledger.apply_at(index, command)
            assert isinstance(receipt, ReleaseReceipt)
            self._scrub_of(scope, (receipt.scrub, *receipt.scrub_others), receipt.freed_blocks)
            return
        receipt = self._ledger.apply_at(index, command)
        if isinstance(receipt, CompleteReceipt):
            self._scrub_completed(receipt)
            return
        self._pools.zero_blocks((getattr(receipt, "scrub", ()), *getattr(receipt, "scrub_others", ())))
        if isinstance(receipt, DispatchReceipt) and receipt.copies:
            self._copy(receipt.copies)

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
            inventory_after_blocks=self._residue(order.namespace, order.generation_new),
            blocks_released=tally.blocks_released,
            blocks_zeroed=tally.blocks_zeroed,
            bytes_zeroed=tally.bytes_zeroed,
            nonzero_bytes=tally.nonzero_bytes,
        )

    def _residue(self, namespace: str, generation_below: int) -> int:
        """Blocks of all groups that may still hold bytes of older generations."""
        groups = range(len(self._pools))
        return sum(len(self._ledger.residue(namespace, generation_below, group)) for group in groups)

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Rows of copy-on-write, in each group's own pool; a copy reads nothing that another one writes."""
        for group, pool in enumerate(self._pools.pools):
            own = [copy for copy in copies if copy.group == group]
            if own:
                pool.copy_rows(
                    [copy.source for copy in own],
                    [copy.target for copy in own],
                    [copy.rows for copy in own],
                )

    def _scrub_for(self, tally: Tally, parts: _Parts, released: int) -> None:
        self._pools.zero_blocks(parts)
        tally.blocks_released += released
        tally.blocks_zeroed += sum(len(blocks) for blocks in parts)
        tally.bytes_zeroed += sum(
            len(blocks) * pool.block_bytes for pool, blocks in zip(self._pools.pools, parts, strict=False)
        )
        tally.nonzero_bytes += self._pools.count_nonzero_bytes(parts)

    def _scrub_of(self, scope: Scope, parts: _Parts, released: int) -> None:
        """Zero what a request of ``scope`` left behind, tallied if its generation is below the floor."""
        tally = self._tallies.get(scope.namespace)
        if tally is not None and scope.generation < tally.generation:
            self._scrub_for(tally, parts, released)
        else:
            self._pools.zero_blocks(parts)

    def _scrub_completed(self, receipt: CompleteReceipt) -> None:
        """Sources of copies, then what truncations and releases left behind that waited for their step."""
        deferred = [
            (facts, (facts.scrub, *facts.scrub_others)) for facts in (*receipt.truncated, *receipt.released)
        ]
        parts = (receipt.scrub, *receipt.scrub_others)
        if deferred:
            later = [sum(map(len, by_group)) for by_group in zip(*[own for _, own in deferred], strict=True)]
            parts = tuple(blocks[: len(blocks) - count] for blocks, count in zip(parts, later, strict=True))
        self._pools.zero_blocks(parts)
        for facts, own in deferred:
            self._scrub_of(facts.scope, own, facts.freed_blocks)
