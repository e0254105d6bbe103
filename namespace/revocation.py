"""Revocation: what is done between a revocation's persisted states, and in which order.

Invariant: nothing is done for a state before that state is durable, and every act may be repeated, so a crash
at any point resumes at the last durable state and ends in the same certificate. A member that cannot be
reached, or whose evidence does not hold, is fenced: never renewed, and reported only after its lease and the
skew have passed. Contracts: K181; source: docs/isolation.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from . import records as rec
from .authority import Authority
from .certificate import Certificate, EvidenceQuestion, member_faults
from .errors import FleetUnreachable, RevocationStalled
from .revocation_book import RevocationBook, unsettled

_A = TypeVar("_A")

CALL_TIMEOUT_S = 30.0
Sleep = Callable[[float], Awaitable[None]]


class Fleet(Protocol):
    """What a revocation asks of replicas, gateways, routing and sessions.

    Every method may be called again for the same generation. A member that cannot be reached is reported as
    ``FleetUnreachable``; any other exception is a bug and stops the revocation at its durable state.
    """

    async def incarnations(self) -> Sequence[str]:
        """Incarnations that answer now."""
        ...

    async def advance_floor(self, incarnation: str, namespace: str, generation_new: int) -> None:
        """Refuse generations below ``generation_new`` and drop their index roots."""
        ...

    async def end_requests(
        self, incarnation: str, namespace: str, generation_new: int, deadline_s: float
    ) -> int:
        """Give older requests ``deadline_s`` seconds, then end them as revoked; returns how many ended."""
        ...

    async def close_streams(
        self, namespace: str, generation_new: int
    ) -> Sequence[rec.GatewayAcknowledgement]:
        """Close streams of older generations on every gateway; one acknowledgement from each."""
        ...

    async def drop_routes(self, namespace: str, generation_new: int) -> None:
        """Forget routes of older generations."""
        ...

    async def purge_evidence(
        self, incarnation: str, namespace: str, generation_new: int, nonce: str
    ) -> Sequence[rec.RankEvidence]:
        """Release and zero the blocks of older generations on every rank; signed evidence of each."""
        ...

    async def erase_logs(self, incarnation: str, namespace: str, generation_new: int) -> int:
        """Delete recorded ledger logs that hold tokens of older generations; returns how many files went."""
        ...

    async def delete_session_state(self, namespace: str, generation: int) -> None:
        """Delete session records of ``generation`` and older and rewrite the session store's file."""
        ...


class Revoker:
    """Carries revocations out; one per authority."""

    def __init__(
        self,
        authority: Authority,
        fleet: Fleet,
        *,
        sleep: Sleep = asyncio.sleep,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ):
        self._authority = authority
        self._fleet = fleet
        self._book = RevocationBook(authority)
        self._sleep = sleep
        self._call_timeout_s = call_timeout_s
        self._running: dict[str, asyncio.Task[Certificate]] = {}

    async def revoke(self, namespace: str, deadline_s: float, *, actor: str = "operator") -> Certificate:
        """Revoke the namespace's present generation; joins a revocation already under way.

        Raises: NamespaceUnknown (nothing changed); RevocationStalled (the namespace stays closed until this
        is called again or ``resume_revocations`` runs).
        """
        task = self._running.get(namespace)
        if task is None:
            record = self._book.begin(namespace, deadline_s, actor)
            task = self._start(record)
        return await asyncio.shield(task)

    async def resume_revocations(self) -> list[Certificate]:
        """Finish every revocation that a crash left under way. Raises: RevocationStalled."""
        tasks = [
            self._running.get(record.namespace) or self._start(record) for record in self._book.pending()
        ]
        return list(await asyncio.gather(*tasks))

    def _start(self, record: rec.RevocationRecord) -> asyncio.Task[Certificate]:
        task = asyncio.create_task(self._run(record))
        self._running[record.namespace] = task
        task.add_done_callback(lambda _: self._running.pop(record.namespace, None))
        return task

    async def _run(self, record: rec.RevocationRecord) -> Certificate:
        if record.state != "stopped":
            self._authority.registry.raise_floor(record.namespace, record.generation_to)
        while True:
            match record.state:
                case "stopped":
                    record = self._book.advance(record)
                case "advanced":
                    record = await self._spread_floor(record)
                case "floored":
                    record = await self._drain(record)
                case "drained":
                    record = await self._collect(record)
                case "evidenced":
                    record = await self._erase(record)
                case "erased":
                    return self._book.certify(record)
                case "certified":
                    raise RevocationStalled(record.namespace, record.state, "the namespace was not reopened")

    async def _spread_floor(self, record: rec.RevocationRecord) -> rec.RevocationRecord:
        name, generation = record.namespace, record.generation_to
        others = [entry for entry in await self._reachable() if entry not in _member_names(record)]
        targets = [member.incarnation for member in unsettled(record)] + others
        faults = await self._each(targets, lambda target: self._fleet.advance_floor(target, name, generation))
        for incarnation in faults:
            if incarnation not in others:
                self._authority.membership.fence(incarnation)
        await self._required(record, "routing", self._fleet.drop_routes(name, generation))
        return self._book.enter(msgspec.structs.replace(record, state="floored"))

    async def _drain(self, record: rec.RevocationRecord) -> rec.RevocationRecord:
        name, generation = record.namespace, record.generation_to
        clock = self._authority.journal.clock
        left_s = max(0.0, record.deadline_at - clock.now_s())
        targets = [member.incarnation for member in unsettled(record) if not self._is_out(member.incarnation)]
        faults = await self._each(
            targets, lambda target: self._fleet.end_requests(target, name, generation, left_s), extra_s=left_s
        )
        for incarnation in faults:
            self._authority.membership.fence(incarnation)
        gateways = await self._required(record, "gateways", self._fleet.close_streams(name, generation))
        drained = msgspec.structs.replace(
            record, state="drained", gateways=tuple(gateways), streams_closed_at=clock.now_s()
        )
        return self._book.enter(drained)

    async def _collect(self, record: rec.RevocationRecord) -> rec.RevocationRecord:
        tasks = [asyncio.create_task(self._member_outcome(record, member)) for member in unsettled(record)]
        try:
            for outcome in asyncio.as_completed(tasks):
                record = self._book.settle(record, await outcome)
        finally:
            for task in tasks:
                task.cancel()
        return self._book.enter(msgspec.structs.replace(record, state="evidenced"))

    async def _erase(self, record: rec.RevocationRecord) -> rec.RevocationRecord:
        deletion = self._fleet.delete_session_state(record.namespace, record.generation_from)
        await self._required(record, "sessions", deletion)
        return self._book.enter(msgspec.structs.replace(record, state="erased"))

    async def _member_outcome(
        self, record: rec.RevocationRecord, member: rec.IncarnationRecord
    ) -> rec.MemberOutcome:
        """Ask one incarnation for evidence; fence it when there is none that holds."""
        incarnation = member.incarnation
        question = EvidenceQuestion(record.nonce, record.namespace, record.generation_to)
        evidence: tuple[rec.RankEvidence, ...] = ()
        detail = "it was fenced before it gave evidence"
        if not self._is_out(incarnation):
            name, generation = record.namespace, record.generation_to
            call = self._fleet.purge_evidence(incarnation, name, generation, record.nonce)
            try:
                evidence = tuple(await self._timed(incarnation, call))
                erased = await self._timed(incarnation, self._fleet.erase_logs(incarnation, name, generation))
            except FleetUnreachable as error:
                detail = str(error)
            else:
                faults = member_faults(evidence, member, question)
                if not faults:
                    detail = "every rank gave evidence"
                    if erased:
                        detail += f"; recorded logs deleted: {erased}"
                    return rec.MemberOutcome(incarnation, "confirmed", detail, evidence)
                detail = "; ".join(faults)
        return await self._fenced_or_ended(incarnation, detail, evidence)

    async def _fenced_or_ended(
        self, incarnation: str, detail: str, evidence: tuple[rec.RankEvidence, ...]
    ) -> rec.MemberOutcome:
        membership = self._authority.membership
        membership.fence(incarnation)
        while True:
            entry = membership.get(incarnation)
            if entry.ended_sequence is not None:
                return rec.MemberOutcome(incarnation, "ended", entry.ended_proof or "", evidence)
            remaining_s = membership.fence_remaining_s(incarnation)
            if remaining_s <= 0.0:
                membership.lapse(incarnation)
                return rec.MemberOutcome(incarnation, "fenced", detail, evidence)
            await self._sleep(min(remaining_s, 1.0))

    def _is_out(self, incarnation: str) -> bool:
        entry = self._authority.membership.get(incarnation)
        return entry.fenced or entry.ended_sequence is not None

    async def _reachable(self) -> Sequence[str]:
        return await self._timed("fleet", self._fleet.incarnations())

    async def _each(
        self, targets: Sequence[str], call: Callable[[str], Awaitable[object]], extra_s: float = 0.0
    ) -> list[str]:
        """Call every target at once; returns those that did not answer."""

        async def reached(target: str) -> bool:
            try:
                await self._timed(target, call(target), extra_s)
            except FleetUnreachable:
                return False
            return True

        answers = await asyncio.gather(*(reached(target) for target in targets))
        return [target for target, answered in zip(targets, answers, strict=True) if not answered]

    async def _required(self, record: rec.RevocationRecord, part: str, call: Awaitable[_A]) -> _A:
        try:
            return await self._timed(part, call)
        except FleetUnreachable as error:
            raise RevocationStalled(record.namespace, record.state, str(error)) from error

    async def _timed(self, member: str, call: Awaitable[_A], extra_s: float = 0.0) -> _A:
        try:
            return await asyncio.wait_for(call, self._call_timeout_s + extra_s)
        except TimeoutError as error:
            raise FleetUnreachable(member, "no answer in time") from error


def _member_names(record: rec.RevocationRecord) -> set[str]:
    return {member.incarnation for member in record.members}
