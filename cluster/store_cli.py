"""``copyhold store`` and ``copyhold audit-trail``: accepting a restored store, and checking what the operator did.

Owns the wording and exit codes. Verifying a trail needs no server: the exported file, a signed head and the public key are
enough; a head that was put away earlier finds a rewrite of everything before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import JsonOption, with_admin, with_config
from .cli_output import Output, progress_on_stderr
from .config import Config
from .errors import UsageError

if TYPE_CHECKING:
    from .admin_client import AdminClient

stores = typer.Typer(help="The authority's store.", no_args_is_help=True)
audit_trail = typer.Typer(help="The hash-chained record of what operators did.", no_args_is_help=True)


@stores.command("confirm-restore")
@with_config()
def store_confirm_restore(
    config: Config,
    yes: Annotated[bool, typer.Option("--yes", help="The store was restored on purpose; go on.")] = False,
    json: JsonOption = False,
) -> None:
    """Accept a store that was put back from a backup, while no server runs.

    A new store epoch is drawn: grants and secrets of the old one are void, every generation goes above any that was given,
    keys that may have changed since are suspended and every incarnation is fenced.
    """
    from .restore import confirm_restored_store

    if not yes:
        raise UsageError(
            "this voids every grant and may suspend keys; say --yes when the restore was on purpose"
        )
    with progress_on_stderr() as progress:
        receipt = confirm_restored_store(config, progress)
    document = {
        "store_epoch": receipt.store_epoch,
        "generations_added": receipt.generations_added,
        "suspended_keys": list(receipt.suspended_keys),
        "fenced_incarnations": list(receipt.fenced_incarnations),
    }
    text = (
        f"store epoch {receipt.store_epoch}: generations raised by {receipt.generations_added}, "
        f"{len(receipt.suspended_keys)} keys suspended, {len(receipt.fenced_incarnations)} incarnations fenced"
    )
    Output(json).emit({"ok": True, **document}, text)


@audit_trail.command("export")
@with_admin
def audit_trail_export(
    admin: AdminClient,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it, one record a line.")],
    head: Annotated[
        Path, typer.Option("--head", metavar="FILE", help="Where to write the signed head that covers it.")
    ],
    json: JsonOption = False,
) -> None:
    """Write the trail of the running server and a head signed now."""
    import msgspec

    signed = admin.audit_head()
    last = msgspec.json.decode(signed)["sequence"]
    count = 0
    with out.open("wb") as file:
        while count < last:
            for record in admin.audit_records(count + 1)[: last - count]:
                file.write(msgspec.json.encode(record) + b"\n")
                count += 1
    head.write_bytes(signed)
    Output(json).emit(
        {"ok": True, "records": count, "file": str(out), "head": str(head)},
        f"{count} records in {out}, head in {head}",
    )


@audit_trail.command("verify")
def audit_trail_verify(
    file: Annotated[Path, typer.Argument(help="The exported trail.")],
    head: Annotated[Path, typer.Option("--head", metavar="FILE", help="A signed head, of then or earlier.")],
    public_key: Annotated[
        Path, typer.Option("--public-key", metavar="FILE", help="The authority's public key.")
    ],
    json: JsonOption = False,
) -> int:
    """Check a trail offline: its chain, and that it contains the head. Exit code 1: the first record that does not hold."""
    import msgspec

    from copyhold.namespace.audit_trail import AuditRecord, decode_head, verify_trail
    from copyhold.namespace.errors import PublicKeyRefused, TrailBroken
    from copyhold.namespace.signing import read_public_key

    document: dict[str, Any]
    try:
        key, signed = read_public_key(public_key), decode_head(head.read_bytes())
        lines = file.read_bytes().splitlines()
        records = (_decoded(msgspec.json.decode, line, AuditRecord, at) for at, line in enumerate(lines, 1))
        document = {"ok": True, "records": verify_trail(records, signed, key), "head": signed.sequence}
        text = f"{document['records']} records hold and contain the head at {signed.sequence}"
    except TrailBroken as error:
        document = {"ok": False, "sequence": error.sequence, "detail": error.detail}
        text = f"broken at record {error.sequence}: {error.detail}"
    except PublicKeyRefused as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    Output(json).emit(document, text)
    return 0 if document["ok"] else 1


def _decoded(decode: Any, line: bytes, kind: Any, sequence: int) -> Any:
    import msgspec

    from copyhold.namespace.errors import TrailBroken

    try:
        return decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise TrailBroken(sequence, f"it is unreadable ({error})") from error
