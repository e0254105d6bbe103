"""``copyhold ledger``: byte ledgers, replay of recorded logs, audits, the bounded exhaustive check of the state machine.

Exit codes: 0 all holds, 1 a log or a check differs, 2 the call was wrong. Imported by every ``copyhold`` command, so
what computes is imported where it runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import ConfigFile, JsonOption, StateDir, state_folder, with_admin
from .cli_output import Output
from .errors import UsageError
from .server_record import find_server

if TYPE_CHECKING:
    from .admin_client import AdminClient

ledger = typer.Typer(help="The ledger: bytes, recorded logs, audits, exhaustive check.", no_args_is_help=True)


@ledger.command("bytes")
def ledger_bytes_command(
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="N,N,...", help="Tokens of each request.")
    ] = None,
    reserved: Annotated[
        str | None, typer.Option("--reserved", metavar="N,N,...", help="Rows reserved for each. [its blocks]")
    ] = None,
    shared: Annotated[int, typer.Option("--shared", min=0, help="Leading rows that all share.")] = 0,
    layers: Annotated[int, typer.Option("--layers", min=1)] = 30,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1)] = 3,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1)] = 64,
    dtype: Annotated[str, typer.Option("--dtype", help="Of K and V.")] = "float32",
    block_size: Annotated[int, typer.Option("--block-size", min=1)] = 16,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Ranks that share the KV heads.")] = 1,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--group", metavar="NAME:LAYERS:BLOCK_SIZE[:KV_HEADS:HEAD_DIM]", help="A cache group; repeat."
        ),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The pools of the running server.")] = False,
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    json: JsonOption = False,
) -> None:
    """Byte ledgers of requests of given lengths, or of a running server's pools."""
    from .admin_client import AdminClient
    from .ledger_bytes import (
        RowGeometry,
        group_ledger_bytes,
        ledger_bytes,
        ledger_bytes_text,
        parse_group,
        parse_numbers,
        server_ledger_bytes,
    )

    if admin and groups:
        raise UsageError("--group is for given --lengths")
    if admin == (lengths is not None):
        raise UsageError("give either --lengths or --admin")
    if lengths is None:
        with AdminClient(find_server(state_folder(config_file, state_dir)).admin_socket) as client:
            document = server_ledger_bytes(client.pool(), client.ranks())
    else:
        geometry = RowGeometry(layers, kv_heads, head_dim, dtype, dtype, block_size, tp)
        rows = None if reserved is None else parse_numbers(reserved, "--reserved")
        counts = parse_numbers(lengths, "--lengths")
        if groups and rows is not None:
            raise UsageError("--reserved is for one cache group, leave out --group")
        if groups:
            document = group_ledger_bytes(counts, [parse_group(group, geometry) for group in groups], shared)
        else:
            document = ledger_bytes(counts, geometry, rows, shared)
    Output(json).emit({"ok": True, **document}, ledger_bytes_text(document))


@ledger.command("replay")
def ledger_replay(
    log: Annotated[Path, typer.Argument(metavar="LOG", exists=True, dir_okay=False)],
    trace: Annotated[bool, typer.Option("--trace", help="Every receipt, one JSON line, on stderr.")] = False,
    against: Annotated[
        Path | None, typer.Option("--against", metavar="LOG2", exists=True, dir_okay=False)
    ] = None,
    json: JsonOption = False,
) -> int:
    """Apply a recorded log again and compare every digest; with --against, find where two logs part."""
    import msgspec

    from copyhold.kvcore.errors import LedgerRefusal
    from copyhold.kvcore.replay import compare_logs, receipt_values, replay

    def show(index: int, receipt: Any) -> None:
        line = msgspec.json.encode({"index": index, **receipt_values(receipt)})
        sys.stderr.write(line.decode() + "\n")

    document: dict[str, Any]
    try:
        report = replay(log, show if trace else None)
        apart = None if against is None else compare_logs(log, against)
        document = {"ok": report.difference is None and apart is None, **msgspec.to_builtins(report)}
        document["against"] = None if apart is None else msgspec.to_builtins(apart)
        document["refusal"] = None
    except LedgerRefusal as refusal:
        document = {"ok": False, "refusal": {"reason": refusal.reason, "detail": str(refusal)}}
    Output(json).emit(document, _replay_text(document))
    return 0 if document["ok"] else 1


@ledger.command("audit")
@with_admin
def ledger_audit(admin: AdminClient, json: JsonOption = False) -> int:
    """Recompute the running server's ledgers, of every replica's scheduler and ranks. Exit code 1: one contradicts itself."""
    findings: dict[str, list[str]] = admin.audit_ledgers()["findings"]
    right = bool(findings) and not any(findings.values())
    lines = [f"{name}: {'; '.join(found) or 'nothing wrong'}" for name, found in findings.items()]
    Output(json).emit({"ok": right, "findings": findings}, "\n".join(lines) or "no ledger runs")
    return 0 if right else 1


@ledger.command("check")
def ledger_check(
    blocks: Annotated[int, typer.Option("--blocks", min=3, max=5, help="Blocks of the first group.")] = 3,
    requests: Annotated[int, typer.Option("--requests", min=2, max=3)] = 2,
    json: JsonOption = False,
) -> int:
    """Explore every reachable state of a tiny ledger, audit each, and report what was covered."""
    from copyhold.kvcore.model_check import DEEP, TAILS, WINDOW, Bounds, explore_all

    report = explore_all((DEEP, WINDOW, TAILS, Bounds(blocks=blocks, requests=requests)))
    document = report.document()
    Output(json).emit(document, report.text())
    return 0 if document["ok"] else 1


def _replay_text(document: dict[str, Any]) -> str:
    if document.get("refusal"):
        return f"refused: {document['refusal']['detail']}"
    after = f" after the checkpoint at {document['first_index']}" if document["first_index"] else ""
    lines = [f"{document['records']} records applied{after}"]
    lines += [f"  {name} {count}" for name, count in sorted(document["commands"].items())]
    lines += [f"committed {document['committed_digest']}", f"machine   {document['machine_digest']}"]
    for name in ("difference", "against"):
        if found := document[name]:
            lines.append(
                f"{name} at record {found['index']}: {found['what']}, "
                f"expected {found['expected']}, found {found['found']}"
            )
    return "\n".join(lines)
