"""Pool sizing: blocks of each cache group from stated memory, the model and a stated split.

Owns the one computation of how many blocks there are. Invariant: exact and repeatable: it reads arguments only,
never the machine, so a neighbour process that takes or returns memory changes nothing; the count of a group is
the minimum over the ranks; what cannot be met is refused with the missing bytes, never sized smaller.
Source: contracts K018, K019, K220 (budget terms); LEDGER "Two identities" (minimum over the ranks), "Virtual
pages" (rounding).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from .byte_errors import (
    MemoryNotFree,
    NegativeAvailableMemory,
    PoolBelowMinimum,
    RanksDisagree,
    SplitNotWhole,
)
from .byte_ledger import group_row, row_bytes
from .checked import checked_int, checked_slots
from .contract_errors import EmptyInput, IdOutOfRange, WrongDtype
from .manifests import GroupLayout


class GroupDemand(msgspec.Struct, frozen=True):
    """What one block of a group costs on one rank, before rounding to the backend's granularity."""

    name: str
    block_size: int
    row_bytes: int

    def __post_init__(self) -> None:
        checked_int("block_size", self.block_size, least=1)
        checked_int("row_bytes", self.row_bytes, least=1)


class RankMemory(msgspec.Struct, frozen=True):
    """One rank's statement: a share of memory in total, what it holds already, what is free now.

    `free_bytes` is only compared with the need; it never decides the size.
    """

    total_bytes: int
    share: Fraction
    held_bytes: int
    free_bytes: int


class GroupSizing(msgspec.Struct, frozen=True):
    """Blocks of one group: what each rank could afford, and the minimum, which all use."""

    name: str
    block_size: int
    num_blocks: int
    affordable_blocks: tuple[int, ...]
    block_bytes: tuple[int, ...]


class PoolSizing(msgspec.Struct, frozen=True):
    """The sizes of all groups; on each rank budget = used + unused bytes."""

    groups: tuple[GroupSizing, ...]
    budget_bytes: tuple[int, ...]
    used_bytes: tuple[int, ...]
    unused_bytes: tuple[int, ...]

    def blocks(self) -> dict[str, int]:
        """Blocks by group."""
        return {group.name: group.num_blocks for group in self.groups}


def group_demand(layout: GroupLayout) -> GroupDemand:
    """The demand of one rank's group; its `num_slots` plays no part."""
    return GroupDemand(layout.name, layout.block_size, row_bytes(group_row(layout)).value)


def kv_budget_bytes(rank: int, memory: RankMemory) -> int:
    """floor(total x share) - held. Raises: NegativeAvailableMemory, MemoryNotFree, bad input."""
    total = checked_int("total_bytes", memory.total_bytes, least=1)
    held = checked_int("held_bytes", memory.held_bytes)
    free = checked_int("free_bytes", memory.free_bytes)
    if not isinstance(memory.share, Fraction):
        raise WrongDtype("share", type(memory.share).__name__)
    if not 0 < memory.share <= 1:
        raise IdOutOfRange(
            "share (numerator, limit: denominator)", memory.share.numerator, memory.share.denominator
        )
    share = total * memory.share.numerator // memory.share.denominator
    budget = share - held
    if budget < 0:
        raise NegativeAvailableMemory(rank, share, held, -budget)
    if budget > free:
        raise MemoryNotFree(rank, budget, free, budget - free)
    return budget


def size_pools(
    budgets_bytes: Sequence[int],
    demands: Sequence[Sequence[GroupDemand]],
    split: Mapping[str, Fraction],
    required_rows: int = 1,
    granularity_bytes: int = 1,
) -> PoolSizing:
    """Blocks of each group. `budgets_bytes` and `demands` are by rank; `split` gives each group's share.

    Every rank must afford `required_rows` (a longest request, say) in every group.

    Raises: SplitNotWhole, RanksDisagree, PoolBelowMinimum, SlotIdOverflow, EmptyInput, bad input.
    """
    names = _checked_split(demands, split)
    if len(budgets_bytes) != len(demands):
        raise RanksDisagree(len(demands), f"{len(budgets_bytes)} budgets", f"{len(demands)} demands")
    budgets = tuple(checked_int("budget_bytes", budget) for budget in budgets_bytes)
    rows = checked_int("required_rows", required_rows, least=1)
    groups = tuple(
        _size_group(at, budgets, demands, split[name], rows, granularity_bytes)
        for at, name in enumerate(names)
    )
    used = tuple(
        sum(group.num_blocks * group.block_bytes[rank] for group in groups) for rank in range(len(budgets))
    )
    unused = tuple(budget - spent for budget, spent in zip(budgets, used, strict=True))
    return PoolSizing(groups, budgets, used, unused)


def _checked_split(
    demands: Sequence[Sequence[GroupDemand]], split: Mapping[str, Fraction]
) -> tuple[str, ...]:
    """Names of the groups in their order; equal on all ranks."""
    if not demands or not demands[0]:
        raise EmptyInput("demands")
    shape = [(demand.name, demand.block_size) for demand in demands[0]]
    for rank, others in enumerate(demands):
        found = [(demand.name, demand.block_size) for demand in others]
        if found != shape:
            raise RanksDisagree(rank, repr(shape), repr(found))
    names = tuple(name for name, _ in shape)
    shares = tuple(split.values())
    for share in shares:
        if not isinstance(share, Fraction):
            raise WrongDtype("split", type(share).__name__)
    if sorted(split) != sorted(names) or sum(shares) != 1 or min(shares) <= 0:
        raise SplitNotWhole(
            names, tuple(f"{name}={share}" for name, share in split.items()), str(sum(shares))
        )
    return names


def _size_group(
    at: int,
    budgets: tuple[int, ...],
    demands: Sequence[Sequence[GroupDemand]],
    share: Fraction,
    required_rows: int,
    granularity_bytes: int,
) -> GroupSizing:
    grain = checked_int("granularity_bytes", granularity_bytes, least=1)
    page = demands[0][at].block_size
    required = -(-required_rows // page)
    block_bytes = tuple(-(-page * rank[at].row_bytes // grain) * grain for rank in demands)
    affordable: list[int] = []
    for rank, (budget, cost) in enumerate(zip(budgets, block_bytes, strict=True)):
        portion = budget * share.numerator // share.denominator
        blocks = portion // cost
        if blocks < required:
            name = demands[0][at].name
            raise PoolBelowMinimum(rank, name, required, blocks, required * cost - portion)
        affordable.append(blocks)
    checked_slots(min(affordable), page)
    return GroupSizing(demands[0][at].name, page, min(affordable), tuple(affordable), block_bytes)
