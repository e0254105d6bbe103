"""``copyhold bench NAME``: figures of this machine, with their targets and peers.

Exit code 0 when every row with a target meets it, 1 when one misses, 3 when a measurement was not valid. Imported by every
``copyhold`` command, so what measures is imported where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import JsonOption
from .cli_output import Output, progress_on_stderr
from .config import FIELDS, load_config
from .errors import UsageError

if TYPE_CHECKING:
    from .bench_report import BenchReport

bench = typer.Typer(help="Benchmarks, each beside a peer in the same run.", no_args_is_help=True)


@bench.callback()
def _benchmarks() -> None:
    """Benchmarks, each beside a peer in the same run."""


@bench.command("serve")
def bench_serve(
    runs: Annotated[int, typer.Option("--runs", min=1, max=100, help="Times each figure is measured.")] = 2,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", min=1, max=8, help="Only servers of so many ranks.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PART", help="Only smollm (servers of the model) or 56m (beside vLLM)."
        ),
    ] = None,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Leave transformers and vLLM out.")] = False,
    model: Annotated[str, typer.Option("--model", metavar="PATH", help="Checkpoint. [SmolLM2]")] = "",
    cache_dir: Annotated[
        str, typer.Option("--cache-dir", metavar="PATH", help="Converted checkpoints.")
    ] = str(FIELDS["cache_dir"].default),
    json: JsonOption = False,
) -> int:
    """Decode rate, first tokens, transport, memory and start-up of real servers, one thread a rank, beside their peers."""
    from .bench_plan import BenchPlan
    from .bench_serve import PARTS, SHAPES, Part, run_serve_bench

    shapes = [shape for shape in SHAPES if tp is None or shape[0] in tp]
    if not shapes:
        raise UsageError(f"--tp {tp}: servers of {sorted({ranks for ranks, _ in SHAPES})} ranks are measured")
    parts: list[Part] = [part for part in PARTS if not only or part in only]
    if set(only or ()) - set(PARTS):
        raise UsageError(f"--only {only}: the parts are {list(PARTS)}")
    config = load_config(None, {"model": model, "cache_dir": cache_dir})
    with progress_on_stderr() as say:
        report = run_serve_bench(config, shapes, BenchPlan(runs=runs), not no_peers, say, parts)
    return _show(report, json)


@bench.command("ledger")
def bench_ledger(
    runs: Annotated[int, typer.Option("--runs", min=3, max=10_000, help="Samples of each figure.")] = 200,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure vLLM's manager too.")] = True,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Measure without each control too.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", dir_okay=False, help="Growth as an SVG file.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Commands of the ledger from encoded bytes to receipts, beside vLLM's block manager; one thread."""
    from .bench_ledger import growth_plot, run_ledger_bench

    _require_folder(plot)
    with progress_on_stderr() as say:
        report = run_ledger_bench(runs, peers, controls, say)
    return _show(report, json, plot, growth_plot)


@bench.command("prefix")
def bench_prefix(
    runs: Annotated[
        int, typer.Option("--runs", min=3, max=10_000, help="Samples of each small figure.")
    ] = 200,
    plays: Annotated[int, typer.Option("--plays", min=1, max=100, help="Times the churn is played.")] = 5,
    requests: Annotated[
        int, typer.Option("--requests", min=100, max=1_000_000, help="Requests of the churn.")
    ] = 10_000,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure vLLM and SGLang too.")] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", dir_okay=False, help="Growth as an SVG file.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """The prefix index: match, publish, evict, and a churn of many tenants, beside vLLM and SGLang; one thread."""
    from .bench_prefix import growth_plot, run_prefix_bench

    _require_folder(plot)
    with progress_on_stderr() as say:
        report = run_prefix_bench(runs, plays, requests, peers, say)
    return _show(report, json, plot, growth_plot)


@bench.command("eviction")
def bench_eviction(
    traces: Annotated[
        Path | None,
        typer.Option("--traces", metavar="DIR", help="Folder of traces. [../shared/data, where present]"),
    ] = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option("--capacity", min=1, max=1 << 24, help="Blocks; repeatable. [1000, 5000, 20000]"),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="NAME", help="Only this policy beside default and LRU.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Hit rates of every eviction policy on traces of requests, beside LRU and the offline optimum."""
    from .bench_eviction import CAPACITIES, run_eviction_bench

    with progress_on_stderr() as say:
        report = run_eviction_bench(traces, capacity or CAPACITIES, policy, say)
    return _show(report, json)


@bench.command("kernels")
def bench_kernels(
    runs: Annotated[int, typer.Option("--runs", min=1, max=100, help="Rounds of each figure.")] = 5,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure vLLM's kernel too.")] = True,
    json: JsonOption = False,
) -> int:
    """Attention, memory, linears and sums over ranks, one thread, beside torch, memcpy, gloo and vLLM."""
    from .bench_kernels import run_kernels_bench

    with progress_on_stderr() as say:
        report = run_kernels_bench(runs, peers, say)
    return _show(report, json)


def _require_folder(plot: Path | None) -> None:
    """Before anything is measured. Raises: ``UsageError``."""
    if plot is not None and not plot.parent.is_dir():
        raise UsageError(f"--plot {plot}: there is no folder {plot.parent}")


def _show(
    report: BenchReport,
    json: bool,
    plot: Path | None = None,
    draw: Callable[[BenchReport], str] | None = None,
) -> int:
    """Print the report and, where ``plot`` is named, write what ``draw`` makes of it; the exit code."""
    if plot is not None and draw is not None:
        plot.write_text(draw(report), "utf-8")
    Output(json).emit(report.document(), report.text())
    return 0 if report.ok else 1
