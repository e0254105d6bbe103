"""Request snapshots: one request's tables at one version, and what may follow them.

Owns the consistency of a snapshot with its groups' block sizes and the rule for growth. Invariant: every
group's table has ceil(context / block size) entries under one version; a successor is newer and moves no row
that was addressable before.
Source: contracts K032, K039; 0x03B, 0x03H.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .address_errors import (
    CrossGroupBundleMismatch,
    FrozenAddressChanged,
    StaleTableVersion,
    TableLengthDrift,
    TokenOutsideContext,
)
from .checked import SLOT_ID_LIMIT, Array, checked_array, checked_int
from .descriptors import DescriptorTable
from .placement import AddressManifest


class RequestSnapshot(msgspec.Struct, frozen=True):
    """Context length in tokens, and per group its table int64 [blocks] and the generation of its pool."""

    context_length: int
    table_version: int
    tables: tuple[Array, ...]
    pool_generations: tuple[int, ...]


def snapshot(
    manifest: AddressManifest,
    context_length: int,
    tables: Sequence[Sequence[int] | Array],
    versions: Sequence[int],
    pool_generations: Sequence[int],
) -> RequestSnapshot:
    """A snapshot whose groups agree. `versions` [groups]: the version each group's table was published under.

    Raises: CrossGroupBundleMismatch, TableLengthDrift, bad input.
    """
    names = tuple(group.layout.name for group in manifest.groups)
    published = tuple(checked_int("table_version", version) for version in versions)
    if len({len(names), len(tables), len(published), len(pool_generations)}) > 1 or len(set(published)) != 1:
        raise CrossGroupBundleMismatch(names, published)
    context = checked_int("context_length", context_length, limit=SLOT_ID_LIMIT)
    arrays = tuple(
        checked_array(name, table, limit=SLOT_ID_LIMIT) for name, table in zip(names, tables, strict=True)
    )
    for group, table in zip(manifest.groups, arrays, strict=True):
        expected = -(-context // group.layout.block_size)
        if len(table) != expected:
            raise TableLengthDrift(group.layout.name, context, expected, len(table))
        table.setflags(write=False)
    generations = tuple(checked_int("pool_generation", generation) for generation in pool_generations)
    return RequestSnapshot(context, published[0], arrays, generations)


def check_growth(
    manifest: AddressManifest,
    before: tuple[RequestSnapshot, Sequence[DescriptorTable]],
    after: tuple[RequestSnapshot, Sequence[DescriptorTable]],
) -> None:
    """`after` grew out of `before`: it is newer, sees all of it, and its rows stay where they were.

    Raises: StaleTableVersion, TokenOutsideContext, FrozenAddressChanged.
    """
    (old, old_descriptors), (new, new_descriptors) = before, after
    if new.table_version <= old.table_version:
        raise StaleTableVersion(new.table_version, old.table_version + 1)
    if new.context_length < old.context_length:
        raise TokenOutsideContext(old.context_length - 1, new.context_length)
    for index, group in enumerate(manifest.groups):
        kept = min(len(old.tables[index]), len(new.tables[index]))
        old_slots, _, _ = old_descriptors[index].lookup(old.tables[index][:kept])
        new_slots, _, known = new_descriptors[index].lookup(new.tables[index][:kept])
        moved = np.flatnonzero((old_slots != new_slots) | ~known)
        if len(moved):
            at = int(moved[0])
            raise FrozenAddressChanged(group.layout.name, at, int(old_slots[at]), int(new_slots[at]))
