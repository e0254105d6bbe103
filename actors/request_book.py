"""The requests of one replica beside its ledger: who waits, who runs, and what the ranks have not been told yet.

Owns both queues, the replica's own ledger and its evictor, and the only way a command gets into them: ``apply`` here first, then
to the ranks with the next plan. Invariant: the commands that ``take_unsent`` gives out are one gapless log; a request that
runs holds a slot of the ledger and one that waits holds none.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec
import numpy as np

from copyhold.kvcore.commands import Command, Evict, Genesis, Release, RequestHandle
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.receipts import EvictReceipt, ReleaseReceipt

from .cache_settings import TAIL_POLICY, CacheSettings
from .eviction import Evictor, Victims
from .floor_book import FloorBook
from .group_room import require_room
from .messages import Failed, Finished
from .recording import Recording
from .shares import Shares
from .submission import Entry

_R = TypeVar("_R")
REVOKED = Failed("namespace_revoked", "the namespace was revoked while this request was running")


class RequestBook:
    """Lent to admission, dispatch and the scheduler of one replica; nobody else changes it."""

    def __init__(self, genesis: Genesis, cache: CacheSettings, recording: Recording | None) -> None:
        """Raises: ``ValueError`` for strict shares of a pool with windows, which no share counts, and for tails where the
        ledger has none; ``CacheGroupsUnfit``.
        """
        require_room(genesis)
        group = genesis.groups[0]
        self.genesis = genesis
        self.block_size = group.block_size
        self.ledger = Ledger()
        self.shares = Shares(cache.shares, group.num_blocks)
        if self.shares.strict and any(each.window for each in genesis.groups):
            raise ValueError(
                "shares count blocks of the first cache group: windows cannot be strictly isolated"
            )
        self.evictor = Evictor(
            self.ledger, group.num_blocks, self.shares, cache.make_policy, cache.limits, cache.recency
        )
        if cache.tails and (len(genesis.groups) > 1 or group.window):
            raise ValueError("tails need a model with one cache group of full attention")
        self.tail_policy = TAIL_POLICY if cache.tails else 0
        self.floors = FloorBook()
        self.waiting: deque[Entry] = deque()
        self.running: list[Entry] = []
        self._recording = recording
        self._outbox: list[Command] = []
        self._sent_index = 0
        self.apply(genesis)
        self.page_tokens = self.ledger.state.alignment
        """Tokens of one page of the index: whole blocks in every cache group."""

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or remains to be sent."""
        return not self.waiting and not self.running and not self._outbox

    @property
    def sent_index(self) -> int:
        """The log index up to which the ranks have been told."""
        return self._sent_index

    @property
    def unsent(self) -> bool:
        """Whether the ranks have not been told of some command."""
        return bool(self._outbox)

    def take_unsent(self) -> tuple[int, tuple[Command, ...]]:
        """The log index of the first command that the ranks have not been told, and all of them; told from now on."""
        first, commands = self._sent_index, tuple(self._outbox)
        self._sent_index = self.ledger.log_index
        self._outbox.clear()
        return first, commands

    def apply(self, command: Command, kind: type[_R] = object) -> _R:
        """Apply a command and queue it for the ranks. Raises: what the ledger refuses with; nothing changed."""
        receipt = self.ledger.apply(command)
        self._outbox.append(command)
        if self._recording is not None:
            self._recording.record(command, receipt)
        assert isinstance(receipt, kind), (type(receipt), kind)
        return receipt

    def table(self, entry: Entry) -> np.ndarray:
        """Blocks of a running request in the first cache group, a view of the ledger's."""
        slot = held(entry).slot
        return self.ledger.tables[slot, : int(self.ledger.num_blocks[slot])]

    def evict(self, victims: Victims) -> None:
        """Evict in a command of its own, if there is anything to evict."""
        if victims.nodes or victims.trim:
            self.apply(Evict(victims.nodes, victims.trim), EvictReceipt)
            self.evictor.evicted(victims)

    def copied_tails(self, entries: list[Entry]) -> dict[int, str]:
        """Blocks that these requests' step copies and whose tail was revoked meanwhile, by namespace."""
        if not self.tail_policy:
            return {}
        sources = self.ledger.state.requests.sources[0].array
        above = [entry for entry in entries if self.floors.above(entry.scope)]
        found = {int(sources[held(entry).slot]) - 1: entry.scope.namespace for entry in above}
        return {block: namespace for block, namespace in found.items() if block >= 0}

    def give_back_tails(self, blocks: dict[int, str]) -> None:
        """Those of `copied_tails` that nobody holds any more are no longer the namespace's."""
        pool = self.ledger.state.pool
        for block, namespace in blocks.items():
            if not pool.ref.array[block] and not pool.node.array[block]:
                self.shares.give_back(namespace, 1)

    def finish(self, entry: Entry, reason: str, completion_tokens: int) -> None:
        """End well; a preempted request that waits to go on holds nothing to release."""
        if entry.handle is None:
            self.waiting.remove(entry)
        else:
            self.release(entry, "finish")
        assert entry.receipt is not None, "a finished request was admitted"
        entry.receipt = msgspec.structs.replace(
            entry.receipt, completion_tokens=completion_tokens, finish_reason=reason
        )
        entry.end(Finished(reason, entry.receipt))

    def release(self, entry: Entry, reason: str) -> None:
        """Give back everything that a running request holds; it runs no more."""
        namespace, indexed = entry.scope.namespace, self.table(entry)[: entry.published_blocks].copy()
        free_blocks = self.ledger.gauge().free
        receipt = self.apply(Release(held(entry), reason), ReleaseReceipt)
        assert not receipt.deferred, "requests are released between steps"
        self.running.remove(entry)
        # Shares count blocks of the first cache group, a receipt those of all.
        self.shares.give_back(namespace, self.ledger.gauge().free - free_blocks)
        if not self.floors.above(entry.scope):
            self.evictor.released(namespace, entry.terminal, indexed, len(entry.generated))
        else:
            self.floors.note_release(entry.scope, self.ledger.gauge().free)
        entry.handle = None
        entry.valid_rows = 0
        entry.published_blocks = 0
        entry.terminal = None


def held(entry: Entry) -> RequestHandle:
    """The slot of a running request."""
    assert entry.handle is not None, f"request {entry.submission.request_id} holds no slot"
    return entry.handle
