"""Fixtures of the actors' tests: a tiny checkpoint cut for one and two ranks, replicas of it, and the cold oracle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

# Support modules of this folder; pytest's importlib mode does not put it on the path.
sys.path.insert(0, str(Path(__file__).parent))

from local_replica import ColdModel, LocalReplica
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.models.convert import convert
from copyhold.models.manifest import ConvertedCheckpoint

Checkpoints = Callable[[int], ConvertedCheckpoint]
Replicas = Callable[..., LocalReplica]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """By number of ranks; three KV heads, so that two ranks hold two and one."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("tiny")
    source = make_tiny_checkpoint(
        root / "source", num_heads=6, num_kv_heads=3, config_overrides={"vocab_size": 1024}
    )
    made = {ranks: convert(source, root / "cache", ranks) for ranks in (1, 2)}
    return made.__getitem__


@pytest.fixture
def replica(checkpoints: Checkpoints) -> Iterator[Replicas]:
    """``replica(ranks, **options)``; closed when the test ends."""
    made: list[LocalReplica] = []

    def make(ranks: int = 1, **options) -> LocalReplica:
        made.append(LocalReplica(checkpoints(ranks), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def cold(checkpoints: Checkpoints) -> ColdModel:
    """Greedy tokens of one prompt alone, computed without scheduler, ledger or cache."""
    return ColdModel(checkpoints(1))
