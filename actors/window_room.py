"""Which blocks of sliding windows make room: those that no boundary needs first, boundaries that stay last.

Owns the choice within one line of evictable window blocks (``Ledger.evictable_window_blocks``), none of its facts. Order: blocks
outside every kept window, then whole edges by the evictor's policy, then the windows of edges that stay. Invariant: nothing is
named that lies on a protected edge, so a hit that is about to be admitted keeps what it reads (K106, K122).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from copyhold.kvcore.commands import BlockHandle, NodeHandle
from copyhold.kvcore.ledger import Ledger

from .errors import NoRoom

NO_WINDOWS: Mapping[int, int] = MappingProxyType({})


def windows_fit(ledger: Ledger, needs: Mapping[int, int]) -> bool:
    """Whether every group has the blocks it needs free already."""
    return all(needed <= ledger.gauge(group).free for group, needed in needs.items())


def choose_trim(
    ledger: Ledger,
    needs: Mapping[int, int],
    protected: frozenset[NodeHandle],
    taken: Callable[[], list[int]],
    take_edge: Callable[[], bool],
) -> tuple[BlockHandle, ...]:
    """Blocks to trim so that each group gets the blocks it needs, and maybe edges, by ``take_edge``.

    ``taken`` names the edges that go anyway. Raises: ``NoRoom``.
    """
    trim: list[BlockHandle] = []
    staying = [handle.node for handle in protected]
    for line in ledger.evictable_window_blocks():
        missing = needs.get(line.group, 0) - ledger.gauge(line.group).free
        if missing <= 0:
            continue
        usable = np.flatnonzero(~np.isin(line.nodes, staying))
        outside = int(np.count_nonzero(usable < line.outside))
        chosen, rest = usable[: min(missing, outside)], usable[min(missing, outside) :]
        kept = rest[~np.isin(line.nodes[rest], taken())]
        while len(chosen) + len(rest) - len(kept) < missing and take_edge():
            kept = rest[~np.isin(line.nodes[rest], taken())]
        still = max(0, missing - len(chosen) - (len(rest) - len(kept)))
        if still > len(kept):
            raise NoRoom(missing, missing - still + len(kept))
        for at in (*chosen.tolist(), *kept[:still].tolist()):
            trim += line.handles(at, at + 1)
    return tuple(trim)
