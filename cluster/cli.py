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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from copyhold import __version__

from .bench_cli import bench
from .cli_lab import lab
from .cli_options import ConfigFile, JsonOption, StateDir, state_folder, with_admin, with_config
from .cli_output import Output, error_document, error_line, progress_on_stderr, table
from .cli_tenants import certificates, tenants
from .config import Config, Settings, load_config
from .errors import ClusterError, StopFailed, TenantRequestFailed, UsageError, stable_name
from .ledger_cli import ledger
from .server_record import find_server
from .store_cli import audit_trail, stores
from .verify_cli import verify

if TYPE_CHECKING:
    from .admin_client import AdminClient

FIRST_TENANTS = ("acme", "bravo")

app = typer.Typer(
    help="Copyhold: exact, authorized reuse of KV-cache state.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
configuration = typer.Typer(help="Settings: what holds, and whether a file is right.", no_args_is_help=True)
app.add_typer(tenants, name="tenants")
app.add_typer(certificates, name="certificate")
app.add_typer(bench, name="bench")
app.add_typer(ledger, name="ledger")
app.add_typer(stores, name="store")
app.add_typer(audit_trail, name="audit-trail")
app.add_typer(configuration, name="config")
app.command("lab")(lab)
app.command("verify")(verify)


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
@with_config(defaults={"state_dir": "", "port": 0, "pool_tokens": 6144})
def demo(config: Config, json: JsonOption = False) -> int:
    """Two tenants, a real model, reuse, isolation and a certified revocation, each point checked."""
    from .demo import run_demo

    return run_demo(config, json=json)


@app.command()
@with_admin
def status(
    admin: AdminClient,
    json: JsonOption = False,
) -> None:
    """What the running server says of itself."""
    answer = admin.status()
    Output(json).emit({"ok": True, **answer}, _flat_text(answer))


@app.command()
@with_admin
def drain(
    admin: AdminClient,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0.0, max=3600.0, help="Longest wait until nothing runs.")
    ] = 300.0,
    json: JsonOption = False,
) -> int:
    """Take no new requests and let the running ones finish. Exit code 0 nothing runs, 3 something still does."""
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


def _flat_text(value: dict[str, Any], prefix: str = "") -> str:
    """One line a value; objects in a list are numbered."""
    lines: list[str] = []
    for name, entry in value.items():
        if isinstance(entry, list) and entry and isinstance(entry[0], dict):
            entry = {str(number): member for number, member in enumerate(entry)}
        if isinstance(entry, dict) and entry:
            lines.append(_flat_text(entry, f"{prefix}{name}."))
        else:
            lines.append(f"{prefix}{name}: {entry}")
    return "\n".join(lines)
