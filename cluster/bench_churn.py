"""The churn of ``copyhold bench prefix``: requests of many tenants through one ledger, with the server's own victims.

Owns one replica's life without a model: probe, choice of victims, Admit, Dispatch, Complete, Publish, Release, every one
through ``Ledger.apply`` and each with its receipt, as the scheduler sends them: several requests a step. Invariant: nothing a
server would check is left out, and prompts arrive as arrays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from copyhold.actors.cache_settings import SERVED_POLICIES
from copyhold.actors.eviction import Evictor
from copyhold.actors.retention import DEFAULT_RETENTION, RetentionLimits
from copyhold.actors.routing import DIGEST_EVERY_TOKENS, RoutingIndex
from copyhold.actors.shares import Shares, ShareSettings
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    Complete,
    Dispatch,
    Genesis,
    GroupSpec,
    NodeHandle,
    Publish,
    Release,
    RequestHandle,
    RowSpan,
    Scope,
)
from copyhold.kvcore.identity import chain_digests
from copyhold.kvcore.ledger import Ledger

from .bench_prefix_load import BLOCK, IN_FLIGHT, POOL_BLOCKS, SUFFIX_HIGH, SYSTEM_TOKENS, Churn

WORLD = b"w" * 32
STEP_REQUESTS = 16
_LONGEST = SYSTEM_TOKENS + SUFFIX_HIGH + BLOCK


class ChurnResult(msgspec.Struct, frozen=True):
    """Requests per second of one play, and hit tokens as a share of prompt tokens."""

    requests_per_s: float
    hit_rate: float


class _Running(msgspec.Struct):
    handle: RequestHandle
    namespace: str
    rows: RowSpan
    table: np.ndarray
    terminal: NodeHandle | None
    published: int = 0


class Replica:
    """A ledger of its own, an Evictor and the books of shares."""

    def __init__(self, tenants: int, policy: str, blocks: int = POOL_BLOCKS) -> None:
        self.ledger = Ledger()
        slots = IN_FLIGHT + 2 * STEP_REQUESTS
        self.ledger.apply(Genesis(WORLD, (GroupSpec("full", BLOCK, blocks),), slots, _LONGEST, "bench"))
        self.shares = Shares(ShareSettings(), blocks)
        self.evictor = Evictor(self.ledger, blocks, self.shares, SERVED_POLICIES[policy], RetentionLimits())
        self.scopes = [Scope(f"tenant-{number}", 1, WORLD) for number in range(tenants)]
        for scope in self.scopes:
            self.shares.admit_namespace(scope.namespace)
        self.running: deque[_Running] = deque()
        self.transaction = self.step = self.hit_tokens = self.prompt_tokens = 0

    def serve(self, asked: Sequence[int], prompts: Sequence[np.ndarray]) -> None:
        """One step: admits these requests, computes and publishes them, releases the oldest beyond the window."""
        admitted = [self._admit(tenant, prompt) for tenant, prompt in zip(asked, prompts, strict=True)]
        apply, self.step = self.ledger.apply, self.step + 1
        apply(Dispatch(self.step, tuple([one.rows for one in admitted])))
        apply(Complete(self.step))
        receipt = apply(Publish(tuple([one.handle for one in admitted])))
        for one, path in zip(admitted, receipt.entries, strict=True):
            first, end = path.tokens_before // BLOCK, path.tokens_after // BLOCK
            one.terminal, one.published = path.path[-1] if path.path else None, end
            self.evictor.published(
                one.namespace, path.path, first, one.table[first:end], DEFAULT_RETENTION, 0.0
            )
        self.running.extend(admitted)
        while len(self.running) > IN_FLIGHT:
            self._release(self.running.popleft())

    def _admit(self, tenant: int, prompt: np.ndarray) -> _Running:
        ledger, evictor, scope = self.ledger, self.evictor, self.scopes[tenant]
        namespace, tokens = scope.namespace, prompt.tobytes()
        probe = ledger.probe(scope, tokens)
        needed = -(-len(prompt) // BLOCK) - len(probe.blocks)
        victims = evictor.choose({namespace: needed}, frozenset(probe.path))
        self.transaction += 1
        receipt = ledger.apply(Admit(self.transaction, scope, tokens, True, victims.nodes))
        evictor.evicted(victims)
        self.shares.take(namespace, len(receipt.new_blocks))
        handle, hit = receipt.request, receipt.match.runtime
        table = ledger.tables[handle.slot, : int(ledger.num_blocks[handle.slot])]
        terminal = receipt.path[-1] if receipt.path else None
        evictor.admitted(namespace, len(prompt), terminal, table[: hit // BLOCK], DEFAULT_RETENTION, 0.0)
        self.hit_tokens += hit
        self.prompt_tokens += len(prompt)
        return _Running(handle, namespace, RowSpan(handle, hit, len(prompt) - hit), table, None)

    def _release(self, ended: _Running) -> None:
        indexed = ended.table[: ended.published].copy()
        receipt = self.ledger.apply(Release(ended.handle, "finish"))
        self.shares.give_back(ended.namespace, receipt.freed_blocks)
        self.evictor.released(ended.namespace, ended.terminal, indexed)


class Prefixes:
    """A pool of one tenant into which prompts are cached one by one, for the rows beside the churn."""

    def __init__(self, blocks: int, longest: int, policy: str = "lru") -> None:
        self.ledger = Ledger()
        self.ledger.apply(Genesis(WORLD, (GroupSpec("full", BLOCK, blocks),), 4, longest, "bench"))
        self.shares = Shares(ShareSettings(), blocks)
        self.evictor = Evictor(self.ledger, blocks, self.shares, SERVED_POLICIES[policy], RetentionLimits())
        self.scopes = [Scope("tenant-0", 1, WORLD)]
        self.shares.admit_namespace("tenant-0")
        self.transaction = self.step = 0

    def compute(self, prompt: np.ndarray) -> RequestHandle:
        """A running request whose every row is valid."""
        self.transaction, self.step = self.transaction + 1, self.step + 1
        receipt = self.ledger.apply(Admit(self.transaction, self.scopes[0], prompt.tobytes()))
        hit = receipt.match.runtime
        self.shares.take("tenant-0", len(receipt.new_blocks))
        self.ledger.apply(Dispatch(self.step, (RowSpan(receipt.request, hit, len(prompt) - hit),)))
        self.ledger.apply(Complete(self.step))
        return receipt.request

    def fill(self, prompt: np.ndarray) -> None:
        """As `cache`, without telling the Evictor: only the ledger holds anything."""
        handle = self.compute(prompt)
        self.ledger.apply(Publish((handle,)))
        self.ledger.apply(Release(handle, "finish"))

    def cache(self, prompt: np.ndarray) -> None:
        """Computes, publishes and releases a prompt."""
        handle = self.compute(prompt)
        entry = self.ledger.apply(Publish((handle,))).entries[0]
        table = self.ledger.table(handle)
        first, end = entry.tokens_before // BLOCK, entry.tokens_after // BLOCK
        self.evictor.published("tenant-0", entry.path, first, table[first:end], DEFAULT_RETENTION, 0.0)
        receipt = self.ledger.apply(Release(handle, "finish"))
        self.shares.give_back("tenant-0", receipt.freed_blocks)
        self.evictor.released("tenant-0", entry.path[-1], table[:end])

    def stir(self) -> None:
        """A command that changes nothing a match sees, so that no match is remembered from the one before."""
        self.transaction += 1
        self.ledger.apply(Admit(self.transaction, self.scopes[0], b"\1\0\0\0"))
        self.ledger.apply(Abort(self.transaction))


def play_churn(
    churn: Churn, policy: str, *, digests: bool, step_requests: int = STEP_REQUESTS
) -> ChurnResult:
    """Plays a load from an empty pool; `digests`: routed by keyed chain digests, which are published too."""
    tenants = churn.tenants.tolist()
    replica, prompts = Replica(max(tenants) + 1, policy), churn.prompts()
    routing = RoutingIndex(60.0)
    routing.attach("replica", "bench")
    keys = [f"key of tenant {number}".encode() for number in range(len(replica.scopes))]
    started = time.perf_counter()
    for at in range(0, len(prompts), step_requests):
        asked, given = tenants[at : at + step_requests], prompts[at : at + step_requests]
        if digests:
            chains = [
                chain_digests(keys[tenant], prompt) for tenant, prompt in zip(asked, given, strict=True)
            ]
            for tenant, chain in zip(asked, chains, strict=True):
                routing.route(replica.scopes[tenant].namespace, 1, chain, 0.0)
        replica.serve(asked, given)
        if digests:
            for tenant, chain in zip(asked, chains, strict=True):
                ends = [(link, (n + 1) * DIGEST_EVERY_TOKENS) for n, link in enumerate(chain)]
                routing.publish(replica.scopes[tenant].namespace, 1, "bench", ends)
    elapsed = time.perf_counter() - started
    return ChurnResult(len(prompts) / elapsed, replica.hit_tokens / replica.prompt_tokens)
