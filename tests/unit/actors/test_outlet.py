"""Outlets: many streams in one message a step, in order, ended with their gateway; releases: one hand-over a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from copyhold.actors.messages import Failed, StreamItem, TokenChunk
from copyhold.actors.outlet import Outlets, decode_parcels
from copyhold.actors.releases import Releases

Lists = list[list[StreamItem]]


async def stream(lists: Lists, gate: asyncio.Event | None = None) -> AsyncIterator[list[StreamItem]]:
    for items in lists:
        yield items
        if gate is not None:
            await gate.wait()


def tokens(*ids: int) -> list[StreamItem]:
    return [TokenChunk((token,)) for token in ids]


async def until_stuck() -> None:
    """Lets every task run until it waits for something that only the test can give."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_is_released_together_leaves_together_and_in_order() -> None:
    async def play() -> None:
        outlets, gate = Outlets(), asyncio.Event()
        for number in range(8):
            outlets.forward("g", f"r{number}", stream([tokens(number), tokens(100 + number)], gate))
        await until_stuck()
        messages = outlets.parcels("g")
        first = decode_parcels(await anext(messages))
        assert [(parcel.request_id, list(parcel.items)) for parcel in first] == [
            (f"r{number}", tokens(number)) for number in range(8)
        ]
        gate.set()
        second = decode_parcels(await anext(messages))
        assert {parcel.request_id: list(parcel.items) for parcel in second} == {
            f"r{number}": tokens(100 + number) for number in range(8)
        }
        outlets.close()
        assert [message async for message in messages] == []

    asyncio.run(play())


def test_outlets_do_not_mix_and_may_be_asked_for_first() -> None:
    async def play() -> None:
        outlets = Outlets()
        early = asyncio.ensure_future(anext(outlets.parcels("a")))
        await until_stuck()
        outlets.forward("b", "other", stream([tokens(2)]))
        outlets.forward("a", "own", stream([tokens(1)]))
        assert [parcel.request_id for parcel in decode_parcels(await early)] == ["own"]
        assert [parcel.request_id for parcel in decode_parcels(await anext(outlets.parcels("b")))] == [
            "other"
        ]

    asyncio.run(play())


def test_what_waits_when_outlets_close_is_still_sent() -> None:
    async def play() -> list[bytes]:
        outlets = Outlets()
        outlets.forward("g", "r", stream([tokens(1), [Failed("replica_stopped", "stopped")]]))
        await until_stuck()
        outlets.close()
        return [message async for message in outlets.parcels("g")]

    (message,) = asyncio.run(play())
    assert [type(parcel.items[0]) for parcel in decode_parcels(message)] == [TokenChunk, Failed]


def test_a_gateway_that_goes_ends_its_requests() -> None:
    ended: list[str] = []

    async def held() -> AsyncIterator[list[StreamItem]]:
        try:
            yield tokens(1)
            await asyncio.Event().wait()
        finally:
            ended.append("r")

    async def play() -> None:
        outlets = Outlets()
        outlets.forward("g", "r", held())
        messages = outlets.parcels("g")
        await anext(messages)
        await messages.aclose()  # type: ignore[attr-defined]
        await until_stuck()

    asyncio.run(play())
    assert ended == ["r"]


def test_a_stream_that_fails_tells_its_request_and_no_other() -> None:
    async def broken() -> AsyncIterator[list[StreamItem]]:
        yield tokens(1)
        raise KeyError("secret")

    async def play() -> bytes:
        outlets = Outlets()
        outlets.forward("g", "bad", broken())
        outlets.forward("g", "good", stream([tokens(2)]))
        await until_stuck()
        return await anext(outlets.parcels("g"))

    found = [(parcel.request_id, parcel.items[0]) for parcel in decode_parcels(asyncio.run(play()))]
    assert ("bad", Failed("replica_stopped", "KeyError")) in found and ("good", TokenChunk((2,))) in found


def test_releases_wake_the_loop_once_a_flush() -> None:
    calls: list[int] = []

    class CountingLoop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(self, callback, *given, context=None):  # type: ignore[no-untyped-def]
            calls.append(len(given[0]))
            return super().call_soon_threadsafe(callback, *given, context=context)

    loop = CountingLoop()
    try:
        releases = Releases(loop)
        queues: list[asyncio.Queue[StreamItem]] = [asyncio.Queue(), asyncio.Queue()]
        sinks = [releases.sink(queue) for queue in queues]
        for token in range(3):
            for sink in sinks:
                sink(TokenChunk((token,)))
        releases.flush()
        releases.flush()
        loop.run_until_complete(asyncio.sleep(0))
        assert calls == [6]
        assert [[queue.get_nowait() for _ in range(3)] for queue in queues] == [tokens(0, 1, 2)] * 2
    finally:
        loop.close()
