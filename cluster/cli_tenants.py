"""``copyhold tenants`` and ``copyhold certificate``: the operator's commands on rights, and their proof.

Owns the wording and exit codes of these commands; what they do is the authority's, over the admin socket. Verifying a
certificate needs no server.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_options import JsonOption, with_admin
from .cli_output import Output, table
from .errors import UsageError

if TYPE_CHECKING:
    from .admin_client import AdminClient

tenants = typer.Typer(help="Tenants of the running server, their keys and namespaces.", no_args_is_help=True)
certificates = typer.Typer(help="Revocation certificates.", no_args_is_help=True)


@tenants.command("create")
@with_admin
def tenants_create(
    admin: AdminClient,
    name: Annotated[str, typer.Argument(help="Name of the tenant.")],
    namespace: Annotated[
        list[str] | None, typer.Option("--namespace", help="Its namespaces. [its name]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a tenant and print its first key, which is not shown again."""
    made = admin.create_tenant(name, namespace)
    text = f"tenant {made['tenant']}, namespaces {', '.join(made['namespaces'])}\nkey {made['key']}"
    Output(json).emit({"ok": True, **made}, text)


@tenants.command("key")
@with_admin
def tenants_key(
    admin: AdminClient,
    name: Annotated[str, typer.Argument(help="Name of the tenant.")],
    json: JsonOption = False,
) -> None:
    """Make one more key of a tenant; it is not shown again."""
    made = admin.create_key(name)
    Output(json).emit({"ok": True, "tenant": name, **made}, f"key {made['key']}")


@tenants.command("list")
@with_admin
def tenants_list(
    admin: AdminClient,
    json: JsonOption = False,
) -> None:
    """All tenants with their namespaces."""
    known = admin.list_tenants()
    rows = [(str(entry["tenant"]), ", ".join(entry.get("namespaces", ()))) for entry in known]
    Output(json).emit({"ok": True, "tenants": known}, table(rows, ("TENANT", "NAMESPACES")))


@tenants.command("disable")
@with_admin
def tenants_disable(
    admin: AdminClient,
    namespace: Annotated[str, typer.Argument(help="Namespace to close to new work.")],
    json: JsonOption = False,
) -> None:
    """Close a namespace: its requests end, its cached state stays (revoke is what removes that)."""
    answer = admin.set_namespace_enabled(namespace, False)
    Output(json).emit({"ok": True, **answer}, f"namespace {namespace} is disabled")


@tenants.command("enable")
@with_admin
def tenants_enable(
    admin: AdminClient,
    namespace: Annotated[str, typer.Argument(help="Namespace to open again.")],
    json: JsonOption = False,
) -> None:
    """Open a disabled namespace again, with what it had cached."""
    answer = admin.set_namespace_enabled(namespace, True)
    Output(json).emit({"ok": True, **answer}, f"namespace {namespace} is enabled")


@tenants.command("disable-key")
@with_admin
def tenants_disable_key(
    admin: AdminClient,
    key_id: Annotated[str, typer.Argument(help="Key id: the part between ch_ and the second underscore.")],
    json: JsonOption = False,
) -> None:
    """Refuse a key from now on; requests that run under it end."""
    answer = admin.set_key_enabled(key_id, False)
    Output(json).emit({"ok": True, **answer}, f"key {key_id} is disabled")


@tenants.command("revoke")
@with_admin
def tenants_revoke(
    admin: AdminClient,
    namespace: Annotated[str, typer.Argument(help="Namespace whose cached state is revoked.")],
    deadline_s: Annotated[
        float | None,
        typer.Option(
            "--deadline-s", min=0.0, help="Time running requests get; default: the server's setting."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the certificate here.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Advance the namespace's generation, zero its cached state everywhere, and print the certificate."""
    from copyhold.namespace.certificate import parse_certificate

    document = admin.revoke(namespace, deadline_s)
    if out is not None:
        out.write_bytes(document)
    certificate = parse_certificate(document)
    complete = certificate.outcome == "complete"
    summary = (
        f"namespace {certificate.namespace}: generation {certificate.generation_from} -> "
        f"{certificate.generation_to}, {certificate.outcome}"
    )
    text = f"{summary}, certificate in {out}" if out is not None else document.decode()
    Output(json).emit({"ok": complete, "certificate": _parsed(document)}, text)
    return 0 if complete else 3


@certificates.command("verify")
def certificate_verify(
    file: Annotated[Path, typer.Argument(help="The certificate.")],
    public_key: Annotated[
        Path, typer.Option("--public-key", metavar="FILE", help="The authority's public key.")
    ],
    json: JsonOption = False,
) -> int:
    """Check a certificate offline. Exit code 0 complete, 1 does not verify, 3 verifies but is incomplete."""
    from copyhold.namespace.certificate import verify_certificate_file
    from copyhold.namespace.errors import PublicKeyRefused

    try:
        report = verify_certificate_file(file, public_key)
    except PublicKeyRefused as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot read {error.filename}: {error.strerror}") from error
    checks = [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in report.checks]
    lines = [f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}" for check in report.checks]
    verdict = f"verifies, {report.outcome}" if report.ok else "does not verify"
    document = {"ok": report.ok, "outcome": report.outcome, "checks": checks}
    Output(json).emit(document, "\n".join([*lines, f"{file} {verdict}"]))
    if not report.ok:
        return 1
    return 0 if report.outcome == "complete" else 3


@certificates.command("fetch")
@with_admin
def certificate_fetch(
    admin: AdminClient,
    certificate_id: Annotated[str, typer.Argument(help="Its id.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")],
    json: JsonOption = False,
) -> None:
    """Fetch an issued certificate from the running server, byte for byte."""
    document = admin.certificate(certificate_id)
    out.write_bytes(document)
    Output(json).emit({"ok": True, "file": str(out), "certificate": _parsed(document)}, f"wrote {out}")


@certificates.command("public-key")
@with_admin
def certificate_public_key(
    admin: AdminClient,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it here.")] = None,
    json: JsonOption = False,
) -> None:
    """The public key that certificates verify against."""
    key = admin.public_key()
    if out is not None:
        out.write_bytes(key)
    text = key.decode().rstrip() if out is None else f"wrote {out}"
    Output(json).emit({"ok": True, "public_key": key.decode()}, text)


def _parsed(document: bytes) -> Any:
    import msgspec

    return msgspec.json.decode(document)
