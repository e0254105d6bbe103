"""How many blocks of one pool each namespace may hold, and how many it holds.

Owns floors and ceilings and the count of blocks by namespace, taken from receipts. ``strict``: floor = ceiling for every
namespace, all of them together fit the pool, so no namespace's use changes what another one keeps. ``elastic``: who needs
room takes it from anybody's blocks above their floor; what that shows to a neighbour is said in docs/prefix-reuse.md.
Invariant: held blocks of all namespaces and free blocks sum to the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from .errors import InvalidRequest, PoolAllotted

Isolation = Literal["strict", "elastic"]
ISOLATIONS: tuple[str, ...] = get_args(Isolation)


class Share(msgspec.Struct, frozen=True):
    """Blocks of one namespace: others may not push it below ``floor_blocks``, it may not pass ``ceiling_blocks``."""

    floor_blocks: int
    ceiling_blocks: int


class ShareSettings(msgspec.Struct, frozen=True):
    """``share_blocks``: strict share of a namespace that ``named`` does not list."""

    isolation: Isolation = "elastic"
    share_blocks: int = 0
    named: Mapping[str, Share] = {}


def parse_shares(text: str, isolation: str) -> dict[str, Share]:
    """``"acme=128, bravo=64-256"``: a strict share, or floor and ceiling, in blocks. Raises: ValueError."""
    shares: dict[str, Share] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, blocks = part.partition("=")
        low, dash, high = blocks.partition("-")
        if (
            not equals
            or not name.strip()
            or not low.strip().isdecimal()
            or (dash and not high.strip().isdecimal())
        ):
            raise ValueError(f"{part!r} is neither NAMESPACE=BLOCKS nor NAMESPACE=FLOOR-CEILING")
        floor, ceiling = int(low), int(high) if dash else int(low)
        if name.strip() in shares:
            raise ValueError(f"{name.strip()} is named twice")
        if ceiling < 1 or floor > ceiling:
            raise ValueError(f"{part!r}: the floor is above the ceiling, or the ceiling is 0")
        if isolation == "strict" and floor != ceiling:
            raise ValueError(f"{part!r}: with strict isolation floor and ceiling are one number")
        shares[name.strip()] = Share(floor, ceiling)
    return shares


class Shares:
    """The books of one pool; changed by its scheduler only."""

    def __init__(self, settings: ShareSettings, total_blocks: int) -> None:
        self.strict = settings.isolation == "strict"
        self.total_blocks = total_blocks
        self._share_blocks = settings.share_blocks or total_blocks
        self._shares = dict(settings.named)
        self._held: dict[str, int] = {}

    @property
    def allotted_blocks(self) -> int:
        """Floors of all known namespaces."""
        return sum(share.floor_blocks for share in self._shares.values())

    def admit_namespace(self, namespace: str) -> None:
        """Give a namespace its share at its first request.

        Raises: ``PoolAllotted`` (strict, nothing left to give); nothing changed.
        """
        if namespace in self._shares:
            return
        if not self.strict:
            self._shares[namespace] = Share(0, self.total_blocks)
            return
        if self.allotted_blocks + self._share_blocks > self.total_blocks:
            raise PoolAllotted(self._share_blocks, self.total_blocks - self.allotted_blocks)
        self._shares[namespace] = Share(self._share_blocks, self._share_blocks)

    def check_fit(self, namespace: str, blocks: int) -> None:
        """Raises: ``InvalidRequest`` where so many blocks can never be given to the namespace."""
        share = self._shares[namespace]
        others = self.allotted_blocks - share.floor_blocks
        most = min(share.ceiling_blocks, self.total_blocks - others)
        if blocks > most:
            whose = "the pool" if most == self.total_blocks else "the namespace's share"
            raise InvalidRequest(
                f"the request can never fit {whose} of {most} blocks: it needs {blocks}", "prompt"
            )

    def is_open(self, namespace: str) -> bool:
        """Whether only the pool bounds what the namespace holds and what others may take from it."""
        share = self._shares.get(namespace)
        if share is None:
            return not self.strict
        return share.floor_blocks == 0 and share.ceiling_blocks == self.total_blocks and not self.strict

    def held(self, namespace: str) -> int:
        """Blocks that the namespace's requests and index hold, each counted once."""
        return self._held.get(namespace, 0)

    def all_held(self) -> dict[str, int]:
        """Blocks held, by namespace."""
        return dict(self._held)

    def take(self, namespace: str, blocks: int) -> None:
        """The ledger gave blocks to the namespace."""
        self._held[namespace] = self.held(namespace) + blocks

    def give_back(self, namespace: str, blocks: int) -> None:
        """Blocks of the namespace became free."""
        left = self.held(namespace) - blocks
        assert left >= 0, f"{namespace} gives back {blocks} blocks and holds {self.held(namespace)}"
        self._held[namespace] = left

    def ceiling(self, namespace: str) -> int:
        """Most blocks that the namespace may hold."""
        return self._shares[namespace].ceiling_blocks

    def room(self, namespace: str, free_blocks: int) -> int:
        """Blocks the namespace may still take without any eviction."""
        return min(free_blocks, self.ceiling(namespace) - self.held(namespace))

    def above_ceiling(self, namespace: str, more_blocks: int) -> int:
        """Blocks that the namespace must give up itself before it gets ``more_blocks``."""
        return max(0, self.held(namespace) + more_blocks - self._shares[namespace].ceiling_blocks)

    def above_floor(self, namespace: str) -> int:
        """Blocks that others may take from the namespace."""
        share = self._shares.get(namespace)
        return max(0, self.held(namespace) - (share.floor_blocks if share else 0))
