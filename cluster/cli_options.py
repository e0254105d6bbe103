"""Command-line options made from the table of settings: every field has one, none is written twice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .config import FIELDS, Config, FieldSpec, load_config

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


def with_config(
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's ``config`` parameter by ``--config FILE`` and one option per setting.

    ``defaults`` are the command's own; the file beats them, and an option beats the file.
    """
    own = dict(defaults or {})

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        del parameters["config"]
        added = [_config_file_parameter(), *(_option(spec, own) for spec in FIELDS.values())]
        signature = inspect.Signature([*parameters.values(), *added])

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            overrides = {name: given.pop(name) for name in FIELDS}
            config = load_config(given.pop("config_file"), overrides, own)
            return command(config=config, **given)

        run.__dict__["__signature__"] = signature
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        return run

    return decorate


def state_folder(config_file: Path | None, state_dir: str | None) -> Path:
    """The state folder that an option or a file names, else the default one."""
    config: Config = load_config(config_file, {"state_dir": state_dir})
    return Path(config.state_dir).expanduser().absolute()


def _config_file_parameter() -> inspect.Parameter:
    return inspect.Parameter(
        "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile
    )


def _option(spec: FieldSpec, own: Mapping[str, Any]) -> inspect.Parameter:
    default = own.get(spec.name, spec.default)
    notes = [note for note in (spec.bounds, f"default {default}" if default != "" else "") if note]
    option = typer.Option(
        f"--{spec.name.replace('_', '-')}",
        metavar={int: "N", float: "SECONDS", str: "TEXT" if spec.unit == "" else "PATH"}[spec.kind],
        help=f"{spec.doc} ({'; '.join(notes)})" if notes else spec.doc,
        show_default=False,
        rich_help_panel="Settings",
    )
    annotation = Annotated[spec.kind | None, option]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
