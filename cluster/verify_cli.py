"""``copyhold verify``: the command. Imported by every ``copyhold`` command; what runs is imported where it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import JsonOption
from .cli_output import Output, progress_on_stderr
from .config import FIELDS
from .errors import UsageError


def verify(
    model: Annotated[
        str, typer.Option("--model", metavar="PATH", help="A .gguf file or a Hugging Face folder. [SmolLM2]")
    ] = "",
    cache_dir: Annotated[
        str, typer.Option("--cache-dir", metavar="PATH", help="Converted checkpoints.")
    ] = str(FIELDS["cache_dir"].default),
    quick: Annotated[bool, typer.Option("--quick", help="Two cuts, two prompts.")] = False,
    json: JsonOption = False,
) -> int:
    """Prove on a checkpoint that reuse changes nothing. Exit code 0 it does not, 1 it does, 2 no such checkpoint."""
    from rich.console import Console

    from copyhold.models.errors import (
        ModelFileInvalid,
        ModelFileMissing,
        ModelPackageMissing,
        UnsupportedModel,
    )

    from .verify import run_verify
    from .verify_report import print_verify

    try:
        with progress_on_stderr() as say:
            report = run_verify(model, Path(cache_dir).expanduser(), quick, say)
    except (ModelFileInvalid, ModelFileMissing, ModelPackageMissing, UnsupportedModel) as error:
        raise UsageError(str(error)) from error
    if json:
        Output(json).emit(report.document(), "")
    else:
        print_verify(Console(file=sys.stdout), report)
    return 0 if report.ok else 1
