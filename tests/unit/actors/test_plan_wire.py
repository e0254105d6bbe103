"""The wire form of plans and evidence: every command survives, everything else is refused."""

from __future__ import annotations

import typing

import msgspec
import pytest

from copyhold.actors.plan import (
    KVAuditOrder,
    KVAuditResult,
    PurgeOrder,
    StepEvidence,
    StepPlan,
    decode_evidence,
    decode_plan,
    encode_evidence,
    encode_plan,
)
from copyhold.kvcore.commands import (
    Abort,
    Admit,
    AdvanceGeneration,
    Command,
    Complete,
    Dispatch,
    Evict,
    Fork,
    Genesis,
    GroupSpec,
    NodeHandle,
    PackedComplete,
    PackedDispatch,
    Publish,
    PublishTail,
    Release,
    RequestHandle,
    Reset,
    RowSpan,
    Scope,
    Truncate,
)
from copyhold.namespace.records import RankEvidence

HANDLE, NODES = RequestHandle(3, 9), (NodeHandle(4, 2), NodeHandle(1, 7))
COMMANDS: list[Command] = [
    Genesis(b"w" * 32, (GroupSpec("full", 16, 64),), 8, 512, "replica-0.1"),
    AdvanceGeneration("tenant-a", 4),
    Admit(11, Scope("tenant-a", 4, b"w" * 32), bytes(range(64)), False, NODES),
    Dispatch(12, (RowSpan(HANDLE, 32, 5), RowSpan(RequestHandle(0, 1), 0, 1)), NODES),
    Complete(12, ((0, 17), (1, 300)), (2,)),
    Publish((HANDLE, RequestHandle(0, 1))),
    PublishTail(HANDLE, 1),
    Admit(13, Scope("tenant-a", 4, b"w" * 32), bytes(8), tail_policy=1),
    Evict((NodeHandle(-2, 3),)),
    Release(HANDLE, "cancel"),
    Evict(NODES),
    Abort(11),
    Fork(HANDLE, 3),
    Truncate(HANDLE, 40),
    Reset(Scope("tenant-a", 4, b"w" * 32)),
    PackedDispatch(12, bytes(64), NODES),
    PackedComplete(12, bytes(32), bytes(8)),
]
PURGE = PurgeOrder("tenant-a", 4, "nonce")
AUDIT = KVAuditOrder(bytes(64), (5, 2), (0, 15), ((1,),))
RANK_EVIDENCE = RankEvidence(
    nonce="nonce",
    incarnation="replica-0.1",
    rank=1,
    namespace="tenant-a",
    generation_new=4,
    log_index=20,
    machine_digest="ab",
    inventory_before_blocks=3,
    inventory_after_blocks=0,
    blocks_released=3,
    blocks_zeroed=3,
    bytes_zeroed=3072,
    nonzero_bytes=0,
    public_key_id="key",
    signature="sig",
)


def test_the_list_below_names_every_command():
    assert {type(command) for command in COMMANDS} == set(typing.get_args(Command))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_plan_with_any_command_survives_the_wire(command: Command):
    plan = StepPlan("replica-0.1", 7, 40, (command, COMMANDS[3]), (0, 1), PURGE, AUDIT)
    decoded = decode_plan(encode_plan(plan))
    assert decoded == plan
    assert type(decoded.commands[0]) is type(command)


def test_a_plan_without_orders_and_an_empty_one_survive_the_wire():
    for plan in (StepPlan("i", 0, 0, tuple(COMMANDS)), StepPlan("i", 0, 0, ())):
        assert decode_plan(encode_plan(plan)) == plan


def test_evidence_survives_the_wire():
    audit = KVAuditResult(1, 48, 0.000_125)
    full = StepEvidence("replica-0.1", 7, 1, 42, bytes(range(16)), (5, 6), 1234, RANK_EVIDENCE, audit, "why")
    for evidence in (full, StepEvidence("replica-0.1", 7, 1, 42, bytes(16))):
        assert decode_evidence(encode_evidence(evidence)) == evidence


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_a_cut_or_foreign_message_is_refused(cut: int):
    message = encode_plan(StepPlan("replica-0.1", 7, 40, tuple(COMMANDS)))
    with pytest.raises(msgspec.DecodeError):
        decode_plan(message[:cut])
    with pytest.raises(msgspec.DecodeError):
        decode_plan(msgspec.msgpack.encode(["replica-0.1", "seven", 40, []]))
    with pytest.raises(msgspec.DecodeError):
        decode_plan(msgspec.msgpack.encode(["replica-0.1", 7, 40, [["no such command", 1]]]))
