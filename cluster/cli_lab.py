"""``copyhold lab``: choose a policy and a capacity before buying memory. What plays is imported where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import JsonOption
from .cli_output import Output
from .errors import UsageError


def lab(
    capacity: Annotated[
        int, typer.Option("--capacity", min=1, max=1 << 24, help="Cache size in identities or blocks.")
    ],
    stride: Annotated[
        int | None, typer.Option("--stride", min=1, max=4096, help="Identities of the cyclic model.")
    ] = None,
    time_s: Annotated[
        float, typer.Option("--time", min=0.0, max=1e6, metavar="SECONDS", help="Time of the cyclic model.")
    ] = 0.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Trace to play instead: .jsonl or .csv.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help="Only this policy beside the fixed rows.")
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, max=4096, help="Tokens per block of a trace of token lists.")
    ] = 16,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write hit rate against capacity as .svg.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Play a cache: a cycle of identities step by step, or a trace through every policy."""
    from .lab import identities_report, trace_report

    if (stride is None) == (trace is None):
        raise UsageError("lab needs one of --stride and --trace")
    if trace is not None:
        document, text = trace_report(trace, capacity, policy, block_size, plot)
    else:
        assert stride is not None
        document, text = identities_report(capacity, stride, time_s, policy or "lru")
    Output(json).emit(document, text)
