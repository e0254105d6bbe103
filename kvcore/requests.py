"""Request slots: tokens, block tables, valid rows and pins, as arrays [max_requests, ...].

Invariant: slot generations rise when a slot is given out (and when an admission is aborted); rows [0,
valid_rows) have K/V, tokens [valid_rows, num_tokens) are known but not computed; at most one step of a
request is in flight. Table cells beyond `num_blocks` are 0 and mean nothing.
Source: LEDGER "In flight"; contracts K032, K053, K075, K211.
"""

from __future__ import annotations

import msgspec
import numpy as np

from .commands import RequestHandle, Scope
from .digest import Array, Column, DigestSum, IdStack
from .errors import StaleRequestGeneration

RELEASE_REASONS = ("finish", "cancel", "preempt", "revoke", "error")


class RequestView(msgspec.Struct, frozen=True):
    """One request as a value. `reserved_rows` is what its table has room for."""

    handle: RequestHandle
    scope: Scope
    num_tokens: int
    valid_rows: int
    reserved_rows: int
    num_blocks: int
    in_flight: bool


class RequestTable:
    """Slots [0, max_requests)."""

    def __init__(
        self, max_requests: int, max_model_len: int, block_size: int, committed: DigestSum, machine: DigestSum
    ) -> None:
        self.max_requests = max_requests
        self.max_model_len = max_model_len
        self.max_blocks = -(-max_model_len // block_size)
        self.active = Column("request.active", max_requests, np.int8, committed)
        self.scope = Column("request.scope", max_requests, np.int32, committed)
        self.num_tokens = Column("request.num_tokens", max_requests, np.int32, committed)
        self.token_print = Column("request.token_print", max_requests, np.uint64, committed)
        self.valid_rows = Column("request.valid_rows", max_requests, np.int32, committed)
        self.num_blocks = Column("request.num_blocks", max_requests, np.int32, committed)
        self.table_cells = Column("request.table", max_requests * self.max_blocks, np.int32, committed)
        self.generation = Column("request.generation", max_requests, np.int64, machine)
        self.terminal = Column("request.terminal", max_requests, np.int32, machine)
        self.shared = Column("request.shared", max_requests, np.int32, machine)
        self.transaction = Column("request.transaction", max_requests, np.int64, machine)
        self.dispatched = Column("request.dispatched", max_requests, np.int8, machine)
        self.flight_step = Column("request.flight_step", max_requests, np.int64, machine)
        self.flight_row = Column("request.flight_row", max_requests, np.int32, machine)
        self.flight_count = Column("request.flight_count", max_requests, np.int32, machine)
        self.ending = Column("request.ending", max_requests, np.int8, machine)
        self.free = IdStack("request.free", max_requests, 0, machine)
        # One column more than the context: the last sampled token never gets K/V.
        self.tokens: Array = np.zeros((max_requests, max_model_len + 1), dtype=np.int32)
        self.tables: Array = self.table_cells.array.reshape(max_requests, self.max_blocks)

    def columns(self) -> dict[bool, list[Column]]:
        committed = [
            self.active,
            self.scope,
            self.num_tokens,
            self.token_print,
            self.valid_rows,
            self.num_blocks,
        ]
        machine = [self.generation, self.terminal, self.shared, self.transaction, self.flight_step]
        machine += [self.flight_row, self.flight_count, self.ending, self.dispatched, self.free.column]
        return {True: [*committed, self.table_cells], False: machine}

    def slot_of(self, handle: RequestHandle) -> int:
        """The slot of a running request. Raises: StaleRequestGeneration, nothing changed."""
        slot = handle.slot
        known = 0 <= slot < self.max_requests and bool(self.active.array[slot])
        if not known or int(self.generation.array[slot]) != handle.generation:
            raise StaleRequestGeneration(slot, handle.generation)
        return slot

    def handle(self, slot: int) -> RequestHandle:
        return RequestHandle(slot, int(self.generation.array[slot]))

    def table(self, slot: int) -> Array:
        """The request's blocks in logical order, int64 copy."""
        return self.tables[slot, : int(self.num_blocks.array[slot])].astype(np.int64)

    def write_table(self, slots: Array, pages: Array, blocks: Array) -> None:
        """Table cells of distinct (slot, page) pairs."""
        self.table_cells.write(slots.astype(np.int64) * self.max_blocks + pages, blocks)

    def clear(self, slot: int) -> None:
        """Empties the slot and gives it back; its generation stays for the fence."""
        blocks = int(self.num_blocks.array[slot])
        self.table_cells.write(np.arange(slot * self.max_blocks, slot * self.max_blocks + blocks), 0)
        self.tokens[slot, : int(self.num_tokens.array[slot])] = 0
        for column in (
            self.active,
            self.scope,
            self.num_tokens,
            self.token_print,
            self.valid_rows,
            self.num_blocks,
            self.terminal,
            self.shared,
            self.transaction,
            self.ending,
            self.dispatched,
        ):
            column.put(slot, 0)
        self.free.push_one(slot)
