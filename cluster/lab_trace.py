"""Traces of prefix requests, and how a cache of a given size would have done on them.

Owns the reading of traces and the replay. A request is a path of prefix blocks; a hit counts until the first miss, and only
leaves are evicted. Policies are the server's own, over the server's own candidate queue. Invariant: nothing here looks into
the future but the two optima, which are offline and say so.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path as FilePath
from typing import Any

import msgspec

from copyhold.actors.cache_settings import DEFAULT_POLICY, LAB_POLICIES, refuse_lossy
from copyhold.actors.leaf_queue import LeafQueue
from copyhold.kvcore.contract_errors import LossyEvictionInExactMode

from .errors import UsageError

_NEVER = 1 << 60
_SPREAD = 0x9E3779B97F4A7C15
OPTIMUM, OPTIMUM_LEAF_FIRST = "optimum", "optimum-leaf-first"


class Trace(msgspec.Struct, frozen=True):
    """``paths``: per request, the numbers of its prefix blocks, root side first; equal numbers are equal prefixes."""

    paths: tuple[tuple[int, ...], ...]
    num_blocks: int
    reply_tokens: tuple[int, ...] = ()
    """Per request, the length of its reply, where the trace tells."""

    @property
    def asked_blocks(self) -> int:
        return sum(map(len, self.paths))


class Replay(msgspec.Struct, frozen=True):
    """One policy at one capacity (K199: more than a hit rate). All counts are blocks."""

    policy: str
    hit_rate: float
    capacity: int
    evictions: int
    seconds: float
    hit_blocks: int
    asked_blocks: int
    published_blocks: int
    evicted_unused_blocks: int


def read_trace(file: FilePath, block_size: int) -> Trace:
    """JSONL of objects with ``hash_ids``, of ids, or of token lists; CSV of ids or token lists, one request a line.

    Token lists are cut into whole blocks of ``block_size``. Raises: ``UsageError`` with the line.
    """
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    numbers: dict[tuple[int, Any], int] = {}
    paths: list[tuple[int, ...]] = []
    replies: list[int] = []
    for labels, reply_tokens in _requests(text, file, block_size):
        path: list[int] = []
        for label in labels:
            path.append(numbers.setdefault((path[-1] if path else -1, label), len(numbers)))
        if path:
            paths.append(tuple(path))
            replies.append(reply_tokens)
    if not paths:
        raise UsageError(f"{file} holds no request")
    return Trace(tuple(paths), len(numbers), tuple(replies) if any(replies) else ())


def _requests(text: str, file: FilePath, block_size: int) -> Iterator[tuple[Sequence[Any], int]]:
    """Labels of each request's blocks, and the tokens of its reply, 0 where they are not told."""
    lines = text.splitlines()
    if file.suffix.lower() == ".csv":
        for row in csv.reader(lines):
            cells = [cell.strip() for cell in row if cell.strip()]
            if len(cells) > 1:
                yield _pages(cells, block_size), 0
            elif cells:
                yield cells, 0
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise UsageError(f"{file}, line {number}: {error}") from error
        if isinstance(value, dict):
            reply = value.get("output_length", 0)
            value = value.get("hash_ids")
            if not isinstance(value, list) or not all(type(one) in (int, str) for one in value):
                raise UsageError(f"{file}, line {number}: no list under hash_ids")
            yield value, reply if type(reply) is int else 0
        elif isinstance(value, list) and all(type(token) is int for token in value):
            yield _pages(value, block_size), 0
        elif type(value) in (int, str):
            yield [value], 0
        else:
            raise UsageError(
                f"{file}, line {number}: neither an id, a token list nor an object with hash_ids"
            )


def _pages(tokens: Sequence[Any], block_size: int) -> list[tuple[Any, ...]]:
    whole = len(tokens) // block_size * block_size
    return [tuple(tokens[at : at + block_size]) for at in range(0, whole, block_size)]


class PrefixCache:
    """A cache of prefix blocks under one policy; only leaves go."""

    def __init__(self, policy: str, num_blocks: int, capacity: int) -> None:
        self.capacity = capacity
        self.evictions = self.unused = self.published = 0
        self.policy = LAB_POLICIES[policy](num_blocks, capacity)
        self._parent = [-1] * num_blocks
        self._children = [0] * num_blocks
        self._present = bytearray(num_blocks)
        self._hit = bytearray(num_blocks)
        self._size = 0
        self._queue: LeafQueue[int] = LeafQueue(self.policy, self._exposed)

    def present(self) -> list[int]:
        """Numbers of the cached blocks."""
        return [block for block, held in enumerate(self._present) if held]

    def ask(self, request: Sequence[int], reply_tokens: int = 0) -> int:
        """One request; how many of its blocks were hits. Afterwards at most ``capacity`` blocks are cached."""
        path, hits = list(request), 0
        while hits < len(path) and self._present[path[hits]]:
            self._hit[path[hits]] = 1
            hits += 1
        self.policy.touched(path[:hits])
        if hits < len(path):
            self._publish(path, hits)
        self.policy.held(path, reply_tokens)
        self._queue.push(path[-1])
        self._shrink()
        return hits

    def _publish(self, path: Sequence[int], hits: int) -> None:
        fresh = path[hits:]
        prints = [(block + 1) * _SPREAD & (1 << 64) - 1 for block in fresh]
        self.policy.published(fresh, hits, prints)
        parent = path[hits - 1] if hits else -1
        for block in fresh:
            self._present[block], self._hit[block] = 1, 0
            self._parent[block] = parent
            if parent >= 0:
                self._children[parent] += 1
            parent = block
        self._size += len(fresh)
        self.published += len(fresh)

    def _shrink(self) -> None:
        while self._size > self.capacity:
            lowest = self._queue.lowest()
            assert lowest is not None, "a cache that holds something has a leaf"
            block = lowest.node
            self._queue.take(block)
            self.policy.freed(block)
            self._present[block] = 0
            self._size -= 1
            self.evictions += 1
            self.unused += not self._hit[block]
            parent = self._parent[block]
            if parent >= 0:
                self._children[parent] -= 1
                if not self._children[parent]:
                    self._queue.push(parent)

    def _exposed(self, block: int) -> int | None:
        return block if self._present[block] and not self._children[block] else None


def replay(trace: Trace, policy: str, capacity: int) -> Replay:
    """Play a trace through one policy from an empty cache; ``default`` is the server's default policy."""
    if policy in (OPTIMUM, OPTIMUM_LEAF_FIRST):
        return _replay_optimum(trace, capacity, policy)
    started_s = time.perf_counter()
    cache = PrefixCache(DEFAULT_POLICY if policy == "default" else policy, trace.num_blocks, capacity)
    replies = trace.reply_tokens or (0,) * len(trace.paths)
    hits = sum(map(cache.ask, trace.paths, replies))
    return _result(trace, policy, capacity, started_s, hits, (cache.evictions, cache.published, cache.unused))


def _replay_optimum(trace: Trace, capacity: int, name: str) -> Replay:
    """Evict what is needed farthest in the future, a newcomer included.

    ``optimum`` takes blocks as independent pages, root side first where several are needed at the same time;
    ``optimum-leaf-first`` takes the leaf side first, so that what it keeps can be hit.
    """
    started_s = time.perf_counter()
    sign = -1 if name == OPTIMUM_LEAF_FIRST else 1
    upcoming: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for number in range(len(trace.paths) - 1, -1, -1):
        path = trace.paths[number]
        next_uses.append([upcoming.get(block, _NEVER) for block in path])
        upcoming.update(dict.fromkeys(path, number))
    cached: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    used: set[int] = set()
    hits = evictions = published = unused = 0
    for path, next_use in zip(trace.paths, reversed(next_uses), strict=True):
        found = next((index for index, block in enumerate(path) if block not in cached), len(path))
        hits += found
        used.update(path[:found])
        for depth, block in enumerate(path):
            published += block not in cached
            cached[block] = next_use[depth]
            heappush(heap, (-next_use[depth], sign * depth, block))
        while len(cached) > capacity:
            when, _, block = heappop(heap)
            if cached.get(block) == -when:
                del cached[block]
                evictions += 1
                unused += block not in used
                used.discard(block)
    return _result(trace, name, capacity, started_s, hits, (evictions, published, unused))


def _result(
    trace: Trace, policy: str, capacity: int, started_s: float, hits: int, counts: tuple[int, int, int]
) -> Replay:
    evictions, published, unused = counts
    seconds = time.perf_counter() - started_s
    asked = trace.asked_blocks
    return Replay(policy, hits / asked, capacity, evictions, seconds, hits, asked, published, unused)


def policies_to_play(wanted: str | None) -> list[str]:
    """Names of the rows: the default, LRU and the optima always, then the one that was asked for, or all."""
    if wanted is not None:
        try:
            refuse_lossy(wanted)
        except LossyEvictionInExactMode as error:
            raise UsageError(f"--policy {wanted}: {error}; the lab plays exact reuse only") from None
    always = ["default", "lru", OPTIMUM, OPTIMUM_LEAF_FIRST]
    if wanted is not None and wanted not in (*always, *LAB_POLICIES):
        raise UsageError(f"--policy {wanted}: policies are {', '.join(sorted({*always, *LAB_POLICIES}))}")
    others = list(LAB_POLICIES) if wanted is None else [wanted]
    # Entries of a trace carry no priority, so it is LRU there.
    return list(dict.fromkeys([*always, *(name for name in others if name != "priority" or wanted)]))


def capacities_of_plot(trace: Trace, capacity: int) -> list[int]:
    """Capacities of a curve: octaves around ``capacity``, none beyond what the trace can fill."""
    most = min(capacity * 8, 1 << (trace.num_blocks - 1).bit_length())
    around = {max(1, capacity * 2**step // 8) for step in range(7)}
    return sorted(one for one in around if one <= most)


def rates_by_capacity(rows: Sequence[Replay]) -> Mapping[str, list[tuple[int, float]]]:
    """Points of each policy's curve."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        curves.setdefault(row.policy, []).append((row.capacity, row.hit_rate))
    return curves
