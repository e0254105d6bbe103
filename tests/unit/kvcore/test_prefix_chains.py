"""Keyed chains with typed extras (K098 to K105), case B05 and the documents' figures; weak links never make a hit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from copyhold.actors.messages import RouteReceipt
from copyhold.actors.request_counts import RequestCounts
from copyhold.actors.routing import RoutingIndex
from copyhold.kvcore.commands import Scope
from copyhold.kvcore.contract_errors import EmptyInput, LengthMismatch, NegativeCount
from copyhold.kvcore.identity import (
    NO_EXTRAS,
    ContentSpan,
    PrefixExtras,
    chain_digests,
    scoped_world,
    tail_digest,
)

KEY, WORLD = b"key of one namespace generation", b"w" * 32
PLACEHOLDER = 31_999
FACTS = {
    fact["id"]: fact
    for fact in json.loads((Path(__file__).parents[2] / "data" / "fixtures.json").read_text())["fixtures"]
}


def digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def tokens(first: int, count: int) -> list[int]:
    return [1000 * first + at for at in range(count)]


def alike_in_16_bits() -> tuple[bytes, bytes]:
    """Two digests of different content whose last 16 bits agree."""
    seen: dict[bytes, bytes] = {}
    for number in range(1 << 20):
        found = digest(number.to_bytes(8, "little"))
        if found[-2:] in seen:
            return seen[found[-2:]], found
        seen[found[-2:]] = found
    raise AssertionError("2^20 digests without a collision of 16 bits")


PICTURE_A, PICTURE_B = alike_in_16_bits()


class Prompt(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]
    extras: PrefixExtras


def prompt(*parts: Sequence[int] | tuple[bytes, int]) -> Prompt:
    """Token runs, and pictures as (digest, placeholders)."""
    ids: list[int] = []
    spans: list[ContentSpan] = []
    for part in parts:
        if part and isinstance(part[0], bytes):
            picture, count = part[0], int(part[1])
            spans.append(ContentSpan("media", len(ids), count, picture))
            ids += [PLACEHOLDER] * count
        else:
            ids += [int(token) for token in part]
    return Prompt(tuple(ids), PrefixExtras(spans=tuple(spans)))


def m1(picture: bytes) -> Prompt:
    return prompt(tokens(10, 6), (picture, 12), tokens(40, 7))


def m2(picture: bytes, *front: int) -> Prompt:
    return prompt(front, tokens(10, 8), (picture, 8), tokens(40, 9))


def two(first: bytes, second: bytes) -> Prompt:
    return prompt(tokens(10, 8), (first, 8), tokens(20, 8), (second, 8), tokens(30, 1))


B05 = {
    "the first block touches the picture": (m1(PICTURE_A), m1(PICTURE_B), 0),
    "text before the picture is shared, text after it is not": (m2(PICTURE_A), m2(PICTURE_B), 8),
    "the same picture": (m2(PICTURE_A), m2(PICTURE_A), 24),
    "one token in front": (m2(PICTURE_A), m2(PICTURE_A, 7), 0),
    "the first of two pictures differs": (two(PICTURE_A, PICTURE_B), two(PICTURE_B, PICTURE_B), 8),
}


def chain(given: Prompt, every: int = 8, link_bytes: int = 32) -> tuple[bytes, ...]:
    ids = np.array(given.ids, dtype=np.int32)
    return chain_digests(KEY, ids, every, given.extras, link_bytes=link_bytes)


def common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


@pytest.mark.parametrize("name", B05)
def test_b05_links_meet_only_before_what_differs(name: str) -> None:
    first, second, expected = B05[name]
    assert PICTURE_A != PICTURE_B and PICTURE_A[-2:] == PICTURE_B[-2:]
    assert 8 * common(chain(first), chain(second)) == expected


@pytest.mark.parametrize("name", B05)
def test_b05_a_ledger_root_of_ones_own_loses_hits_and_makes_none(name: str, make_driver: Any) -> None:
    """The root depends on all extras of a request, so only the same picture at the same place hits."""
    first, second, expected = B05[name]
    driver = make_driver(block_size=8, num_blocks=64)
    for given in (first, second):
        scope = Scope("a", 1, scoped_world(WORLD, given.extras))
        content = np.array(given.ids, dtype="<i4").tobytes()
        found = driver.ledger.probe(scope, content).match.runtime
        command = msgspec.structs.replace(driver.admit_command(list(given.ids)), scope=scope)
        handle = driver.apply(command).request
        driver.prefill(handle)
        driver.publish(handle)
        driver.release(handle)
    assert found == (expected if first == second else 0)


def test_a_picture_without_its_whole_digest_is_refused() -> None:
    for cut in (b"", PICTURE_A[:2], PICTURE_A[:16]):
        with pytest.raises(LengthMismatch, match="media digest"):
            PrefixExtras(spans=(ContentSpan("media", 0, 4, cut),))
    with pytest.raises(LengthMismatch, match="adapter"):
        PrefixExtras(adapter=b"my-adapter")
    with pytest.raises(NegativeCount):
        PrefixExtras(spans=(ContentSpan("media", 0, 0, PICTURE_A),))


def test_f0c1_a_token_changes_its_link_and_all_after_it_a_salt_all_of_them() -> None:
    given, expected = FACTS["F0C1"]["inputs"], FACTS["F0C1"]["expected"]
    ids = np.arange(given["tokens"], dtype=np.int32)
    changed = ids.copy()
    changed[37] = 999
    base = chain_digests(KEY, ids, given["P"])

    def told(other: Sequence[bytes]) -> list[str]:
        return ["equal" if one == two else "different" for one, two in zip(base, other, strict=True)]

    assert told(chain_digests(KEY, changed, given["P"])) == expected["change_at_37"]
    salted = chain_digests(KEY, ids, given["P"], PrefixExtras(salt=b"s"))
    assert told(salted) == expected["salt_changed_in_block_0_only"]
    assert len(chain_digests(KEY, np.arange(50, dtype=np.int32), 16)) == expected["hashes_of_50_tokens"]


def test_every_extra_changes_what_it_should_and_fields_never_run_together() -> None:
    ids = np.arange(64, dtype=np.int32)
    base = chain_digests(KEY, ids, 16)
    whole = (
        PrefixExtras(adapter=digest(b"adapter")),
        PrefixExtras(salt=b"salt"),
        PrefixExtras(view="bigrams"),
        PrefixExtras(salt=b"tokens", view=""),
    )
    heads = [chain_digests(KEY, ids, 16, extras) for extras in whole]
    assert all(common(base, other) == 0 for other in heads)
    assert len({other[0] for other in heads}) == len(whole)
    rows = PrefixExtras(spans=(ContentSpan("embeddings", 32, 16, digest(b"rows")),))
    media = PrefixExtras(spans=(ContentSpan("media", 32, 16, digest(b"rows")),))
    moved = PrefixExtras(spans=(ContentSpan("media", 33, 15, digest(b"rows")),))
    chains = [chain_digests(KEY, ids, 16, extras) for extras in (rows, media, moved)]
    assert [common(base, other) for other in chains] == [2, 2, 2], "a span ends where the next block begins"
    assert len({other[2] for other in chains}) == 3
    worlds = {scoped_world(WORLD, extras) for extras in (*whole, rows, media, moved)}
    assert len(worlds) == 7 and WORLD not in worlds and scoped_world(WORLD, NO_EXTRAS) == WORLD


def test_f0c2_a_partial_tail_is_named_with_its_valid_rows_and_policy() -> None:
    given, expected = FACTS["F0C2"]["inputs"], FACTS["F0C2"]["expected"]
    ids, parent = np.array(given["tokens"], dtype=np.int32), digest(given["parent"].encode())
    two, three = [tail_digest(KEY, parent, ids, rows, "tail-v1") for rows in given["valid_rows"]]
    assert (two == three) is expected["keys_equal"]
    assert tail_digest(KEY, parent, ids, 3, "tail-v2") != three
    assert tail_digest(KEY, digest(b"h2"), ids, 3, "tail-v1") != three
    assert tail_digest(KEY, parent, ids, 3, "tail-v1", PrefixExtras(salt=b"s")) != three
    assert tail_digest(KEY, parent, ids[:2], 2, "tail-v1") == two, (
        "rows beyond the valid ones are not covered"
    )
    with pytest.raises(EmptyInput):
        tail_digest(KEY, parent, ids, 0, "tail-v1")
    with pytest.raises(LengthMismatch):
        tail_digest(KEY, parent, ids, 4, "tail-v1")


def test_weak_links_never_make_a_wrong_hit_and_are_counted(make_driver: Any) -> None:
    """With links of one byte the routing index believes in hits that are none; the ledger compares tokens."""
    driver, routing, counts = make_driver(block_size=4, num_blocks=1024), RoutingIndex(60.0), RequestCounts()
    routing.attach("replica", "one")
    generator = np.random.default_rng(1)
    wrong = 0
    for _ in range(120):
        given = Prompt(tuple(generator.integers(0, 50, 17).tolist()), NO_EXTRAS)
        links = chain(given, 4, link_bytes=1)
        route = routing.route("a", 1, links, 0.0)
        assert isinstance(route, RouteReceipt)
        admitted = driver.admit(list(given.ids))
        held = admitted.match.runtime
        published = {tuple(tokens.tolist()[:held]) for _, tokens, _ in driver.ledger.paths("a")}
        assert held == 0 or given.ids[:held] in published
        wrong += route.expected_hit_tokens > held
        counts.count_route(route.expected_hit_tokens, held)
        driver.prefill(admitted.request)
        driver.publish(admitted.request)
        driver.release(admitted.request)
        ends: list[tuple[bytes, int]] = [(link, 4 * (at + 1)) for at, link in enumerate(links)]
        routing.publish("a", 1, "one", ends)
    assert counts.report().unproved_routes == wrong > 20
    assert routing.collisions > 20
