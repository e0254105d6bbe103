"""The fleet a revocation acts on, over Ray actor handles.

Owns the handles of replicas, workers, coordinator and gateways. It carries calls and turns a lost actor into
``FleetUnreachable``; it decides nothing (the order of a revocation is namespace/revocation.py's).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

import msgspec
from ray.exceptions import RayActorError, RayTaskError

from copyhold.namespace.errors import FleetUnreachable
from copyhold.namespace.records import GatewayAcknowledgement, RankEvidence
from copyhold.namespace.sessions import SessionStore

_A = TypeVar("_A")


class RayFleet:
    """``namespace.revocation.Fleet`` over actors."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self._replicas: dict[str, Any] = {}
        self._workers: list[Any] = []
        self._coordinator: Any = None
        self._gateways: dict[str, Any] = {}

    def attach(self, replicas: dict[str, Any], workers: list[Any], coordinator: Any) -> None:
        """Replicas by incarnation, their workers, and the coordinator."""
        self._replicas.update(replicas)
        self._workers = list(workers)
        self._coordinator = coordinator

    def attach_gateway(self, name: str, gateway: Any) -> None:
        """One more gateway."""
        self._gateways[name] = gateway

    # -- revocation ---------------------------------------------------------------------------------------------

    async def incarnations(self) -> Sequence[str]:
        """Incarnations that can be reached."""
        return tuple(self._replicas)

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

    async def drop_routes(self, namespace: str, generation_new: int) -> None:
        """Forget routing entries below the floor."""
        await _answered("coordinator", self._coordinator.drop_routes.remote(namespace, generation_new))

    async def close_streams(self, namespace: str, generation_new: int) -> tuple[GatewayAcknowledgement, ...]:
        """Every gateway's word that no stream below the floor is open."""

        async def close(name: str, gateway: Any) -> GatewayAcknowledgement:
            closed = await _answered(name, gateway.close_streams.remote(namespace, generation_new))
            return GatewayAcknowledgement(name, closed, time.time())

        return tuple(await asyncio.gather(*(close(name, gw) for name, gw in self._gateways.items())))

    async def delete_session_state(self, namespace: str, generation: int) -> None:
        """Delete session records of a generation and rewrite their store's file."""
        await asyncio.to_thread(self._sessions.delete_generation, namespace, generation)

    # -- operator -----------------------------------------------------------------------------------------------

    async def replica_status(self) -> list[dict[str, Any]]:
        """Status of every replica; a lost one says so."""

        async def status(incarnation: str, replica: Any) -> dict[str, Any]:
            try:
                return await _answered(incarnation, replica.status.remote())
            except FleetUnreachable as error:
                return {"incarnation": incarnation, "serving": False, "failure": error.detail}

        return list(
            await asyncio.gather(*(status(name, replica) for name, replica in self._replicas.items()))
        )

    async def worker_status(self) -> list[dict[str, Any]]:
        """Position of every rank; a lost one says so."""

        async def status(number: int, worker: Any) -> dict[str, Any]:
            try:
                return msgspec.to_builtins(await _answered(f"rank {number}", worker.status.remote()))
            except FleetUnreachable as error:
                return {"rank": number, "failure": error.detail}

        return list(await asyncio.gather(*(status(n, worker) for n, worker in enumerate(self._workers))))

    async def coordinator_status(self) -> dict[str, Any]:
        """Size and version of the routing index."""
        try:
            return await _answered("coordinator", self._coordinator.status.remote())
        except FleetUnreachable as error:
            return {"failure": error.detail}

    async def pools(self) -> list[dict[str, Any]]:
        """Gauges of every replica."""
        return [await self._ask(incarnation, "pool") for incarnation in self._replicas]

    async def audit_kv(self, namespace: str, samples: int) -> list[dict[str, Any]]:
        """Every rank's comparison, over all replicas."""
        found = [
            await self._ask(incarnation, "audit_kv", namespace, samples) for incarnation in self._replicas
        ]
        return [rank for ranks in found for rank in ranks]

    async def drain(self) -> list[dict[str, Any]]:
        """Stop admission everywhere."""
        return [await self._ask(incarnation, "drain") for incarnation in self._replicas]

    async def _ask(self, incarnation: str, method: str, *arguments: Any) -> Any:
        replica = self._replicas.get(incarnation)
        if replica is None:
            raise FleetUnreachable(incarnation, "no such replica is attached")
        return await _answered(incarnation, getattr(replica, method).remote(*arguments))


async def _answered(member: str, call: Awaitable[_A]) -> _A:
    """The answer of an actor call. Raises ``FleetUnreachable`` for a dead actor and for a call that failed on it."""
    try:
        return await call
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        raise FleetUnreachable(member, f"{type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise FleetUnreachable(member, type(error).__name__) from error
