"""Addresses against memory that kernels use, and rules about who may make what."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from copyhold.kernels.pool import KVPool
from copyhold.kvcore import addresses, compatibility
from copyhold.kvcore.addresses import Coordinate, View, require_address, translate, translate_many
from copyhold.kvcore.byte_ledger import group_row, row_bytes
from copyhold.kvcore.descriptors import DescriptorTable
from copyhold.kvcore.identity import chain_digests
from copyhold.kvcore.lengths import prefix_lengths
from copyhold.kvcore.placement import place
from copyhold.kvcore.snapshots import snapshot

ROOT = Path(__file__).parents[3]
K_AXES = ("layer", "slot", "token/16", "kv_head", "lane", "token%16")
V_AXES = ("layer", "slot", "token/16", "kv_head", "token%16", "lane")


@pytest.fixture
def placed(make_group: Any, seeded: np.random.Generator) -> tuple[KVPool, View]:
    """A pool of five blocks of 32 tokens filled with distinct numbers, and a request over three of them."""
    pool = KVPool(num_layers=3, num_blocks=5, kv_heads=2, head_dim=8, block_size=32)
    for array in (pool.k, pool.v):
        array[...] = seeded.permutation(array.size).reshape(array.shape)
    group = make_group("full", (0, 1, 2), 32, 5, 2, 8, ("float32", "float32"), (K_AXES, V_AXES))
    manifest = place([group], [(pool.k.ctypes.data, pool.v.ctypes.data)])
    table = DescriptorTable("full", 1, 32, range(5), range(5), [32] * 5)
    return pool, View(manifest, (table,), snapshot(manifest, 70, [[4, 0, 3]], [1], [1]), 1)


def test_a_translated_address_is_where_the_kernels_pool_keeps_the_scalar(placed: tuple[KVPool, View]) -> None:
    pool, view = placed
    for token in (0, 15, 16, 31, 32, 47, 69):
        block, offset = (4, 0, 3)[token // 32], token % 32
        for layer, head, lane in ((0, 0, 0), (1, 1, 3), (2, 0, 7)):
            tile = 2 * block + offset // 16
            expected = {
                "K": pool.k[layer, tile, head, lane, offset % 16],
                "V": pool.v[layer, tile, head, offset % 16, lane],
            }
            for kind, value in expected.items():
                at = translate(view, Coordinate(token, layer, kind, head, lane))
                tensor = view.manifest.groups[0].tensor(kind)
                where = require_address(tensor, at.byte_address)
                assert ctypes.c_float.from_address(where).value == value
                assert at.slot_id.value == block * 32 + offset


def test_a_whole_context_gathers_in_logical_order(placed: tuple[KVPool, View]) -> None:
    pool, view = placed
    tokens = np.arange(70)
    found = translate_many(view, tokens, [2] * 70, ["V"] * 70, [1] * 70, [5] * 70)
    gathered = pool.v.reshape(-1)[found.element_offsets]
    blocks = np.array([4, 0, 3])[tokens // 32]
    rows = pool.v[2, 2 * blocks + tokens % 32 // 16, 1, tokens % 16, 5]
    assert np.array_equal(gathered, rows)


def test_the_pools_bytes_are_its_rows(placed: tuple[KVPool, View]) -> None:
    pool, view = placed
    layout = view.manifest.groups[0].layout
    assert pool.block_bytes == 32 * row_bytes(group_row(layout)).value
    assert pool.total_bytes == layout.keys.total_bytes + layout.values.total_bytes


def test_f0c6_lengths_align_tokens_not_blocks(facts: dict[str, Any]) -> None:
    given, expected = facts["F0C6"]["inputs"], facts["F0C6"]["expected"]
    found = prefix_lengths(given["S_prompt"], given["S_sem"], given["S_indexed"], given["alignment"])
    assert (found.cap, found.runtime) == (expected["S_cap"], expected["S_runtime"])
    assert found.runtime != expected["sample_code_result"]


def test_f0c1_a_change_alters_its_link_and_all_after_it(facts: dict[str, Any]) -> None:
    given, expected = facts["F0C1"]["inputs"], facts["F0C1"]["expected"]
    tokens = np.arange(given["tokens"], dtype=np.int32)
    changed = tokens.copy()
    changed[37] = 999

    def compare(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> list[str]:
        return ["equal" if a == b else "different" for a, b in zip(one, other, strict=True)]

    base = chain_digests(b"salt", tokens, given["P"])
    assert compare(base, chain_digests(b"salt", changed, given["P"])) == expected["change_at_37"]
    assert (
        compare(base, chain_digests(b"else", tokens, given["P"])) == expected["salt_changed_in_block_0_only"]
    )
    assert (
        len(chain_digests(b"salt", np.arange(50, dtype=np.int32), given["P"]))
        == expected["hashes_of_50_tokens"]
    )


def test_a_candidate_is_accepted_by_its_validation_alone() -> None:
    """Nothing that reads rows or computes addresses takes what a lookup returns."""
    for module in (addresses, compatibility):
        for name, function in vars(module).items():
            if callable(function) and not isinstance(function, type) and name.islower():
                hints = get_type_hints(function) if hasattr(function, "__annotations__") else {}
                hints.pop("return", None)
                takes = compatibility.Candidate in hints.values()
                assert takes == (name in ("validate", "require_witness")), name


def test_worlds_are_made_in_one_place() -> None:
    """The logical identity comes from the model's side: one adapter builds it, nothing recomputes it."""
    makers = [
        path.relative_to(ROOT).as_posix()
        for room in ("actors", "cluster", "kernels", "kvcore", "models", "namespace")
        for path in sorted((ROOT / room).glob("*.py"))
        if re.search(r"(?<!class )\bWorldManifest\(", path.read_text("utf-8"))
    ]
    assert makers == ["actors/world.py"]
