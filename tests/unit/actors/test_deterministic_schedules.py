"""Deterministic mode: one hundred random schedules, and every request has the bits it has alone in empty memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.actors.in_process import InProcessReplica, InProcessStream, ReplicaShape
from copyhold.models.cold_run import cold_run
from copyhold.models.convert import convert
from copyhold.models.deterministic import FixedRowsLinear
from copyhold.models.layout import Dtype
from copyhold.models.shard_set import ShardSet

NEW_TOKENS = 5
SCHEDULES = {(1, "float32"): range(50), (2, "float32"): range(50, 80), (1, "bfloat16"): range(80, 100)}
PROMPTS = [
    [3 + (7 * family + 3 * i) % 290 for i in range(shared)]
    + [3 + (31 * own + i * i) % 290 for i in range(own)]
    for family, shared in enumerate((37, 64))
    for own in (1, 9, 22, 40)
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose ffn is wide enough that a single row's product is cut differently from two rows'."""
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("wide"), num_heads=6, num_kv_heads=3, intermediate_size=1536 * 2
    )


def ranks(source: Path, tp_size: int, dtype: Dtype = "float32", deterministic: bool = True) -> ShardSet:
    torch.set_num_threads(1)
    return ShardSet(
        convert(source, source.parent / "cache", tp_size, dtype=dtype), deterministic, kv_dtype=dtype
    )


@pytest.fixture(scope="module", params=SCHEDULES, ids=str)
def deterministic(source: Path, request: pytest.FixtureRequest) -> Iterator[ShardSet]:
    made = ranks(source, *request.param)
    yield made
    made.close()


def digest(logits: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(row.tobytes() for row in logits)).hexdigest()


def play(
    shards: ShardSet, seed: int, other_block_sizes: tuple[int, ...] = ()
) -> tuple[list[tuple[int, InProcessStream]], Counter[str]]:
    """One random schedule: who comes when, cut how, in how much memory; (prompt, stream) of every request."""
    rng = np.random.default_rng(seed)
    longest = max(len(prompt) for prompt in PROMPTS) + NEW_TOKENS
    shape = ReplicaShape(
        num_blocks=-(-longest // 16) + int(rng.integers(0, 10)),
        block_size=16,
        max_requests=int(rng.integers(1, 7)),
        chunk_tokens=int(rng.integers(1, 65)),
        step_tokens=int(rng.integers(8, 129)),
        other_block_sizes=other_block_sizes,
    )
    replica = InProcessReplica(shards, shape)
    streams: list[tuple[int, InProcessStream]] = []
    for _ in range(int(rng.integers(3, 9))):
        number = int(rng.integers(len(PROMPTS)))
        namespace = "ab"[int(rng.integers(2))]
        streams.append((number, replica.submit(PROMPTS[number], namespace, NEW_TOKENS)))
        for _ in range(int(rng.integers(0, 6))):
            if not replica.scheduler.idle:
                replica.step()
    replica.run()
    replica.counts["hits"] += sum(stream.cached_tokens > 0 for _, stream in streams)
    replica.close()
    return streams, replica.counts


def test_every_request_of_every_schedule_has_the_bits_it_has_alone(deterministic: ShardSet) -> None:
    alone = [digest(list(cold_run(deterministic, prompt, NEW_TOKENS).logits)) for prompt in PROMPTS]
    happened: Counter[str] = Counter()
    for seed in SCHEDULES[deterministic.tp_size, deterministic.checkpoint.dtype]:
        streams, counts = play(deterministic, seed)
        happened += counts
        for number, stream in streams:
            assert len(stream.logits) == NEW_TOKENS, (seed, number, stream.failure)
            assert stream.receipt is not None and stream.receipt.deterministic
            assert digest(stream.logits) == alone[number], f"schedule {seed}, prompt {number}"
    expected = ("hits", "shared_reads", "partial_chunks", "evicted", "preempted")
    assert all(happened[kind] >= 3 for kind in expected), happened


@pytest.mark.parametrize("other_block_sizes", [(32,), (32, 16)], ids=str)
def test_layers_divided_among_cache_groups_change_no_bit(
    tmp_path: Path, other_block_sizes: tuple[int, ...]
) -> None:
    """Three layers in two and three groups; what a request has alone is computed through one table."""
    shards = ranks(make_tiny_checkpoint(tmp_path / "three", num_layers=3), 1)
    alone = [digest(list(cold_run(shards, prompt, NEW_TOKENS).logits)) for prompt in PROMPTS]
    happened: Counter[str] = Counter()
    for seed in range(200, 220):
        streams, counts = play(shards, seed, other_block_sizes)
        happened += counts
        for number, stream in streams:
            assert len(stream.logits) == NEW_TOKENS, (seed, number, stream.failure)
            assert digest(stream.logits) == alone[number], f"schedule {seed}, prompt {number}"
    shards.close()
    expected = ("hits", "shared_reads", "other_shared_reads", "partial_chunks", "evicted", "preempted")
    assert all(happened[kind] for kind in expected), happened


def test_stored_rows_have_the_bits_of_a_cold_recompute(deterministic: ShardSet) -> None:
    replica = InProcessReplica(deterministic, ReplicaShape(num_blocks=64, chunk_tokens=13, step_tokens=40))
    for prompt in PROMPTS:
        replica.submit(prompt, "a", NEW_TOKENS)
    replica.run()
    rows, worst = replica.audit("a")
    replica.close()
    assert rows > 100 and worst == 0.0


def test_without_the_mode_a_batch_can_change_bits(source: Path) -> None:
    """The control: where this machine's library cuts a single row differently, the same comparison sees it."""
    shards = ranks(source, 1, deterministic=False)
    careful = ranks(source, 1)
    down = careful.shards[0]._weights.layers[0].down
    assert isinstance(down, FixedRowsLinear)
    alone = cold_run(shards, PROMPTS[0], NEW_TOKENS)
    replica = InProcessReplica(shards, ReplicaShape(num_blocks=64))
    streams = [replica.submit(prompt, "a", NEW_TOKENS) for prompt in PROMPTS[:4]]
    replica.run()
    replica.close()
    same = digest(streams[0].logits) == digest(list(alone.logits))
    assert streams[0].tokens == list(alone.tokens)
    assert streams[0].receipt is not None and not streams[0].receipt.deterministic
    assert same == (1 in down.sizes), "the library's behaviour and the check's finding agree"
    shards.close()
    careful.close()
