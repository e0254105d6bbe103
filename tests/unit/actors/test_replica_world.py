"""The world of a replica: equal checkpoints and cuts share a digest, whatever changes a row's meaning does not."""

from __future__ import annotations

from pathlib import Path

from local_replica import BLOCK
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.actors.world import world_of
from copyhold.models.convert import convert


def test_the_same_checkpoint_gives_the_same_world_in_any_folder(tmp_path: Path):
    worlds = {
        world_of(convert(make_tiny_checkpoint(tmp_path / name), tmp_path / f"{name}-cache", 1), BLOCK)
        for name in ("one", "two")
    }
    assert len(worlds) == 1
    assert len(worlds.pop()) == 32


def test_another_cut_block_size_or_weight_is_another_world(checkpoints, tmp_path: Path):
    other = convert(make_tiny_checkpoint(tmp_path / "other", seed=1), tmp_path / "cache", 1)
    same = convert(make_tiny_checkpoint(tmp_path / "same"), tmp_path / "cache", 1)
    worlds = [
        world_of(checkpoints(1), BLOCK),
        world_of(checkpoints(2), BLOCK),
        world_of(checkpoints(1), 2 * BLOCK),
        world_of(checkpoints(1), BLOCK, "bfloat16"),
        world_of(checkpoints(1), BLOCK, "float16"),
        world_of(other, BLOCK),
        world_of(same, BLOCK),
    ]
    assert len(set(worlds)) == len(worlds)
