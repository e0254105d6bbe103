"""The ``copyhold`` command.

Owns the commands and their exit codes: 0 all holds, 1 something does not, 2 the call was wrong, 3
inconclusive. Invariant: an error is one line on standard error, never a traceback. Ray, torch and numba are
not imported here; they live in the driver.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from copyhold import __version__

from .bench_cli import bench
from .cli_options import ConfigFile, JsonOption, StateDir, state_folder, with_config
from .cli_output import Output, error_document, error_line, progress_on_stderr, table
from .config import Config, Settings, load_config
from .errors import ClusterError, StopFailed, TenantRequestFailed, UsageError, stable_name
from .server_record import find_server

FIRST_TENANTS = ("acme", "bravo")
AdminSocket = Annotated[
    str | None,
    typer.Option("--admin-socket", metavar="PATH", help="Admin socket, if not the recorded server's."),
]

app = typer.Typer(
    help="Copyhold: exact, authorized reuse of KV-cache state.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tenants = typer.Typer(help="Tenants of the running server, their keys and namespaces.", no_args_is_help=True)
certificates = typer.Typer(help="Revocation certificates.", no_args_is_help=True)
configuration = typer.Typer(help="Settings: what holds, and whether a file is right.", no_args_is_help=True)
app.add_typer(tenants, name="tenants")
app.add_typer(certificates, name="certificate")
app.add_typer(bench, name="bench")
app.add_typer(configuration, name="config")


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"copyhold {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command as a whole."""


@app.command()
@with_config()
def serve(config: Config, json: JsonOption = False) -> int:
    """Serve until stopped; prints the URL and, when it made the first tenants, their keys.

    On a joined cluster it makes none: what a job prints is kept where more people read than may have a key.
    """
    from .admin_client import AdminClient
    from .run_signals import StopRequested
    from .supervisor import Supervisor

    server = Supervisor(config)
    try:
        with progress_on_stderr() as progress:
            server.report_to(progress)
            server.start()
        with AdminClient(server.admin_socket) as admin:
            made = [] if config.address else _make_first_tenants(admin)
        document = {
            "ok": True,
            "url": server.url,
            "admin_socket": server.admin_socket,
            "state_dir": str(server.state_dir),
            "pid": os.getpid(),
            "tenants": made,
        }
        Output(json).emit(document, _joined_text(document) if config.address else _serving_text(document))
        server.wait()
    except (StopRequested, KeyboardInterrupt):
        sys.stderr.write("stopping\n")
    finally:
        server.stop()
    return 0


@app.command()
def stop(
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Longest wait for its end.")] = 60.0,
    json: JsonOption = False,
) -> None:
    """Stop the running server and wait until it is gone."""
    from .processes import wait_for_end

    record = find_server(state_folder(config_file, state_dir))
    record.process.signal(signal.SIGTERM)
    wait_for_end([record.process], timeout_s)
    if record.process.alive:
        raise StopFailed(f"process {record.process.pid} still runs after {timeout_s:g} s")
    Output(json).emit({"ok": True, "pid": record.process.pid}, f"stopped process {record.process.pid}")


@app.command()
@with_config(defaults={"state_dir": "", "port": 0})
def demo(config: Config, json: JsonOption = False) -> int:
    """Two tenants, a real model, reuse, isolation and a certified revocation, each point checked."""
    from .demo import run_demo

    return run_demo(config, json=json)


@app.command()
def status(
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """What the running server says of itself."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        answer = admin.status()
    Output(json).emit({"ok": True, **answer}, _flat_text(answer))


@app.command()
def drain(
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0.0, max=3600.0, help="Longest wait until nothing runs.")
    ] = 300.0,
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> int:
    """Take no new requests and let the running ones finish. Exit code 0 nothing runs, 3 something still does."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        answer = admin.drain(wait_s)
    text = (
        "drained: nothing runs" if answer["quiet"] else f"draining: something still runs after {wait_s:g} s"
    )
    Output(json).emit({"ok": answer["quiet"], **answer}, text)
    return 0 if answer["quiet"] else 3


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="The receipt id of the request.")],
    key_file: Annotated[
        Path,
        typer.Option("--key-file", metavar="FILE", help="File with the tenant's API key; - reads stdin."),
    ],
    url: Annotated[str | None, typer.Option("--url", help="Server, if not the recorded one.")] = None,
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    json: JsonOption = False,
) -> None:
    """Why a request reused what it did, as its own tenant may know it."""
    key = _read_key(key_file)
    answer = _tenant_get(
        url or find_server(state_folder(config_file, state_dir)).url, f"/v1/explain/{request_id}", key
    )
    sentence = answer.get("explanation")
    Output(json).emit({"ok": True, **answer}, sentence if isinstance(sentence, str) else _flat_text(answer))


@configuration.command("show")
@with_config()
def config_show(settings: Settings, json: JsonOption = False) -> None:
    """The effective value of every key with unit, bounds and source, as `serve` with the same options has it."""
    from .config_report import settings_report, settings_rows

    text = table(settings_rows(settings), ("KEY", "VALUE", "UNIT", "BOUNDS", "SOURCE"))
    Output(json).emit({"ok": True, "settings": settings_report(settings)}, text)


@configuration.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="The TOML file.")], json: JsonOption = False
) -> None:
    """Whether a file is a valid configuration. Exit code 0 valid, 2 not, with the key and the nearest valid one."""
    load_config(file)
    Output(json).emit({"ok": True, "file": str(file)}, f"{file} is valid")


@tenants.command("create")
def tenants_create(
    name: Annotated[str, typer.Argument(help="Name of the tenant.")],
    namespace: Annotated[
        list[str] | None, typer.Option("--namespace", help="Its namespaces. [its name]")
    ] = None,
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """Make a tenant and print its first key, which is not shown again."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        made = admin.create_tenant(name, namespace)
    text = f"tenant {made['tenant']}, namespaces {', '.join(made['namespaces'])}\nkey {made['key']}"
    Output(json).emit({"ok": True, **made}, text)


@tenants.command("key")
def tenants_key(
    name: Annotated[str, typer.Argument(help="Name of the tenant.")],
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """Make one more key of a tenant; it is not shown again."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        made = admin.create_key(name)
    Output(json).emit({"ok": True, "tenant": name, **made}, f"key {made['key']}")


@tenants.command("list")
def tenants_list(
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """All tenants with their namespaces."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        known = admin.list_tenants()
    rows = [(str(entry["tenant"]), ", ".join(entry.get("namespaces", ()))) for entry in known]
    Output(json).emit({"ok": True, "tenants": known}, table(rows, ("TENANT", "NAMESPACES")))


@tenants.command("disable")
def tenants_disable(
    namespace: Annotated[str, typer.Argument(help="Namespace to close to new work.")],
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """Close a namespace: its requests end, its cached state stays (revoke is what removes that)."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        answer = admin.set_namespace_enabled(namespace, False)
    Output(json).emit({"ok": True, **answer}, f"namespace {namespace} is disabled")


@tenants.command("enable")
def tenants_enable(
    namespace: Annotated[str, typer.Argument(help="Namespace to open again.")],
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """Open a disabled namespace again, with what it had cached."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        answer = admin.set_namespace_enabled(namespace, True)
    Output(json).emit({"ok": True, **answer}, f"namespace {namespace} is enabled")


@tenants.command("disable-key")
def tenants_disable_key(
    key_id: Annotated[str, typer.Argument(help="Key id: the part between ch_ and the second underscore.")],
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """Refuse a key from now on; requests that run under it end with the next lease renewal."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        answer = admin.set_key_enabled(key_id, False)
    Output(json).emit({"ok": True, **answer}, f"key {key_id} is disabled")


@tenants.command("revoke")
def tenants_revoke(
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
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> int:
    """Advance the namespace's generation, zero its cached state everywhere, and print the certificate."""
    from copyhold.namespace.certificate import parse_certificate

    with _admin(config_file, state_dir, admin_socket) as admin:
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
def certificate_fetch(
    certificate_id: Annotated[str, typer.Argument(help="Its id.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")],
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """Fetch an issued certificate from the running server, byte for byte."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        document = admin.certificate(certificate_id)
    out.write_bytes(document)
    Output(json).emit({"ok": True, "file": str(out), "certificate": _parsed(document)}, f"wrote {out}")


@certificates.command("public-key")
def certificate_public_key(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write it here.")] = None,
    config_file: ConfigFile = None,
    state_dir: StateDir = None,
    admin_socket: AdminSocket = None,
    json: JsonOption = False,
) -> None:
    """The public key that certificates verify against."""
    with _admin(config_file, state_dir, admin_socket) as admin:
        key = admin.public_key()
    if out is not None:
        out.write_bytes(key)
    text = key.decode().rstrip() if out is None else f"wrote {out}"
    Output(json).emit({"ok": True, "public_key": key.decode()}, text)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; whatever goes wrong becomes one line."""
    try:
        result = app(list(arguments), prog_name="copyhold", standalone_mode=False)
    except ClusterError as error:
        return _fail(arguments, error.type, error.message, error.exit_code)
    except typer.TyperException as error:
        format_message = getattr(error, "format_message", None)
        message = format_message() if format_message else str(error)
        return _fail(arguments, UsageError.type, message or "a command is needed", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(arguments, "interrupted", "stopped before it was done", 130)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the last line of defence: an unforeseen error is one line too
        return _fail(arguments, _type_of(error), str(error) or type(error).__name__, 1)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def _fail(arguments: Sequence[str], type_name: str, message: str, code: int) -> int:
    error_line(type_name, message)
    if "--json" in arguments:
        Output(json=True).emit(error_document(type_name, message), "")
    return code


def _type_of(error: Exception) -> str:
    """Stable name of another room's error; anything else is ours to explain and called internal."""
    if not type(error).__module__.startswith("copyhold."):
        return f"internal ({type(error).__name__})"
    return stable_name(type(error).__name__)


def _admin(config_file: Path | None, state_dir: str | None, admin_socket: str | None) -> Any:
    from .admin_client import AdminClient

    return AdminClient(admin_socket or find_server(state_folder(config_file, state_dir)).admin_socket)


def _make_first_tenants(admin: Any) -> list[dict[str, Any]]:
    known = {entry["tenant"] for entry in admin.list_tenants()}
    return [admin.create_tenant(name) for name in FIRST_TENANTS if name not in known]


def _joined_text(document: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"serving {document['url']}/v1  (admin socket {document['admin_socket']})",
            f"on this node, `copyhold tenants create NAME --state-dir {document['state_dir']}` makes a tenant",
            "stop with Ctrl-C, `ray job stop` or `copyhold stop`",
        ]
    )


def _serving_text(document: dict[str, Any]) -> str:
    lines = [f"serving {document['url']}/v1  (admin socket {document['admin_socket']})"]
    lines += [f"key of {made['tenant']}: {made['key']}" for made in document["tenants"]]
    if len(document["tenants"]) < len(FIRST_TENANTS):
        lines.append("earlier keys are not shown again; `copyhold tenants key NAME` makes another")
    return "\n".join([*lines, "stop with Ctrl-C or `copyhold stop`"])


def _read_key(key_file: Path) -> str:
    try:
        text = sys.stdin.read() if str(key_file) == "-" else key_file.read_text()
    except OSError as error:
        raise UsageError(f"cannot read {key_file}: {error.strerror}") from error
    if not text.strip():
        raise UsageError(f"no key in {key_file}")
    return text.strip()


def _tenant_get(url: str, path: str, key: str) -> dict[str, Any]:
    import httpx

    try:
        response = httpx.get(url + path, headers={"Authorization": f"Bearer {key}"}, timeout=30.0)
        body = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise TenantRequestFailed(f"no usable answer from {url}: {error}") from error
    if response.is_error:
        message = body.get("error", {}).get("message", "") if isinstance(body, dict) else ""
        raise TenantRequestFailed(message or f"status {response.status_code}")
    return body


def _parsed(document: bytes) -> Any:
    import msgspec

    return msgspec.json.decode(document)


def _flat_text(value: dict[str, Any], prefix: str = "") -> str:
    lines: list[str] = []
    for name, entry in value.items():
        if isinstance(entry, dict) and entry:
            lines.append(_flat_text(entry, f"{prefix}{name}."))
        else:
            lines.append(f"{prefix}{name}: {entry}")
    return "\n".join(lines)
