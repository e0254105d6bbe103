"""Command-line options made from the table of settings: every field has one, none is written twice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import FIELDS, STORE_KEYS, Config, FieldSpec, load_config, load_settings
from .server_record import find_server

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print exactly one JSON document on standard output.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file with any of the settings below.")
]
StateDir = Annotated[
    str | None,
    typer.Option(
        "--state-dir", metavar="PATH", help=f"State folder of the server. [{FIELDS['state_dir'].default}]"
    ),
]

AdminSocket = Annotated[
    str | None,
    typer.Option("--admin-socket", metavar="PATH", help="Admin socket, if not the recorded server's."),
]
BothStores = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Sets --authority-store and --sessions-store, where they are not given themselves.",
        rich_help_panel="Settings",
    ),
]


def with_config(
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's ``config`` parameter by ``--config FILE`` and one option per setting.

    A command with a ``settings`` parameter gets the sources of the values too.

    ``defaults`` are the command's own; the file beats them, and an option beats the file.
    """
    own = dict(defaults or {})

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        wanted = "settings" if "settings" in parameters else "config"
        del parameters[wanted]
        added = [
            _keyword("config_file", ConfigFile),
            _keyword("store", BothStores),
            *(_option(spec, own) for spec in FIELDS.values()),
        ]
        signature = inspect.Signature([*parameters.values(), *added])

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            overrides = {name: given.pop(name) for name in FIELDS}
            file, both = given.pop("config_file"), given.pop("store")
            for key in STORE_KEYS:
                overrides[key] = both if overrides[key] is None else overrides[key]
            settings = load_settings(file, overrides, own)
            given[wanted] = settings if wanted == "settings" else settings.config
            return command(**given)

        run.__dict__["__signature__"] = signature
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        return run

    return decorate


def with_admin(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's ``admin`` parameter by the options that find the server, and open the client for it."""
    # The client's own type is known to type checkers only: it is imported when a command runs.
    parameters = dict(inspect.signature(command, eval_str=True, locals={"AdminClient": Any}).parameters)
    del parameters["admin"]
    places = {"config_file": ConfigFile, "state_dir": StateDir, "admin_socket": AdminSocket}
    signature = inspect.Signature(
        [*parameters.values(), *(_keyword(name, kind) for name, kind in places.items())]
    )

    @functools.wraps(command)
    def run(**given: Any) -> Any:
        from .admin_client import AdminClient

        file, state_dir, admin_socket = (given.pop(name) for name in places)
        with AdminClient(admin_socket or find_server(state_folder(file, state_dir)).admin_socket) as admin:
            return command(admin=admin, **given)

    run.__dict__["__signature__"] = signature
    run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return run


def state_folder(config_file: Path | None, state_dir: str | None) -> Path:
    """The state folder that an option or a file names, else the default one."""
    config: Config = load_config(config_file, {"state_dir": state_dir})
    return Path(config.state_dir).expanduser().absolute()


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(spec: FieldSpec, own: Mapping[str, Any]) -> inspect.Parameter:
    default = own.get(spec.name, spec.default)
    told = "" if default == "" or spec.kind is bool else f"default {default}"
    notes = [note for note in (spec.bounds, told) if note]
    option = typer.Option(
        f"--{spec.name.replace('_', '-')}",
        metavar=_metavar(spec),
        help=f"{spec.doc} ({'; '.join(notes)})" if notes else spec.doc,
        show_default=False,
        rich_help_panel="Settings",
    )
    annotation = Annotated[spec.kind | None, option]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(spec: FieldSpec) -> str | None:
    if spec.kind is bool:
        return None
    words = {"": "TEXT", "URL": "URL", "host:port": "ADDRESS", "list": "LIST"}
    return {int: "N", float: "SECONDS"}.get(spec.kind) or words.get(spec.unit, "PATH")
