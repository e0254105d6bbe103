"""What ``copyhold ledger bytes`` shows: byte ledgers of given lengths, or of a running server's pools.

Owns the documents and their text. Invariant: every figure is exact and stands under the question it answers;
nothing adds up figures of two questions. Neither Ray, torch nor numba is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any

import msgspec

from copyhold.kvcore.axes import SCALAR_BYTES
from copyhold.kvcore.byte_ledger import (
    GroupRow,
    identities,
    rectangular_ledger,
    request_view_ledger,
    row_bytes,
    savings,
    unique_physical_ledger,
)
from copyhold.kvcore.contract_errors import ContractRefusal
from copyhold.kvcore.fragmentation import expected_tail
from copyhold.kvcore.pool_bytes import gauge_ledger
from copyhold.kvcore.quantities import HeldBytes, RowBytes, plain

from .cli_output import table
from .errors import ClusterError, UsageError

MAX_BLOCKS = 2**20
"""Blocks that one call takes: every block of given lengths is a table entry here."""

STATES = ("free", "evictable", "live", "reserved")
"""A pool's exclusive states, as its gauge names them."""


class PoolFiguresUnusable(ClusterError):
    """The server's answer does not describe its pools; nothing was computed from it."""

    type = "pool_figures_unusable"


class RowGeometry(msgspec.Struct, frozen=True):
    """One token's row; the default is SmolLM2-135M in float32. `kv_heads` is split over the ranks."""

    num_layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    k_dtype: str = "float32"
    v_dtype: str = "float32"
    block_size: int = 16
    ranks: int = 1

    def rows(self) -> tuple[GroupRow, ...]:
        """Each rank's row; the first ranks hold the heads that do not divide. Raises: UsageError."""
        for dtype in (self.k_dtype, self.v_dtype):
            if dtype not in SCALAR_BYTES:
                raise UsageError(f"dtype {dtype!r} is none of {', '.join(SCALAR_BYTES)}")
        if not 1 <= self.ranks <= self.kv_heads:
            raise UsageError(f"{self.ranks} ranks for {self.kv_heads} KV heads")
        whole, extra = divmod(self.kv_heads, self.ranks)
        widths = SCALAR_BYTES[self.k_dtype], SCALAR_BYTES[self.v_dtype]
        return tuple(
            GroupRow("full", self.num_layers, whole + (rank < extra), self.head_dim, *widths)
            for rank in range(self.ranks)
        )


def parse_numbers(text: str, option: str) -> tuple[int, ...]:
    """Comma-separated counts. Raises: UsageError naming the option and the part that is none."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdecimal()):
            raise UsageError(f"{option}: {part!r} is not a count")
    return tuple(int(part) for part in parts)


def ledger_bytes(
    lengths: Sequence[int],
    geometry: RowGeometry = RowGeometry(),  # noqa: B008 (frozen)
    reserved_rows: Sequence[int] | None = None,
    shared_rows: int = 0,
) -> dict[str, Any]:
    """Ledgers of requests of these lengths, rank by rank.

    All requests share their leading `shared_rows`, of which whole blocks are stored once; without
    `reserved_rows` every request reserves its blocks. Raises: UsageError.
    """
    try:
        ranks = [
            _rank_ledgers(lengths, row_bytes(row), geometry.block_size, reserved_rows, shared_rows)
            for row in geometry.rows()
        ]
    except ContractRefusal as refusal:
        raise UsageError(str(refusal)) from refusal
    return {
        "source": "lengths",
        "lengths": [int(length) for length in lengths],
        "shared_rows": shared_rows,
        "geometry": msgspec.to_builtins(geometry),
        "ranks": [{"rank": rank, **ledgers} for rank, ledgers in enumerate(ranks)],
    }


def parse_group(text: str, base: RowGeometry) -> tuple[str, RowGeometry]:
    """`NAME:LAYERS:BLOCK_SIZE` or `NAME:LAYERS:BLOCK_SIZE:KV_HEADS:HEAD_DIM`; the rest is `base`'s. Raises: UsageError."""
    name, *numbers = text.split(":")
    if not name or len(numbers) not in (2, 4):
        raise UsageError(
            f"--group {text!r}: give NAME:LAYERS:BLOCK_SIZE or NAME:LAYERS:BLOCK_SIZE:KV_HEADS:HEAD_DIM"
        )
    counts = parse_numbers(",".join(numbers), "--group")
    if 0 in counts:
        raise UsageError(f"--group {text!r}: a group has at least one of each")
    names = ("num_layers", "block_size", "kv_heads", "head_dim")
    return name, msgspec.structs.replace(base, **dict(zip(names, counts, strict=False)))


def group_ledger_bytes(
    lengths: Sequence[int], groups: Sequence[tuple[str, RowGeometry]], shared_rows: int = 0
) -> dict[str, Any]:
    """The same of several cache groups that all hold every row, each in its own blocks.

    Of the leading `shared_rows` all groups share whole pages of the index, the least common multiple of their block
    sizes. `totals` are the sums over the groups by rank. Raises: UsageError.
    """
    names = [name for name, _ in groups]
    if len(set(names)) != len(names) or len({geometry.ranks for _, geometry in groups}) != 1:
        raise UsageError(f"cache groups {names}: names are distinct, all are split over the same ranks")
    page = lcm(*[geometry.block_size for _, geometry in groups])
    shared = shared_rows // page * page
    found = [{"name": name, **ledger_bytes(lengths, geometry, None, shared)} for name, geometry in groups]
    totals = [
        {
            "rank": rank,
            "stored": sum(part["unique_physical"]["capacity"] for part in parts),
            "tail": sum(part["unique_physical"]["tail"] for part in parts),
            "avoided": sum(part["savings"]["capacity"] for part in parts),
        }
        for rank, parts in enumerate(zip(*[document["ranks"] for document in found], strict=True))
    ]
    return {"source": "groups", "alignment": page, "shared_rows": shared, "groups": found, "totals": totals}


def server_ledger_bytes(pool: Mapping[str, Any], ranks: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a running server: answers of ``AdminClient.pool`` and ``AdminClient.ranks``.

    Raises: PoolFiguresUnusable, when a rank is lost or the answers contradict each other.
    """
    try:
        gauges, statuses = list(pool["replicas"]), list(ranks["ranks"])
        if not gauges or len(statuses) % len(gauges):
            raise PoolFiguresUnusable(f"{len(statuses)} ranks over {len(gauges)} replicas")
        each = len(statuses) // len(gauges)
        replicas = [
            {"replica": at, **_replica_ledgers(gauge, statuses[at * each : (at + 1) * each])}
            for at, gauge in enumerate(gauges)
        ]
    except (KeyError, TypeError, ContractRefusal) as error:
        raise PoolFiguresUnusable(f"{type(error).__name__}: {error}") from error
    return {"source": "server", "replicas": replicas}


def ledger_bytes_text(document: Mapping[str, Any]) -> str:
    """Any of the documents as aligned columns."""
    lines: list[str] = []
    if document["source"] == "groups":
        for group in document["groups"]:
            lines += [f"cache group {group['name']}", ledger_bytes_text(group), ""]
        cells = [
            (f"rank {total['rank']}", *[str(total[part]) for part in ("stored", "tail", "avoided")])
            for total in document["totals"]
        ]
        lines += [_title("all cache groups"), table(cells, ("bytes", "stored", "tail", "avoided"))]
    elif document["source"] == "lengths":
        for rank in document["ranks"]:
            lines += [
                _title(f"rank {rank['rank']}: {rank['row_bytes']} bytes a row"),
                _lengths_table(rank),
                "",
            ]
    else:
        for replica in document["replicas"]:
            for rank in replica["ranks"]:
                title = (
                    f"replica {replica['replica']}, rank {rank['rank']}: {rank['block_bytes']} bytes a block"
                )
                lines += [_title(title), _pool_table(replica, rank), ""]
    return "\n".join(lines).rstrip()


def _rank_ledgers(
    lengths: Sequence[int], row: RowBytes, page: int, reserved_rows: Sequence[int] | None, shared_rows: int
) -> dict[str, Any]:
    view = request_view_ledger(lengths, page, row)
    rows = [int(length) for length in lengths]
    blocks = [-(-held // page) for held in rows]
    if sum(blocks) > MAX_BLOCKS:
        raise UsageError(f"these lengths need {sum(blocks)} blocks, more than {MAX_BLOCKS}")
    reserved = [count * page for count in blocks] if reserved_rows is None else reserved_rows
    rectangle = rectangular_ledger(rows, reserved, row)
    tables, valid = _shared_tables(rows, blocks, page, shared_rows)
    storage = unique_physical_ledger(tables, range(len(valid)), valid, page, row)
    saved = savings(view, storage)
    expected = expected_tail(page, row)
    return {
        "row_bytes": row.value,
        "rectangular": plain(rectangle),
        "request_view": plain(view),
        "unique_physical": {**plain(storage), "block_ids": len(storage.block_ids)},
        "savings": plain(saved),
        "expected_tail_a_request": plain(expected),
        "identities": {
            name: list(figures) for name, figures in identities(rectangle, view, storage, saved).items()
        },
    }


def _shared_tables(
    rows: Sequence[int], blocks: Sequence[int], page: int, shared_rows: int
) -> tuple[list[list[int]], list[int]]:
    """Tables over ids from 0, and the valid rows of each id; whole blocks of the shared rows come first."""
    if shared_rows < 0 or (shared_rows and (not rows or shared_rows > min(rows))):
        raise UsageError(f"{shared_rows} shared rows, the shortest request has {min(rows, default=0)}")
    shared = shared_rows // page
    valid = [page] * shared
    tables: list[list[int]] = []
    for held, count in zip(rows, blocks, strict=True):
        own = range(shared, count)
        tables.append([*range(shared), *range(len(valid), len(valid) + len(own))])
        valid += [min(page, held - index * page) for index in own]
    return tables, valid


def _replica_ledgers(gauge: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = gauge["total"]
    states = {state: gauge[state] for state in STATES}
    ranks = []
    for status in statuses:
        if "pool_bytes" not in status:
            raise PoolFiguresUnusable(
                f"{status.get('name', 'a rank')} gives no figures: {status.get('failure')}"
            )
        held = HeldBytes(status["pool_bytes"])
        if not total or held.value % total:
            raise PoolFiguresUnusable(f"{held.value} bytes are not {total} blocks of one size")
        ledger = gauge_ledger(states, total, held.value // total)
        ranks.append(
            {
                "rank": status["rank"],
                "block_bytes": held.value // total,
                "held_bytes": held.value,
                "total_bytes": ledger.total.value,
                "bytes": plain(ledger.bytes),
                "namespaces": {
                    name: len(blocks) * (held.value // total) for name, blocks in gauge["namespaces"].items()
                },
            }
        )
    return {"log_index": gauge["log_index"], "total_blocks": total, "blocks": states, "ranks": ranks}


def _title(text: str) -> str:
    return f"{text}\n{'-' * len(text)}"


def _lengths_table(rank: Mapping[str, Any]) -> str:
    rectangle, view = rank["rectangular"], rank["request_view"]
    storage, saved, expected = rank["unique_physical"], rank["savings"], rank["expected_tail_a_request"]
    rows = [
        ("reserved for requests", str(rectangle["reserved_rows"]), str(rectangle["reserved"])),
        ("  used by requests", str(rectangle["logical_rows"]), str(rectangle["logical"])),
        ("  slack", str(rectangle["slack_rows"]), str(rectangle["slack"])),
        ("blocks as requests see them", str(view["slots"]), str(view["capacity"])),
        ("  tail", str(view["tail_slots"]), str(view["tail"])),
        ("blocks stored", str(storage["slots"]), str(storage["capacity"])),
        ("  rows stored", str(storage["rows"]), str(storage["materialised"])),
        ("  tail", str(storage["tail_slots"]), str(storage["tail"])),
        ("saved payload", "", str(saved["payload"])),
        ("avoided capacity", "", str(saved["capacity"])),
        ("tail a request, model: " + expected["assumption"], expected["slots"], expected["bytes"]),
    ]
    return table(rows, ("figure", "rows", "bytes"))


def _pool_table(replica: Mapping[str, Any], rank: Mapping[str, Any]) -> str:
    rows = [(state, str(replica["blocks"][state]), str(rank["bytes"][state])) for state in STATES]
    rows.append(("total", str(replica["total_blocks"]), str(rank["total_bytes"])))
    rows.append(("held by the process", "", str(rank["held_bytes"])))
    rows += [(f"indexed for {name}", "", str(size)) for name, size in rank["namespaces"].items()]
    return table(rows, ("blocks", "count", "bytes"))
