"""Descriptors: what a group's pool says about its blocks.

Owns the map from block id to pool slot and valid rows, under one pool generation. Invariant: no two blocks of
a group share a slot; a block without a descriptor is unknown, not at slot zero.
Source: contracts K031, K038; 0x03D.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .address_errors import SlotReuse
from .checked import SLOT_ID_LIMIT, Array, checked_array, checked_int, same_length
from .contract_errors import IdOutOfRange


class DescriptorTable:
    """Blocks of one group: `block_ids`, `slots` and `valid_rows` int [blocks].

    Raises: SlotReuse, IdOutOfRange (more valid rows than a block has), LengthMismatch, bad input.
    """

    def __init__(
        self,
        group: str,
        pool_generation: int,
        block_size: int,
        block_ids: Sequence[int] | Array,
        slots: Sequence[int] | Array,
        valid_rows: Sequence[int] | Array,
    ) -> None:
        self.group = group
        self.pool_generation = checked_int("pool_generation", pool_generation)
        ids = checked_array("block_ids", block_ids, limit=SLOT_ID_LIMIT)
        places = checked_array("slots", slots, limit=SLOT_ID_LIMIT)
        rows = checked_array(
            "valid_rows", valid_rows, limit=checked_int("block_size", block_size, least=1) + 1
        )
        same_length("slots", len(ids), places)
        same_length("valid_rows", len(ids), rows)
        order = np.argsort(ids, kind="stable")
        self._ids, self._slots, self._rows = ids[order], places[order], rows[order]
        repeated = np.flatnonzero(self._ids[1:] == self._ids[:-1])
        if len(repeated):
            raise IdOutOfRange("block_ids (named twice)", int(self._ids[repeated[0]]), len(ids))
        self._check_slots()

    def lookup(self, blocks: Array) -> tuple[Array, Array, Array]:
        """Slots, valid rows and a mask of the known ones, [blocks]; numbers of unknown ones mean nothing."""
        if not len(self._ids):
            nothing = np.zeros(len(blocks), dtype=np.int64)
            return nothing, nothing, np.zeros(len(blocks), dtype=bool)
        at = np.minimum(np.searchsorted(self._ids, blocks), len(self._ids) - 1)
        return self._slots[at], self._rows[at], self._ids[at] == blocks

    def _check_slots(self) -> None:
        order = np.argsort(self._slots, kind="stable")
        sorted_slots = self._slots[order]
        shared = np.flatnonzero(sorted_slots[1:] == sorted_slots[:-1])
        if len(shared):
            slot = int(sorted_slots[shared[0]])
            owners = tuple(self._ids[self._slots == slot].tolist())
            raise SlotReuse(self.group, slot, owners)
