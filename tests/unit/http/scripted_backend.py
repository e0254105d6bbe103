"""A deterministic ``TenantBackend``: every token is decided by the test, every call is recorded in order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np

from copyhold.actors.errors import ServiceUnavailable
from copyhold.actors.messages import Admitted, Failed, Finished, ReuseReceipt, StreamItem, TokenChunk
from copyhold.actors.retention import DEFAULT_RETENTION, Retention
from copyhold.models.sampling import SamplingParams
from copyhold.namespace.authority import Authorization
from copyhold.namespace.errors import NotFound, Unauthenticated
from copyhold.namespace.grants import Grant

BLOCK_SIZE = 16


class ScriptedGeneration:
    """Delivers one step at a time; with ``gate`` set, a step waits for a permit."""

    def __init__(self, backend: ScriptedBackend, receipt: ReuseReceipt, steps: list[StreamItem]) -> None:
        self._backend = backend
        self._steps = steps
        self.receipt = receipt
        self.blocks = -(-receipt.prompt_tokens // BLOCK_SIZE)
        self.cancelled = 0
        self.delivered = 0
        self.wanted: int | None = None
        self.over = False
        backend.blocks_in_use += self.blocks

    def __aiter__(self) -> AsyncIterator[StreamItem]:
        return self._items()

    async def _items(self) -> AsyncIterator[StreamItem]:
        for step in self._steps:
            await asyncio.sleep(0)
            if self.wanted is not None and not self._backend.finishes_late:
                self._free()
                self.receipt = msgspec.structs.replace(
                    self.receipt, completion_tokens=self.wanted, finish_reason="stop"
                )
                self._backend.keep(self.receipt)
                yield Finished("stop", self.receipt)
                return
            if self._backend.gate is not None and not isinstance(step, Admitted):
                await self._backend.gate.acquire()
            self.delivered += 1
            if isinstance(step, Finished | Failed):
                self._free()
            yield step

    async def cancel(self) -> None:
        self.cancelled += 1
        self._free()

    async def finish(self, completion_tokens: int) -> None:
        assert self.wanted is None, "finished twice"
        self.wanted = completion_tokens

    async def amend(self, receipt: ReuseReceipt) -> None:
        assert self.over, "amended before its end"
        self._backend.amended += 1
        self._backend.keep(receipt)

    def _free(self) -> None:
        if not self.over:
            self.over = True
            self._backend.blocks_in_use -= self.blocks
            self._backend.changed.set()


class ScriptedBackend:
    """Two tenants, ``a`` with key-a and namespaces a and a2, ``b`` with key-b.

    ``answer`` are the tokens of every generation, ``per_step`` how many leave at once. ``fail_after`` ends a
    generation with ``Failed`` after that many steps; ``refuse`` is raised by ``generate``, and
    ``ServiceUnavailable`` when ``full_at`` generations were started. With ``finishes_late`` a generation comes to its
    own end before ``finish`` reaches it.
    """

    def __init__(self) -> None:
        self.keys = {"key-a": ("a", ("a", "a2")), "key-b": ("b", ("b",))}
        self.generations_of = {"a": 1, "a2": 1, "b": 1}
        self.answer: list[int] = list(b"Hello there")
        self.per_step = 1
        self.finish = "length"
        self.fail_after: tuple[int, str] | None = None
        self.refuse: Exception | None = None
        self.full_at: int | None = None
        self.finishes_late = False
        self.amended = 0
        self.hold_generate: asyncio.Event | None = None
        self.gate: asyncio.Semaphore | None = None
        self.is_ready = True
        self.retentions: list[Retention] = []
        self.events: list[str] = []
        self.prompts: list[list[int]] = []
        self.stop_ids: list[tuple[int, ...]] = []
        self.budgets: list[int] = []
        self.samplings: list[SamplingParams] = []
        self.running: list[ScriptedGeneration] = []
        self.blocks_in_use = 0
        self.changed = asyncio.Event()
        self._receipts: dict[str, ReuseReceipt] = {}
        self._seen: dict[tuple[str, int], list[list[int]]] = {}
        self._numbers = itertools.count(1)

    async def authorize(self, credential: str, namespace: str | None, request_id: str) -> Authorization:
        self.events.append("authorize")
        if credential not in self.keys:
            raise Unauthenticated()
        tenant, namespaces = self.keys[credential]
        name = namespace or tenant
        if name not in namespaces:
            raise NotFound()
        grant = Grant(
            grant_id="g", key_id=credential, principal=tenant, namespace=name,
            generation=self.generations_of[name], rights=("reuse", "publish"), cluster_id="c",
            store_epoch="e", audience="aud", term=1, issued_at=0.0, expires_at=60.0,
        )  # fmt: skip
        return Authorization(grant=grant, secret=b"s" * 32, request_id=request_id)

    async def generate(
        self,
        authorization: Authorization,
        request_id: str,
        tokens: bytes,
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        retention: Retention = DEFAULT_RETENTION,
    ) -> ScriptedGeneration:
        self.retentions.append(retention)
        self.events.append("generate")
        if self.hold_generate is not None:
            await self.hold_generate.wait()
        if self.refuse is not None:
            raise self.refuse
        if self.full_at == len(self.running):
            raise ServiceUnavailable("full")
        prompt = np.frombuffer(tokens, dtype="<i4").tolist()
        self.prompts.append(prompt)
        self.stop_ids.append(stop_token_ids)
        self.budgets.append(max_new_tokens)
        self.samplings.append(sampling)
        receipt = self._receipt(authorization.grant, request_id, prompt)
        generation = ScriptedGeneration(self, receipt, self._steps(receipt, max_new_tokens, stop_token_ids))
        self.running.append(generation)
        return generation

    async def receipt(self, authorization: Authorization, receipt_id: str) -> ReuseReceipt:
        self.events.append("receipt")
        found = self._receipts.get(receipt_id)
        if found is None or found.namespace != authorization.grant.namespace:
            raise NotFound()
        return found

    def keep(self, receipt: ReuseReceipt) -> None:
        self._receipts[receipt.receipt_id] = receipt

    async def ready(self) -> bool:
        return self.is_ready

    async def until_idle(self) -> None:
        """Wait until every generation has ended or was cancelled."""
        while any(not generation.over for generation in self.running):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 5.0)

    def _steps(self, receipt: ReuseReceipt, budget: int, stop_ids: Sequence[int]) -> list[StreamItem]:
        tokens, reason = self.answer[:budget], self.finish
        stops = [index for index, token in enumerate(tokens) if token in stop_ids]
        if stops:
            tokens, reason = tokens[: stops[0] + 1], "stop"
        chunks: list[StreamItem] = [
            TokenChunk(tuple(tokens[at : at + self.per_step])) for at in range(0, len(tokens), self.per_step)
        ]
        last = msgspec.structs.replace(receipt, completion_tokens=len(tokens), finish_reason=reason)
        self._receipts[receipt.receipt_id] = last
        steps = [Admitted(receipt), *chunks, Finished(reason, last)]
        if self.fail_after is not None:
            after, kind = self.fail_after
            steps[1 + after :] = [Failed(kind, "replica r7 rank 1 says no")]
        return steps

    def _receipt(self, grant: Grant, request_id: str, prompt: list[int]) -> ReuseReceipt:
        """What an index of full blocks would say: the longest common prefix, capped and rounded down."""
        seen = self._seen.setdefault((grant.namespace, grant.generation), [])
        common = max((_common(prompt, other) for other in seen), default=0)
        cap = len(prompt) - 1
        cached = min(common, cap) // BLOCK_SIZE * BLOCK_SIZE
        reason = "root_empty" if not seen else "logits_cap" if common > cap else "tokens_differ"
        seen.append(prompt)
        receipt = ReuseReceipt(
            receipt_id=f"rcpt-{next(self._numbers)}", request_id=request_id, namespace=grant.namespace,
            model="toy", created_at=1.7e9, prompt_tokens=len(prompt), cached_tokens=cached,
            semantic_tokens=common, indexed_tokens=common, cap_tokens=cap, block_size=BLOCK_SIZE,
            limit="cap" if common > cap else "semantic", reason=reason, time_to_first_token_ms=1.5,
        )  # fmt: skip
        self._receipts[receipt.receipt_id] = receipt
        return receipt


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (index for index, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]),
        min(len(left), len(right)),
    )
