"""Commands of the ledger and the handles they name; the wire form of one log record.

Invariant: commands are frozen values; encoding is MessagePack arrays, tagged by the command's name. Handles hold nothing that
could hold them, so the garbage collector is not asked to follow them.
Source: LEDGER "Commands"; contracts K048, K074, K075.
"""

from __future__ import annotations

import sys
from array import array

import msgspec


class GroupSpec(msgspec.Struct, frozen=True, array_like=True):
    """One cache group's pool: rows a block holds and how many blocks there are (the minimum over the ranks).

    `window` 0 is full attention; otherwise a row may read the `window` rows before it, and older ones are given up.
    """

    name: str
    block_size: int
    num_blocks: int
    window: int = 0


class Scope(msgspec.Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """What a grant allows to be read: the key of a prefix root."""

    namespace: str
    generation: int
    world: bytes


class RequestHandle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request slot with the generation it was given out under."""

    slot: int
    generation: int


class NodeHandle(msgspec.Struct, frozen=True, array_like=True, gc=False, cache_hash=True):
    """A tree boundary (where an edge ends) with its generation. Node 0 stands for "the root"; minus a number names the
    partial tail of that number.
    """

    node: int
    generation: int


class BlockHandle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A physical block: incarnation of the pool, cache group, block id and the block's generation."""

    pool: str
    group: int
    block: int
    generation: int


class RowSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows [start, start + count) of one request that a step computes."""

    request: RequestHandle
    start: int
    count: int


class Genesis(msgspec.Struct, frozen=True, array_like=True, tag="genesis"):
    """Record 0: fixes pools, slots and the incarnation."""

    world: bytes
    groups: tuple[GroupSpec, ...]
    max_requests: int
    max_model_len: int
    incarnation: str


class AdvanceGeneration(msgspec.Struct, frozen=True, array_like=True, tag="advance"):
    """Raises a namespace's floor: roots below it vanish, their blocks drain."""

    namespace: str
    generation: int


class Admit(msgspec.Struct, frozen=True, array_like=True, tag="admit"):
    """Matches, leases and reserves for one prompt; `tokens` are little-endian int32 bytes.

    `evict` and `trim`, here and in a dispatch, are what an `Evict` would give back before. `tail_policy` names the policy
    whose partial tails may be hit; 0 is "full blocks only".
    """

    transaction: int
    scope: Scope
    tokens: bytes
    lookup: bool = True
    evict: tuple[NodeHandle, ...] = ()
    trim: tuple[BlockHandle, ...] = ()
    tail_policy: int = 0


class Dispatch(msgspec.Struct, frozen=True, array_like=True, tag="dispatch"):
    """Sends a step: pins its requests and reserves blocks for rows beyond their tables."""

    step: int
    rows: tuple[RowSpan, ...]
    evict: tuple[NodeHandle, ...] = ()
    trim: tuple[BlockHandle, ...] = ()


class Complete(msgspec.Struct, frozen=True, array_like=True, tag="complete"):
    """Every rank reported the step. `sampled` pairs a row index with a token; `discarded` are row indices."""

    step: int
    sampled: tuple[tuple[int, int], ...] = ()
    discarded: tuple[int, ...] = ()


class Publish(msgspec.Struct, frozen=True, array_like=True, tag="publish"):
    """Enters the sealed blocks of running requests in the index."""

    requests: tuple[RequestHandle, ...]


class PublishTail(msgspec.Struct, frozen=True, array_like=True, tag="publish_tail"):
    """Enters a request's sealed blocks, then the valid rows after its last whole page as an immutable tail of a policy."""

    request: RequestHandle
    policy: int


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Ends a request: finish, cancel, preempt, revoke or error. Deferred while its step is in flight."""

    request: RequestHandle
    reason: str


class Evict(msgspec.Struct, frozen=True, array_like=True, tag="evict"):
    """Gives back blocks of window groups one by one (`trim`), then whole leaf edges, in order.

    A parent may follow its last child. An edge stays in the index when blocks of a window are trimmed; hits that
    need them become shorter.
    """

    nodes: tuple[NodeHandle, ...]
    trim: tuple[BlockHandle, ...] = ()


class Fork(msgspec.Struct, frozen=True, array_like=True, tag="fork"):
    """Branches a request: every child shares its tokens and the blocks of its valid rows."""

    parent: RequestHandle
    children: int


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag="truncate"):
    """Cuts a request to its first `num_tokens` tokens, of which the last is computed again.

    Deferred while its step is in flight.
    """

    request: RequestHandle
    num_tokens: int


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Drops everything a scope has indexed, unless a request references it."""

    scope: Scope


class PackedDispatch(msgspec.Struct, frozen=True, array_like=True, tag="dispatch_packed"):
    """A Dispatch whose rows are little-endian int64 [rows, 4]: slot, generation, start, count."""

    step: int
    rows: bytes
    evict: tuple[NodeHandle, ...] = ()
    trim: tuple[BlockHandle, ...] = ()


class PackedComplete(msgspec.Struct, frozen=True, array_like=True, tag="complete_packed"):
    """A Complete whose samples are little-endian int64 [n, 2] and whose discarded rows are int64 [n]."""

    step: int
    sampled: bytes = b""
    discarded: bytes = b""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Undoes an Admit whose request was never dispatched and fences its handles."""

    transaction: int


Command = (
    Genesis
    | AdvanceGeneration
    | Admit
    | Dispatch
    | PackedDispatch
    | Complete
    | PackedComplete
    | Publish
    | PublishTail
    | Release
    | Fork
    | Truncate
    | Evict
    | Reset
    | Abort
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def pack(command: Command) -> Command:
    """The same command with its rows in one block of bytes, where it has rows: what a large step is sent as.

    Raises: OverflowError for a number beyond 64 bits; such a command has no packed form.
    """
    if isinstance(command, Dispatch):
        rows = array("q")
        for row in command.rows:
            rows.extend((row.request.slot, row.request.generation, row.start, row.count))
        return PackedDispatch(command.step, _little(rows), command.evict, command.trim)
    if isinstance(command, Complete):
        samples = array("q", [number for pair in command.sampled for number in pair])
        return PackedComplete(command.step, _little(samples), _little(array("q", command.discarded)))
    return command


def _little(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def encode_command(command: Command) -> bytes:
    """One record's bytes."""
    return _ENCODER.encode(command)


def decode_command(record: bytes) -> Command:
    """The command of one record. Raises: msgspec.DecodeError or msgspec.ValidationError on foreign bytes."""
    return _DECODER.decode(record)
