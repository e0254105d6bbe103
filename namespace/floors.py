"""Floors: the least generation of each namespace that may still be served, and what is disabled.

Invariant: merging never lowers a generation, whatever order messages arrive in; of what can be switched both
ways (disabled keys and namespaces) the higher sequence wins. Namespaces not named have floor 1. Contracts:
K011, K181.
"""

from __future__ import annotations

import msgspec

FIRST_GENERATION = 1


class Floors(msgspec.Struct, frozen=True):
    """A sequence-numbered snapshot; ``sequence`` is the audit sequence it was taken at."""

    sequence: int = 0
    generations: dict[str, int] = {}
    disabled_keys: frozenset[str] = frozenset()
    disabled_namespaces: frozenset[str] = frozenset()

    def generation(self, namespace: str) -> int:
        """The least generation of ``namespace`` that may be served."""
        return self.generations.get(namespace, FIRST_GENERATION)

    def raised(self, namespace: str, generation: int) -> Floors:
        """These floors with one namespace at least at ``generation``; the sequence stays."""
        generations = dict(self.generations)
        generations[namespace] = max(self.generation(namespace), generation)
        return msgspec.structs.replace(self, generations=generations)

    def merged(self, other: Floors) -> Floors:
        """Both together: the higher generation of each namespace, switches as the later snapshot has them."""
        later = other if other.sequence > self.sequence else self
        generations = dict(self.generations)
        for namespace, generation in other.generations.items():
            generations[namespace] = max(generations.get(namespace, FIRST_GENERATION), generation)
        return Floors(later.sequence, generations, later.disabled_keys, later.disabled_namespaces)

    def admits(self, namespace: str, generation: int) -> bool:
        """Whether work of that generation may start."""
        return generation >= self.generation(namespace) and namespace not in self.disabled_namespaces
