"""Several cache groups with block sizes of their own: one command, all groups or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.audit import audit
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    RowSpan,
    Scope,
)
from copyhold.kvcore.errors import MalformedCommand, OutOfMemory
from copyhold.kvcore.ledger import Ledger


class Groups:
    """A ledger of several groups, audited after every command."""

    def __init__(self, *sizes_and_blocks: tuple[int, int]) -> None:
        self.ledger = Ledger()
        groups = tuple(GroupSpec(f"g{at}", *spec) for at, spec in enumerate(sizes_and_blocks))
        self.number = 0
        self.apply(Genesis(b"w", groups, 8, 256, "pool"))

    def apply(self, command: Any) -> Any:
        receipt = self.ledger.apply(command)
        audit(self.ledger)
        return receipt

    def admit(self, tokens: list[int], namespace: str = "a") -> Any:
        self.number += 1
        content = np.array(tokens, dtype="<i4").tobytes()
        return self.apply(Admit(self.number, Scope(namespace, 1, b"w"), content))

    def compute(self, handle: Any) -> Any:
        self.number += 1
        view = self.ledger.request(handle)
        span = RowSpan(handle, view.valid_rows, view.num_tokens - view.valid_rows)
        self.apply(Dispatch(self.number, (span,)))
        return self.apply(Complete(self.number, ((0, 7),)))

    def serve(self, tokens: list[int]) -> Any:
        receipt = self.admit(tokens)
        self.compute(receipt.request)
        self.apply(Publish((receipt.request,)))
        self.apply(Release(receipt.request, "finish"))
        return receipt

    def free(self) -> list[int]:
        return [self.ledger.gauge(group).free for group in range(len(self.ledger.state.pools))]


def test_hits_are_multiples_of_the_alignment_and_every_group_has_its_blocks() -> None:
    groups = Groups((4, 40), (6, 40))
    groups.serve(list(range(1, 31)))
    again = groups.admit([*range(1, 31), 99])
    assert again.match.alignment == 12 and again.match.runtime == 24
    shared = [(handle.group, handle.block) for handle in again.shared_blocks]
    assert [group for group, _ in shared] == [0] * 6 + [1] * 4
    assert len(groups.ledger.table(again.request, 0)) == 8 and len(groups.ledger.table(again.request, 1)) == 6


def test_a_prompt_that_one_group_cannot_hold_takes_nothing_from_the_others() -> None:
    groups = Groups((4, 40), (8, 4))
    before, free = groups.ledger.machine_digest, groups.free()
    groups.admit(list(range(1, 17)))
    first = groups.ledger.machine_digest
    with pytest.raises(OutOfMemory) as caught:
        groups.admit(list(range(50, 75)))
    assert (caught.value.group, caught.value.needed_blocks, caught.value.free_blocks) == (1, 4, 2)
    assert groups.ledger.machine_digest == first != before and groups.free() == [free[0] - 4, free[1] - 2]


def test_a_dispatch_that_one_group_cannot_hold_grows_none() -> None:
    groups = Groups((4, 40), (8, 2))
    request = groups.admit(list(range(1, 17))).request
    groups.compute(request)
    free, digest = groups.free(), groups.ledger.machine_digest
    with pytest.raises(OutOfMemory):
        groups.apply(Dispatch(99, (RowSpan(request, 16, 1),)))
    assert groups.free() == free and groups.ledger.machine_digest == digest


def test_abort_gives_every_group_back_and_fences_every_handle() -> None:
    groups = Groups((4, 40), (6, 40))
    committed, free = groups.ledger.committed_digest, groups.free()
    receipt = groups.admit(list(range(1, 31)))
    groups.apply(Abort(groups.number))
    assert groups.ledger.committed_digest == committed and groups.free() == free
    for handle in receipt.new_blocks:
        assert int(groups.ledger.state.pools[handle.group].generation.array[handle.block]) > handle.generation


def test_a_shared_tail_is_copied_in_the_groups_where_it_is_partial() -> None:
    groups = Groups((4, 40), (6, 40))
    parent = groups.admit(list(range(1, 9))).request
    groups.compute(parent)
    (child,) = groups.apply(Fork(parent, 1)).children
    receipt = groups.apply(Dispatch(99, (RowSpan(child, 8, 1),)))
    assert [(copy.group, copy.rows) for copy in receipt.copies] == [(1, 2)], "8 rows end a block of 4"
    assert [handle.group for handle in receipt.new_blocks] == [0, 1]
    groups.apply(Complete(99))


def test_eviction_and_revocation_reach_every_group() -> None:
    groups = Groups((4, 40), (6, 40))
    groups.serve(list(range(1, 31)))
    groups.serve(list(range(100, 113)))
    leaf = groups.ledger.evictable_leaves()[0]
    assert groups.apply(Evict((leaf.handle,))).freed_blocks == len(leaf.blocks) // 3 * 5
    receipt = groups.apply(AdvanceGeneration("a", 2))
    assert groups.free() == [40, 40]
    assert receipt.scrub and receipt.scrub_others[0]
    assert groups.ledger.residue("a", 2, 0) == groups.ledger.residue("a", 2, 1) == ()


def test_another_scope_s_bytes_are_scrubbed_in_every_group() -> None:
    groups = Groups((4, 8), (8, 4))
    groups.serve(list(range(1, 33)))
    groups.apply(Evict((groups.ledger.evictable_leaves()[0].handle,)))
    receipt = groups.admit(list(range(1, 17)), "b")
    assert (len(receipt.scrub), len(receipt.scrub_others[0])) == (4, 2)


def test_group_names_are_distinct() -> None:
    twice = (GroupSpec("g", 4, 8), GroupSpec("g", 4, 8))
    with pytest.raises(MalformedCommand):
        Ledger().apply(Genesis(b"w", twice, 8, 64, "pool"))
