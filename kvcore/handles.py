"""Block handles as arrays: what a receipt names, expanded only where somebody reads it.

Invariant: a `BlockHandles` is a frozen sequence of `BlockHandle`; it owns its arrays and is equal to any
sequence of the same handles.
Source: contracts K048, K074.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from .commands import BlockHandle
from .digest import Array


class BlockHandles(Sequence[BlockHandle]):
    """Handles of one pool; `parts` is, for each cache group, (block, generation) int64 [n, 2]."""

    __slots__ = ("_expanded", "_parts", "_pool")

    def __init__(self, pool: str, parts: tuple[Array, ...]) -> None:
        self._pool = pool
        self._parts = parts
        self._expanded: tuple[BlockHandle, ...] | None = None

    def blocks(self, group: int = 0) -> Array:
        """Block ids of one group, int64 [n]."""
        return self._parts[group][:, 0]

    @overload
    def __getitem__(self, index: int) -> BlockHandle: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[BlockHandle, ...]: ...
    def __getitem__(self, index: int | slice) -> BlockHandle | tuple[BlockHandle, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[BlockHandle]:
        return iter(self._all())

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _all(self) -> tuple[BlockHandle, ...]:
        if self._expanded is None:
            self._expanded = tuple(
                [
                    BlockHandle(self._pool, group, block, generation)
                    for group, part in enumerate(self._parts)
                    for block, generation in part.tolist()
                ]
            )
        return self._expanded
