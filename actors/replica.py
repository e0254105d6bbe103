"""The replica actor: verified requests in, tokens out; one engine, one scheduler, TP ranks behind it.

Owns admission on one replica incarnation: the grant is verified and the serving lease is held *before* the ledger is asked
anything (K013), and every stream ends with exactly one last item. Invariant: an incarnation serves only between its
registration with the authority and the loss of its lease; after that it admits nothing and its streams are ended.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from ray.exceptions import RayError

from copyhold.kernels.dispatch import KernelChoice
from copyhold.kvcore.commands import Genesis, GroupSpec, Scope
from copyhold.kvcore.identity import chain_digests
from copyhold.namespace.authority import ClusterIdentity
from copyhold.namespace.errors import GrantRefused, NamespaceError
from copyhold.namespace.leases import LeaseHolder
from copyhold.namespace.records import IncarnationRecord, RankEvidence
from copyhold.namespace.sessions import SessionStore
from copyhold.namespace.store_target import StoreTarget

from .cache_settings import DEFAULT_CACHE, CacheSettings
from .errors import ActorError, InvalidRequest
from .executor import ChannelExecutor
from .messages import Admitted, Failed, Finished, GenerateRequest, ReuseReceipt, StreamItem, TokenChunk
from .open_requests import OpenRequests, cancelled_unheard
from .operator_calls import OperatorCalls
from .outlet import Outlets
from .plan import PurgeOrder
from .pool_figures import PoolFigures
from .receipt_store import keep_receipt
from .recording_settings import RecordingSettings
from .releases import Releases
from .request_counts import RequestCounts
from .routing import DIGEST_EVERY_TOKENS
from .submission import Entry, Submission
from .transport import StepListener

if TYPE_CHECKING:
    from .engine import Engine
    from .recording import Recording


class ReplicaSpec(msgspec.Struct, frozen=True):
    """One replica incarnation. Nothing in it is secret: ``cluster`` holds public keys only."""

    name: str
    incarnation: str
    ranks: int
    world: bytes
    model: str
    block_size: int
    num_blocks: int
    max_requests: int
    max_model_len: int
    vocab_size: int
    step_tokens: int
    prefill_chunk_tokens: int
    channel_path: str
    step_timeout_s: float
    cluster: ClusterIdentity
    sessions_store: StoreTarget
    receipt_ttl_s: int
    request_lifetime_s: float
    cache: CacheSettings = DEFAULT_CACHE
    deterministic: bool = False
    kernels: KernelChoice | None = None
    recording: RecordingSettings | None = None
    pool: PoolFigures | None = None


class Replica(OperatorCalls):
    """Created as a Ray actor with async methods; everything that touches the ledger runs on the engine's thread."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self._spec = spec
        self._listener = StepListener(Path(spec.channel_path), spec.ranks)
        self._verifier = spec.cluster.verifier()
        self._lease = LeaseHolder(spec.incarnation)
        self._sessions = SessionStore.connect(spec.sessions_store)
        self._open_requests = OpenRequests()
        self._outlets = Outlets()
        self._routable: dict[tuple[str, int], dict[bytes, int]] = {}
        self._engine: Engine | None = None
        self._recording: Recording | None = None
        self._draining = False
        self._renew_every_s = 1.0
        self._lease_refusal = ""
        self.receipts_lost = 0
        self._counts = RequestCounts()
        self._tasks: list[asyncio.Task[None]] = []

    # -- life ---------------------------------------------------------------------------------------------------

    async def listening(self) -> int:
        """Answers once the step channel can be connected to; the process id."""
        return os.getpid()

    async def start(self, authority: Any, coordinator: Any, rank_public_keys: tuple[str, ...]) -> None:
        """Take the ranks' connections, register the incarnation, take the first lease and begin to serve."""
        # The ledger and its compiled loops are for this process; whoever only creates the actor does without them.
        from copyhold.kvcore.warm_up import warm_up

        from .cost_policy import warm_up as warm_up_policy
        from .dispatch import StepBudget
        from .engine import Engine
        from .scheduler import Scheduler

        self._authority, self._coordinator = authority, coordinator
        await asyncio.to_thread(warm_up)
        await asyncio.to_thread(warm_up_policy)
        await asyncio.to_thread(self._listener.accept_all, self._spec.step_timeout_s)
        record = IncarnationRecord(
            self._spec.incarnation, self._spec.name, self._spec.ranks, rank_public_keys
        )
        await authority.register_incarnation.remote(record)
        await self._renew()
        genesis = Genesis(
            self._spec.world,
            (GroupSpec("full", self._spec.block_size, self._spec.num_blocks),),
            self._spec.max_requests,
            self._spec.max_model_len,
            self._spec.incarnation,
        )
        budget = StepBudget(self._spec.step_tokens, self._spec.prefill_chunk_tokens, self._spec.vocab_size)
        self._loop = asyncio.get_running_loop()
        self._recording = await self._start_recording()
        self._scheduler = Scheduler(
            genesis, budget, self._published, self._spec.cache, recording=self._recording
        )
        executor = ChannelExecutor(self._listener, self._spec.step_timeout_s)
        self._releases = Releases(self._loop)
        self._engine = Engine(
            self._scheduler,
            executor,
            lambda: self._lease.holds(time.monotonic()),
            flush=self._releases.flush,
        )
        self._engine.start()
        await coordinator.attach.remote(self._spec.name, self._spec.incarnation)
        self._tasks.append(asyncio.create_task(self._keep_lease()))

    async def stop(self) -> None:
        """End every stream, the engine and the channel."""
        for task in self._tasks:
            task.cancel()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop, self._spec.step_timeout_s)
        self._listener.close()
        self._outlets.close()

    async def drain(self) -> dict[str, int]:
        """Admit nothing more; running requests go on. Returns what is still running and waiting."""
        self._draining = True
        running, waiting = self._scheduler.counts()
        return {"running": running, "waiting": waiting}

    # -- one request --------------------------------------------------------------------------------------------

    async def open(self, request: GenerateRequest, outlet: str) -> None:
        """Generate; what is released leaves through ``parcels`` of that outlet."""
        self._outlets.forward(outlet, request.request_id, self.generate(request))

    async def parcels(self, outlet: str) -> AsyncIterator[bytes]:
        """Everything that the requests of one outlet are sent, until the replica stops."""
        async for message in self._outlets.parcels(outlet):
            yield message

    async def generate(self, request: GenerateRequest) -> AsyncIterator[list[StreamItem]]:
        """Stream of item lists; one list holds whatever the engine released since the last."""
        refusal = self._refusal(request)
        if refusal is not None:
            self._counts.count(refusal)
            yield [refusal]
            return
        engine, requests = self._serving_engine(), self._open_requests
        items: asyncio.Queue[StreamItem] = asyncio.Queue()
        requests.opening(request.request_id, request.secret)
        submitted = engine.submit(self._submission(request), self._releases.sink(items))
        entry: Entry | None = None
        ended = False
        try:
            try:
                entry = await asyncio.wrap_future(submitted)
            except ActorError as error:
                failed = Failed(
                    error.kind, error.message if isinstance(error, InvalidRequest) else str(error)
                )
                self._counts.count(failed)
                yield [failed]
                return
            if requests.opened(request.request_id, entry):
                engine.cancel(entry)
            while not ended:
                batch = [await items.get()]
                while not items.empty():
                    batch.append(items.get_nowait())
                ended = isinstance(batch[-1], Finished | Failed)
                self._count(request, batch)
                if ended and len(batch) > 1 and all(isinstance(item, TokenChunk) for item in batch[:-1]):
                    yield batch[:-1]  # tokens do not wait until the whole receipt is kept
                    batch = batch[-1:]
                await self._keep_receipts(request, batch)
                yield batch
        finally:
            requests.closed(request.request_id)
            if entry is None:
                submitted.add_done_callback(cancelled_unheard(engine.cancel))
            elif not ended:
                self._counts.count_abandoned()
                engine.cancel(entry)

    async def cancel(self, request_id: str) -> None:
        """Release a request's blocks, once it has any; unknown or ended requests are left alone."""
        entry = self._open_requests.cancel(request_id)
        if entry is not None:
            self._serving_engine().cancel(entry)

    async def finish(self, request_id: str, completion_tokens: int) -> None:
        """End a request as stopped after that many tokens; unknown or ended requests are left alone."""
        entry = self._open_requests.entry(request_id)
        if entry is not None:
            await asyncio.wrap_future(self._serving_engine().finish(entry, completion_tokens))

    async def amend(self, request: GenerateRequest, receipt: ReuseReceipt) -> None:
        """Keep the receipt of a request that came to its own end before ``finish`` reached it."""
        await self._keep_receipts(request, [Finished(receipt.finish_reason, receipt)])

    # -- revocation ---------------------------------------------------------------------------------------------

    async def advance_floor(self, namespace: str, generation: int) -> int:
        """Fence older generations; returns the number of requests still running below the floor."""
        self._lease.raise_floor(namespace, generation)
        for key in [key for key in self._routable if key[0] == namespace and key[1] < generation]:
            del self._routable[key]
        call = self._serving_engine().call(lambda: self._scheduler.advance_floor(namespace, generation))
        return await asyncio.wrap_future(call)

    async def end_requests(self, namespace: str, generation: int, deadline_s: float) -> int:
        """Give requests below the floor until ``deadline_s`` from now, then end them; returns how many were ended."""
        engine = self._serving_engine()
        deadline_at_s = time.monotonic() + deadline_s
        while time.monotonic() < deadline_at_s:
            left = await asyncio.wrap_future(
                engine.call(lambda: self._scheduler.advance_floor(namespace, generation))
            )
            if left == 0:
                return 0
            await asyncio.sleep(min(0.02, max(0.0, deadline_at_s - time.monotonic())))
        return await asyncio.wrap_future(engine.call(self._scheduler.end_below_floor))

    async def purge_evidence(self, namespace: str, generation: int, nonce: str) -> list[RankEvidence]:
        """Every rank's signed measurement for a revocation; requests below the floor must have ended."""
        order = PurgeOrder(namespace, generation, nonce)
        reports = await asyncio.wrap_future(self._serving_engine().purge(order))
        return [report.purge for report in reports if report.purge is not None]

    async def erase_logs(self, namespace: str, generation: int) -> int:
        """Delete recorded logs that hold tokens below the floor; requests below it must have ended.

        Recording goes on in a new file. Returns how many files went, those of earlier incarnations included.
        """
        recording, settings = self._recording, self._spec.recording
        if recording is None or settings is None:
            return 0
        from .recorded_files import erase_below

        floors, ledger = {namespace: generation}, self._scheduler.ledger
        await asyncio.wrap_future(self._serving_engine().call(lambda: recording.leave(ledger, floors)))
        erased = await asyncio.to_thread(erase_below, Path(settings.folder), floors)
        recording.note_erased(erased)
        return erased

    # -- inside -------------------------------------------------------------------------------------------------

    async def _start_recording(self) -> Recording | None:
        """What earlier incarnations recorded of generations revoked since goes before anything new is written."""
        from .recorded_files import erase_below
        from .recording import Recording

        settings, spec = self._spec.recording, self._spec
        if settings is None:
            return None
        recording = Recording(settings, spec.name, spec.incarnation)
        floors = self._lease.floors.generations
        recording.note_erased(await asyncio.to_thread(erase_below, Path(settings.folder), floors))
        return recording

    def _refusal(self, request: GenerateRequest) -> Failed | None:
        """Everything that is checked before the ledger hears of a request."""
        try:
            self._verifier.verify(request.grant, time.time(), self._lease.floors)
        except GrantRefused as error:
            revoked = error.reason == "namespace_generation_mismatch"
            return Failed("namespace_revoked" if revoked else "not_authorized", str(error))
        now_s = time.time()
        if request.route.incarnation != self._spec.incarnation or now_s > request.route.expires_at:
            return Failed("stale_route", "the route names another incarnation or has expired")
        if self._draining or self._engine is None or not self._lease.holds(time.monotonic()):
            return Failed("service_unavailable", "the replica does not admit requests now")
        if self._engine.failure is not None:
            return Failed("replica_stopped", str(self._engine.failure))
        return None

    def _count(self, request: GenerateRequest, batch: list[StreamItem]) -> None:
        for item in batch:
            self._counts.count(item)
            if isinstance(item, Admitted):
                self._counts.count_route(request.route.expected_hit_tokens, item.receipt.cached_tokens)

    def _submission(self, request: GenerateRequest) -> Submission:
        grant = request.grant
        return Submission(
            request_id=request.request_id,
            key_id=grant.key_id,
            receipt_id="rcp_" + secrets.token_hex(12),
            scope=Scope(grant.namespace, grant.generation, self._spec.world),
            model=self._spec.model,
            tokens=request.tokens,
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=frozenset(request.stop_token_ids),
            lookup=grant.allows("reuse"),
            publish=grant.allows("publish"),
            arrived_at_s=time.monotonic(),
            created_at=time.time(),
            sampling=request.sampling,
            retention=request.retention,
            deterministic=self._spec.deterministic,
        )

    async def _keep_receipts(self, request: GenerateRequest, batch: list[StreamItem]) -> None:
        """Store the tenant's receipt before its id leaves, and again when it is complete.

        A store that is away costs the receipt, not the answer (sessions only ever fail to recompute).
        """
        kept = [item for item in batch if isinstance(item, Admitted | Finished)]
        if not kept:
            return
        arguments = (
            self._sessions,
            request.grant,
            request.secret,
            kept[-1].receipt,
            self._spec.receipt_ttl_s,
        )
        try:
            await asyncio.to_thread(keep_receipt, *arguments)
        except NamespaceError:
            self.receipts_lost += 1

    def _published(self, entry: Entry, tokens_before: int, tokens_after: int) -> None:
        """Engine thread: tell the routing index about whole digest strides that became available."""
        secret = self._open_requests.secret(entry.submission.request_id)
        if secret is None or tokens_after // DIGEST_EVERY_TOKENS <= tokens_before // DIGEST_EVERY_TOKENS:
            return
        tokens = np.frombuffer(entry.known_tokens(), dtype="<i4")[:tokens_after]
        chain = chain_digests(secret, tokens, DIGEST_EVERY_TOKENS)
        digests = [(digest, (number + 1) * DIGEST_EVERY_TOKENS) for number, digest in enumerate(chain)]
        scope = entry.scope
        self._routable.setdefault((scope.namespace, scope.generation), {}).update(digests)
        self._coordinator.publish.remote(scope.namespace, scope.generation, self._spec.incarnation, digests)

    async def _keep_lease(self) -> None:
        """Renew at a quarter of the lease; a refusal or a lost authority lets the lease run out."""
        while True:
            await asyncio.sleep(self._renew_every_s)
            try:
                await self._renew()
                await self._end_refused()
                await self._report_to_coordinator()
            except (NamespaceError, RayError) as error:
                self._lease_refusal = f"{type(error).__name__}: {error}"

    async def refresh(self) -> None:
        """Renew at once and end what the floors now refuse: the authority calls it after a key or namespace changed."""
        await self._renew()
        await self._end_refused()

    async def _end_refused(self) -> None:
        """End what runs under a disabled key or namespace, and what has outlived a request's own lifetime."""
        floors, lifetime_s = self._lease.floors, self._spec.request_lifetime_s

        def refusal(submission: Submission) -> Failed | None:
            if (
                submission.key_id in floors.disabled_keys
                or submission.scope.namespace in floors.disabled_namespaces
            ):
                return Failed("not_authorized", "the key or the namespace was disabled")
            if time.monotonic() - submission.arrived_at_s > lifetime_s:
                return Failed("request_lifetime", f"a request lives {lifetime_s:g} s at most")
            return None

        await asyncio.wrap_future(self._serving_engine().call(lambda: self._scheduler.end_refused(refusal)))

    async def _report_to_coordinator(self) -> None:
        """Load; and after a restart of the coordinator, everything it forgot."""
        running, waiting = self._scheduler.counts()
        incarnation = self._spec.incarnation
        if await self._coordinator.report_load.remote(incarnation, running, waiting):
            return
        await self._coordinator.attach.remote(self._spec.name, incarnation)
        for (namespace, generation), digests in list(self._routable.items()):
            if self._lease.floors.admits(namespace, generation):
                await self._coordinator.publish.remote(
                    namespace, generation, incarnation, list(digests.items())
                )

    async def _renew(self) -> None:
        sequence = self._lease.begin_renewal(time.monotonic())
        renewal = await self._authority.renew_lease.remote(self._spec.incarnation, sequence)
        self._lease.accept(renewal)
        self._renew_every_s = renewal.expires_in_s / 4
        self._lease_refusal = ""
