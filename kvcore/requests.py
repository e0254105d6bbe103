"""Request slots: tokens, block tables of each cache group, valid rows and pins, one record a slot.

Invariant: slot generations rise when a slot is given out (and when an admission is aborted); rows [0,
valid_rows) have K/V, tokens [valid_rows, num_tokens) are known but not computed; at most one step of a
request is in flight. Table cells beyond `num_blocks` are 0 and mean nothing; the first `firsts` cells of a window
group are `loops.GONE`: their blocks left the window, and nothing reads them.
Source: LEDGER "In flight"; contracts K032, K053, K075, K211.
"""

from __future__ import annotations

import msgspec
import numpy as np

from . import loops
from .columns import Cells, Digested, IdStack, Records
from .commands import GroupSpec, RequestHandle, Scope
from .digest import Array, as_signed
from .errors import StaleRequestGeneration
from .pool import Sums

RELEASE_REASONS = ("finish", "cancel", "preempt", "revoke", "error")
_CLEARED = (
    loops.ACTIVE,
    loops.SCOPE,
    loops.NUM_TOKENS,
    loops.TOKEN_PRINT,
    loops.VALID,
    loops.TERMINAL,
    loops.SHARED,
    loops.TRANSACTION,
    loops.DISPATCHED,
    loops.ENDING,
    loops.CUT,
    loops.BRANCH,
)


class RequestView(msgspec.Struct, frozen=True):
    """One request as a value. `reserved_rows` is what its tables have room for."""

    handle: RequestHandle
    scope: Scope
    num_tokens: int
    valid_rows: int
    reserved_rows: int
    num_blocks: int
    in_flight: bool


class RequestTable:
    """Slots [0, max_requests). `tables`, `num_blocks` and `table_cells` are those of cache group 0."""

    def __init__(
        self, max_requests: int, max_model_len: int, groups: tuple[GroupSpec, ...], sums: Sums
    ) -> None:
        self.max_requests = max_requests
        self.max_model_len = max_model_len
        self._sums = sums
        fields = group_field(len(groups))
        records = Records("request", max_requests, fields)
        self.records = records
        committed, machine = sums.committed, sums.machine
        self.active = records.column(loops.ACTIVE, "active", committed)
        self.scope = records.column(loops.SCOPE, "scope", committed)
        self.num_tokens = records.column(loops.NUM_TOKENS, "num_tokens", committed)
        self.token_print = records.column(loops.TOKEN_PRINT, "token_print", committed, unsigned=True)
        self.valid_rows = records.column(loops.VALID, "valid_rows", committed)
        self.generation = records.column(loops.SLOT_GENERATION, "generation", machine)
        self.terminal = records.column(loops.TERMINAL, "terminal", machine)
        self.shared = records.column(loops.SHARED, "shared", machine)
        self.transaction = records.column(loops.TRANSACTION, "transaction", machine)
        self.dispatched = records.column(loops.DISPATCHED, "dispatched", machine)
        self.flight_step = records.column(loops.FLIGHT_STEP, "flight_step", machine)
        self.flight_row = records.column(loops.FLIGHT_ROW, "flight_row", machine)
        self.flight_count = records.column(loops.FLIGHT_COUNT, "flight_count", machine)
        self.ending = records.column(loops.ENDING, "ending", machine)
        self.cut = records.column(loops.CUT, "cut", machine)
        self.branch = records.column(loops.BRANCH, "branch", machine)
        numbers = range(len(groups))
        held, source, first = [[group_field(g, part) for g in numbers] for part in range(loops.GROUP_STRIDE)]
        self.blocks = [records.column(held[g], f"num_blocks{g}", committed) for g in numbers]
        self.sources = [records.column(source[g], f"source{g}", machine) for g in numbers]
        self.firsts = [records.column(first[g], f"first{g}", committed) for g in numbers]
        self.num_blocks = self.blocks[0]
        self.free = IdStack("request.free", max_requests, 0, machine)
        self.widths = [-(-max_model_len // group.block_size) for group in groups]
        self.cells = [
            Cells(f"request.table{g}", max_requests * width, committed) for g, width in enumerate(self.widths)
        ]
        self.adopt_tables()
        # One column more than the context: the last sampled token never gets K/V.
        self.tokens: Array = np.zeros((max_requests, max_model_len + 1), dtype=np.int32)
        self.marks: Array = np.zeros(max_requests, dtype=np.int64)
        self._lanes = self._lanes_of_fields(fields)
        self._cleared: Array = np.array([*_CLEARED, *held, *first], dtype=np.int64)
        self._spaces: Array = np.array([records.space, self.free.column.space], dtype=np.uint64)
        opened = [*range(loops.ACTIVE, loops.TRANSACTION + 1), *held]
        self._opened: Array = np.array(opened, dtype=np.int64)

    def adopt_tables(self) -> None:
        """Views tables [max_requests, width] into the cells as they lie now."""
        self.all_tables: list[Array] = [
            cells.array.reshape(self.max_requests, width)
            for cells, width in zip(self.cells, self.widths, strict=True)
        ]
        self.tables = self.all_tables[0]

    def parts(self) -> list[Digested]:
        """Every array that has a share in a digest."""
        return [self.records, *self.cells, self.free.column]

    def slot_of(self, handle: RequestHandle) -> int:
        """The slot of a running request. Raises: StaleRequestGeneration, nothing changed."""
        slot = handle.slot
        if 0 <= slot < self.max_requests:
            record = self.records.cells[slot]
            if record[loops.ACTIVE] and int(record[loops.SLOT_GENERATION]) == handle.generation:
                return slot
        raise StaleRequestGeneration(slot, handle.generation)

    def handle(self, slot: int) -> RequestHandle:
        return RequestHandle(slot, self.generation.array.item(slot))

    def table(self, slot: int, group: int = 0) -> Array:
        """The request's blocks of one group in logical order, int64 copy, without those that left a window."""
        first, held = int(self.firsts[group].array[slot]), int(self.blocks[group].array[slot])
        return self.all_tables[group][slot, first:held].astype(np.int64)

    def pages(self, slot: int, first: int, end: int, group: int) -> Array:
        """Cells [first, end) of one group's table, int64 copy; `loops.GONE` where the block left the window."""
        return self.all_tables[group][slot, first:end].astype(np.int64)

    def put(self, slot: int, fields: dict[int, int]) -> None:
        """Writes several fields (numbers of `loops`) of one slot."""
        self.put_fields(
            slot, np.array([*fields], dtype=np.int64), np.array([*fields.values()], dtype=np.int64)
        )

    def put_fields(self, slot: int, fields: Array, values: Array) -> None:
        """Writes fields int64 [n] of one slot."""
        loops.put_record(
            self.records.cells, slot, fields, values, self._lanes, self.records.space, self._sums.all
        )

    def open(self, values: list[int], tokens: Array, weights: Array) -> int:
        """Gives out a slot with its tokens; `values` are of fields ACTIVE to TRANSACTION, then each group's blocks.

        Those of the token print and the slot's generation are filled in here.
        """
        records, ids = self.records, self.free
        ids.count -= 1
        return int(
            loops.open_request(
                records.cells,
                self._opened,
                np.array(values, dtype=np.int64),
                self._lanes,
                tokens,
                self.tokens,
                weights,
                ids.column.array,
                ids.count,
                self._spaces,
                self._sums.all,
            )
        )

    def set_tokens(self, slot: int, count: int, token_print: int) -> None:
        """Cuts or extends the known tokens; the print is theirs."""
        self.put(slot, {loops.NUM_TOKENS: count, loops.TOKEN_PRINT: as_signed(token_print)})

    def clear(self, slot: int) -> None:
        """Empties the slot, whose tables are empty, and gives it back; its generation stays for the fence."""
        self.tokens[slot, : self.num_tokens.array.item(slot)] = 0
        records, ids = self.records, self.free
        loops.close_record(
            records.cells,
            slot,
            self._cleared,
            self._lanes,
            ids.column.array,
            ids.count,
            records.space,
            ids.column.space,
            self._sums.all,
        )
        ids.count += 1

    def _lanes_of_fields(self, fields: int) -> Array:
        """First lane of each field's digest, int64 [fields]."""
        lanes = np.full(fields, 2, dtype=np.int64)
        lanes[[loops.ACTIVE, loops.SCOPE, loops.NUM_TOKENS, loops.TOKEN_PRINT, loops.VALID]] = 0
        lanes[loops.GROUP_FIELDS + loops.HELD :: loops.GROUP_STRIDE] = 0
        lanes[loops.GROUP_FIELDS + loops.FIRST :: loops.GROUP_STRIDE] = 0
        return lanes


def group_field(group: int, part: int = loops.HELD) -> int:
    """Number of one of a group's fields in a request's record."""
    return loops.GROUP_FIELDS + loops.GROUP_STRIDE * group + part
