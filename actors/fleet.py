"""The fleet a revocation acts on, over Ray actors found by name.

It carries calls and turns a lost actor into ``FleetUnreachable``; it decides nothing (the order of a revocation is
namespace/revocation.py's) and remembers nothing that a restart would miss.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError

from copyhold.namespace.errors import FleetUnreachable
from copyhold.namespace.records import GatewayAcknowledgement, IncarnationRecord, RankEvidence
from copyhold.namespace.sessions import SessionStore

from .names import COORDINATOR, GATEWAY, worker_name


class RayFleet:
    """``namespace.revocation.Fleet`` over actors, found by name so that a restarted authority finds them again.

    ``members`` yields the incarnations that may still run, as the authority's store knows them.
    """

    def __init__(self, members: Callable[[], list[IncarnationRecord]], sessions: SessionStore) -> None:
        self._members = members
        self._sessions = sessions
        self._handles: dict[str, Any] = {}

    def _handle(self, name: str) -> Any:
        """The actor of that name. Raises ``FleetUnreachable`` when there is none."""
        if name not in self._handles:
            try:
                self._handles[name] = ray.get_actor(name)
            except ValueError as error:
                raise FleetUnreachable(name, "there is no such actor") from error
        return self._handles[name]

    async def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        """Call an actor. Raises ``FleetUnreachable`` when it is gone, or when the call failed on it."""
        try:
            return await getattr(self._handle(name), method).remote(*arguments)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise FleetUnreachable(name, f"{type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            self._handles.pop(name, None)
            raise FleetUnreachable(name, type(error).__name__) from error

    async def _ask_each(self, names: Sequence[str], method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call every actor at once; one that does not answer is reported as a failure."""

        async def one(name: str) -> dict[str, Any]:
            try:
                return msgspec.to_builtins(await self._ask(name, method, *arguments))
            except FleetUnreachable as error:
                return {"name": name, "serving": False, "failure": error.detail}

        return list(await asyncio.gather(*(one(name) for name in names)))

    def _replicas(self) -> list[str]:
        return [member.incarnation for member in self._members()]

    # -- revocation ---------------------------------------------------------------------------------------------

    async def incarnations(self) -> Sequence[str]:
        """Incarnations that can be reached now."""
        found = []
        for name in self._replicas():
            try:
                self._handle(name)
            except FleetUnreachable:
                continue
            found.append(name)
        return found

    async def advance_floor(self, incarnation: str, namespace: str, generation_new: int) -> None:
        """Fence older generations on one replica and all its ranks."""
        await self._ask(incarnation, "advance_floor", namespace, generation_new)

    async def end_requests(
        self, incarnation: str, namespace: str, generation_new: int, deadline_s: float
    ) -> int:
        """End what still runs below the floor, at the deadline at the latest; returns how many were ended."""
        return await self._ask(incarnation, "end_requests", namespace, generation_new, deadline_s)

    async def purge_evidence(
        self, incarnation: str, namespace: str, generation_new: int, nonce: str
    ) -> list[RankEvidence]:
        """Signed measurements of every rank of one replica."""
        return await self._ask(incarnation, "purge_evidence", namespace, generation_new, nonce)

    async def erase_logs(self, incarnation: str, namespace: str, generation_new: int) -> int:
        """Delete recorded logs that hold tokens of older generations; returns how many files went."""
        return await self._ask(incarnation, "erase_logs", namespace, generation_new)

    async def drop_routes(self, namespace: str, generation_new: int) -> None:
        """Forget routing entries below the floor."""
        await self._ask(COORDINATOR, "drop_routes", namespace, generation_new)

    async def close_streams(self, namespace: str, generation_new: int) -> tuple[GatewayAcknowledgement, ...]:
        """The gateway's word that no stream below the floor is open."""
        closed = await self._ask(GATEWAY, "close_streams", namespace, generation_new)
        return (GatewayAcknowledgement(GATEWAY, closed, time.time()),)

    async def delete_session_state(self, namespace: str, generation: int) -> None:
        """Delete session records of a generation and rewrite their store's file."""
        await asyncio.to_thread(self._sessions.delete_generation, namespace, generation)

    async def refresh(self) -> None:
        """Have every replica take the floors in force now; one that cannot be reached takes them with its renewal."""
        await self._ask_each(self._replicas(), "refresh")

    # -- operator -----------------------------------------------------------------------------------------------

    async def replica_status(self) -> list[dict[str, Any]]:
        """Status of every replica; a lost one says so."""
        return await self._ask_each(self._replicas(), "status")

    async def metrics(self, members: Sequence[IncarnationRecord]) -> list[dict[str, Any]]:
        """Figures of each replica with those of its ranks; what is lost says so. The caller names the members, since the
        store that knows them may be away."""
        figures = await self._ask_each([member.incarnation for member in members], "metrics")
        for member, found in zip(members, figures, strict=True):
            names = [worker_name(member.incarnation, rank) for rank in range(member.ranks)]
            found["replica"] = member.replica
            found["ranks"] = await self._ask_each(names, "status")
        return figures

    async def worker_status(self) -> list[dict[str, Any]]:
        """Position of every rank; a lost one says so."""
        names = [worker_name(m.incarnation, rank) for m in self._members() for rank in range(m.ranks)]
        return await self._ask_each(names, "status")

    async def coordinator_status(self) -> dict[str, Any]:
        """Size and version of the routing index."""
        return (await self._ask_each([COORDINATOR], "status"))[0]

    async def pools(self) -> list[dict[str, Any]]:
        """Gauges of every replica. Raises ``FleetUnreachable``."""
        return [await self._ask(incarnation, "pool") for incarnation in self._replicas()]

    async def audit_kv(self, namespace: str, samples: int) -> list[dict[str, Any]]:
        """Every rank's comparison, over all replicas. Raises ``FleetUnreachable``."""
        found = [await self._ask(name, "audit_kv", namespace, samples) for name in self._replicas()]
        return [rank for ranks in found for rank in ranks]

    async def audit_ledgers(self) -> dict[str, list[str]]:
        """By actor: what an audit of its ledger found wrong. Raises ``FleetUnreachable``."""
        found: dict[str, list[str]] = {}
        for member in self._members():
            names = [member.incarnation, *(worker_name(member.incarnation, r) for r in range(member.ranks))]
            for name in names:
                found[name] = await self._ask(name, "audit_ledger")
        return found

    async def drain(self) -> list[dict[str, Any]]:
        """Stop admission everywhere; a lost replica admits nothing anyway and says so."""
        return await self._ask_each(self._replicas(), "drain")
