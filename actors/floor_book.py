"""The floors of namespaces on one replica, and what the pool did around their last rises.

Owns which scopes are below a floor, for the scheduler. Invariant: floors only rise; facts are of the last rise of each
namespace, and count only requests below it.
Source: docs/isolation.md; contract K181.
"""

from __future__ import annotations

import msgspec

from copyhold.kvcore.commands import Scope


class FloorFacts(msgspec.Struct):
    """Free blocks around the last rise of a namespace's floor.

    ``grown_blocks`` is what requests below the floor still took before they were ended.
    """

    generation: int
    free_blocks_before: int
    free_blocks_after: int
    grown_blocks: int = 0


class FloorBook:
    """Floors and facts by namespace."""

    def __init__(self) -> None:
        self._facts: dict[str, FloorFacts] = {}

    def is_rise(self, namespace: str, generation: int) -> bool:
        """Whether a floor at ``generation`` is higher than the present one."""
        facts = self._facts.get(namespace)
        return generation > (0 if facts is None else facts.generation)

    def rise(self, namespace: str, facts: FloorFacts) -> None:
        """The namespace's floor is at the facts' generation now."""
        assert self.is_rise(namespace, facts.generation), (namespace, facts.generation)
        self._facts[namespace] = facts

    def above(self, scope: Scope) -> bool:
        """Whether the namespace's floor is above the scope: it was revoked."""
        facts = self._facts.get(scope.namespace)
        return facts is not None and scope.generation < facts.generation

    def note_growth(self, scope: Scope, blocks: int) -> None:
        """A request took so many blocks; counted if it is below the floor."""
        if self.above(scope):
            self._facts[scope.namespace].grown_blocks += blocks

    def note_release(self, scope: Scope, free_blocks: int) -> None:
        """A request ended and left so many blocks free; noted if it was below the floor."""
        if self.above(scope):
            self._facts[scope.namespace].free_blocks_after = free_blocks

    def facts(self) -> dict[str, FloorFacts]:
        """By namespace: the pool around its last rise of the floor."""
        return dict(self._facts)
