"""Namespaces with their floors, and the scopes that were ever admitted, as small ids.

Invariant: ids are given in the order of first use, which the log fixes; id 0 means "no scope". A scope is
revoked when its generation is below its namespace's floor, and floors only rise. Rows of ended scopes are
kept: a block may name them for as long as it holds their bytes.
Source: LEDGER "Commands", SECURITY "Revocation"; contracts K011, K012, K017, K181.
"""

from __future__ import annotations

import numpy as np

from .columns import Digested, Records
from .commands import Scope
from .digest import Array, bytes_fingerprint
from .errors import StaleNamespaceGeneration
from .pool import Sums

_FIRST_CAPACITY = 64


class ScopeTable:
    """Interned namespaces and scopes."""

    def __init__(self, sums: Sums) -> None:
        self._namespaces: dict[str, int] = {}
        self._ids: dict[Scope, int] = {}
        self._scopes: list[Scope] = []
        self._scope_namespace: list[int] = [0]
        self._namespace_records = Records("namespace", _FIRST_CAPACITY, 2)
        self._scope_records = Records("scope", _FIRST_CAPACITY, 1)
        self.floor = self._namespace_records.column(0, "floor", sums.committed)
        self.namespace_print = self._namespace_records.column(1, "print", sums.machine, unsigned=True)
        self.scope_print = self._scope_records.column(0, "print", sums.machine, unsigned=True)
        self.revoked: Array = np.zeros(_FIRST_CAPACITY, dtype=np.bool_)

    def parts(self) -> list[Digested]:
        """Every array that has a share in a digest."""
        return [self._namespace_records, self._scope_records]

    def floor_of(self, namespace: str) -> int:
        """The lowest generation that may be admitted; 0 where no floor was set."""
        id_ = self._namespaces.get(namespace)
        return 0 if id_ is None else int(self.floor.array[id_])

    def require_current(self, scope: Scope) -> None:
        """Raises: StaleNamespaceGeneration when the scope is revoked; nothing changes."""
        floor = self.floor_of(scope.namespace)
        if scope.generation < floor:
            raise StaleNamespaceGeneration(scope.namespace, scope.generation, floor)

    def find(self, scope: Scope) -> int:
        """The scope's id, 0 when it was never admitted."""
        return self._ids.get(scope, 0)

    def scope(self, scope_id: int) -> Scope:
        return self._scopes[scope_id - 1]

    def intern(self, scope: Scope) -> int:
        """The scope's id, a new one on first use."""
        known = self._ids.get(scope)
        if known is not None:
            return known
        id_ = len(self._scopes) + 1
        if id_ >= len(self.revoked):
            self._scope_records.grow(2 * id_)
            self.revoked = np.concatenate(
                [self.revoked, np.zeros(2 * id_ - len(self.revoked), dtype=np.bool_)]
            )
        self._ids[scope] = id_
        self._scopes.append(scope)
        self._scope_namespace.append(self.intern_namespace(scope.namespace))
        content = scope.generation.to_bytes(8, "little") + scope.namespace.encode() + b"\0" + scope.world
        self.scope_print.put(id_, bytes_fingerprint(content))
        return id_

    def intern_namespace(self, namespace: str) -> int:
        known = self._namespaces.get(namespace)
        if known is not None:
            return known
        id_ = len(self._namespaces) + 1
        if id_ >= len(self.floor.array):
            self._namespace_records.grow(2 * id_)
        self._namespaces[namespace] = id_
        self.namespace_print.put(id_, bytes_fingerprint(namespace.encode()))
        return id_

    def raise_floor(self, namespace: str, generation: int) -> Array:
        """Sets the floor; the ids of all scopes it revokes, those revoked before included (int64)."""
        self.floor.put(self.intern_namespace(namespace), generation)
        ids = self.below(namespace, generation)
        self.revoked[ids] = True
        return ids

    def below(self, namespace: str, generation: int) -> Array:
        """Ids of the namespace's scopes below a generation (int64)."""
        id_ = self._namespaces.get(namespace)
        found = [
            scope_id
            for scope_id, scope in enumerate(self._scopes, start=1)
            if self._scope_namespace[scope_id] == id_ and scope.generation < generation
        ]
        return np.array(found, dtype=np.int64)

    def all_namespaces(self) -> list[str]:
        """Names in order of first use."""
        return list(self._namespaces)

    def all_scopes(self) -> list[tuple[int, Scope]]:
        """(id, scope) in order of first use."""
        return list(enumerate(self._scopes, start=1))
