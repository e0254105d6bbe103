"""A subscription: each request its own items from the one stream, and one last item whatever becomes of the replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

from ray.exceptions import RayError

from copyhold.actors.messages import Failed, Finished, GenerateRequest, ReuseReceipt, StreamItem, TokenChunk
from copyhold.actors.outlet import Outlets
from copyhold.cluster.ray_subscription import Items, Subscription

_RECEIPT = ReuseReceipt("c", "r", "acme", "m", 0.0, 1, 0, 0, 0, 0, 16, "none", "none")
END = Finished("length", _RECEIPT)


def request(request_id: str) -> GenerateRequest:
    fields: dict[str, Any] = dict.fromkeys(("grant", "route"))
    return GenerateRequest(
        request_id=request_id, secret=b"", tokens=b"", max_new_tokens=1, stop_token_ids=(), **fields
    )


class Method:
    """An actor's method as its caller holds it."""

    def __init__(self, call: Any) -> None:
        self.remote = call

    def options(self, **given: Any) -> Method:
        assert given == {"num_returns": "streaming"}
        return self


class LocalReplica:
    """Outlets of this process behind the two methods that a subscription calls."""

    def __init__(self, lists: dict[str, list[list[StreamItem]]]) -> None:
        self.outlets = Outlets()
        self.lists = lists
        self.lost = False
        self.stopped = asyncio.Event()
        self.refuses = False
        self.parcels = Method(self._parcels)
        self.open = Method(self._open)

    def stop(self) -> None:
        self.stopped.set()
        self.outlets.close()

    async def _parcels(self, outlet: str) -> AsyncIterator[Awaitable[bytes]]:
        async for message in self.outlets.parcels(outlet):
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            answer.set_result(message)
            yield answer
        if self.lost:
            raise RayError("lost")

    async def _open(self, asked: GenerateRequest, outlet: str) -> None:
        if self.refuses:
            raise RayError("refused")
        self.outlets.forward(outlet, asked.request_id, self._stream(asked.request_id))

    async def _stream(self, request_id: str) -> AsyncIterator[list[StreamItem]]:
        for items in self.lists[request_id]:
            yield items
        await self.stopped.wait()


async def all_of(items: Items) -> list[StreamItem]:
    found = [await asyncio.wait_for(items.get(), 10)]
    while not isinstance(found[-1], Finished | Failed):
        found.append(await asyncio.wait_for(items.get(), 10))
    return found


def test_each_request_gets_its_own_items_and_nothing_after_its_last() -> None:
    late: list[StreamItem] = [TokenChunk((9,))]

    async def play() -> None:
        replica = LocalReplica({"a": [[TokenChunk((1,)), END], late], "b": [[TokenChunk((2,))], [END]]})
        subscription = Subscription(replica)
        first, second = subscription.start(request("a")), subscription.start(request("b"))
        assert await all_of(first) == [TokenChunk((1,)), END]
        assert await all_of(second) == [TokenChunk((2,)), END]
        assert first.empty() and not subscription.over
        replica.stop()

    asyncio.run(play())


def test_a_lost_replica_ends_what_waits_and_what_comes() -> None:
    for lost, message in ((True, "the replica is gone (RayError)"), (False, "the replica's stream ended")):

        async def play(lost: bool = lost) -> tuple[list[StreamItem], list[StreamItem], bool]:
            replica = LocalReplica({"a": [[TokenChunk((1,))]]})
            subscription = Subscription(replica)
            items = subscription.start(request("a"))
            began = await asyncio.wait_for(items.get(), 10)
            if lost:
                replica.lost = True
            replica.stop()
            ended = await all_of(items)
            return [began, *ended], await all_of(subscription.start(request("b"))), subscription.over

        failed = Failed("replica_stopped", message)
        assert asyncio.run(play()) == ([TokenChunk((1,)), failed], [failed], True)


def test_a_start_that_does_not_arrive_ends_that_request_only() -> None:
    async def play() -> None:
        replica = LocalReplica({"b": [[END]]})
        subscription = Subscription(replica)
        replica.refuses = True
        assert await all_of(subscription.start(request("a"))) == [
            Failed("replica_stopped", "the replica is gone (RayError)")
        ]
        replica.refuses = False
        assert await all_of(subscription.start(request("b"))) == [END]
        replica.stop()

    asyncio.run(play())
