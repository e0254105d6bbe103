"""The serving benchmark: real servers, driven over HTTP as a stranger with one key would, beside their peers.

Owns what is measured and how. Rates and first-token times are the client's own clock; the transport share is the engine's;
memory is the summed proportional set size of every process of the run, this one included. Servers run one after another,
each with one thread a rank. Invariant: a first-token time counts only if the server reused exactly what it should have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from copyhold.models.layout import Dtype
from copyhold.models.manifest import load_checkpoint

from .admin_client import AdminClient
from .bench_56m import Plan56m, ServedSubject, measure_56m, require_reuse
from .bench_peer import PeerTask, PrepareTask, RandomModelTask
from .bench_plan import BenchPlan, Samples
from .bench_process import run_child
from .bench_report import BenchReport, BenchRow, Machine, Target, bench_row, versions
from .cli_output import Progress
from .config import Config
from .prepare import prepared_model
from .processes import summed_pss_mib
from .sdk import Client
from .supervisor import Supervisor

Part = Literal["smollm", "56m"]
PARTS: tuple[Part, ...] = ("smollm", "56m")
Shape = tuple[int, Dtype]
"""(ranks, dtype) of one server."""

SHAPES: tuple[Shape, ...] = ((1, "bfloat16"), (1, "float32"), (2, "bfloat16"), (3, "bfloat16"))
"""The first is the one that targets are for; the others are reported."""

DECODE_1 = Target(15.0)
DECODE_8 = Target(90.0)
TRANSPORT_SHARE = Target(0.10, at_least=False)
PSS_MIB = Target(3072.0, at_least=False)


class Served(msgspec.Struct, frozen=True):
    """A running server as the benchmark sees it."""

    client: Client
    admin: AdminClient
    vocab_size: int
    block_size: int
    pids: Callable[[], Sequence[int]]


def run_serve_bench(
    config: Config,
    shapes: Sequence[Shape],
    plan: BenchPlan,
    peers: bool,
    say: Progress,
    parts: Sequence[Part] = PARTS,
) -> BenchReport:
    """Measure the parts asked for, one after another. Raises: ``BenchInvalid``, ``ClusterError`` of a failed start."""
    machine = Machine()
    rows: list[BenchRow] = []
    notes: list[str] = []
    settings: dict[str, Any] = {"threads_per_rank": 1}
    if "smollm" in parts:
        settings |= {"plan": msgspec.to_builtins(plan), "target_shape": f"TP {shapes[0][0]} {shapes[0][1]}"}
        measured = _shapes(config, shapes, plan, peers, say)
        rows, notes = rows + measured[0], notes + measured[1]
    if "56m" in parts:
        small = Plan56m(runs=2 * plan.runs)
        settings["plan_56m"] = msgspec.to_builtins(small)
        say("56m", "random model and kernels")
        folder = Path(_subprocess(RandomModelTask(str(config.cache_path)), dict[str, str])["folder"])
        measured = measure_56m(
            config, folder, small, peers, lambda stage, detail: say("56m", f"{stage} {detail}")
        )
        rows, notes = rows + measured[0], notes + measured[1]
    return BenchReport(
        bench="serve",
        versions=versions(),
        machine=machine.facts(),
        settings=settings,
        notes=tuple(notes),
        rows=tuple(rows),
    )


def _shapes(
    config: Config, shapes: Sequence[Shape], plan: BenchPlan, peers: bool, say: Progress
) -> tuple[list[BenchRow], list[str]]:
    """Rows and notes of every shape, the peer measured first."""
    say("prepare", "checkpoints and kernels")
    _subprocess(PrepareTask(config.model, str(config.cache_path), tuple(shapes)), dict[str, str])
    theirs: dict[str, Samples] = {}
    notes: list[str] = []
    if peers and "transformers" not in versions():
        notes.append("transformers is not installed: no peer figures")
    elif peers:
        dtypes: tuple[Dtype, ...] = tuple({dtype: None for tp, dtype in shapes if tp == 1})
        say("transformers", ", ".join(dtypes))
        theirs = _subprocess(PeerTask(config.model, dtypes, plan, config.block_size), dict[str, Samples])
    rows: list[BenchRow] = []
    for number, (tp, dtype) in enumerate(shapes):
        name = f"TP {tp} {dtype}"
        samples = measure_shape(
            config, tp, dtype, plan, lambda stage, detail, name=name: say(name, f"{stage} {detail}")
        )
        peer = theirs.get(dtype) if tp == 1 else None
        rows += serve_rows(samples, "" if number == 0 else f", {name}", number == 0, peer)
    return rows, notes


def serve_rows(samples: Samples, suffix: str, targets: bool, peer: Samples | None) -> list[BenchRow]:
    """One row a figure; ``targets`` are for the first shape only."""
    other = peer or Samples()

    def row(
        name: str, unit: str, ours: list[float], target: Target | None, theirs: list[float] | None = None
    ) -> BenchRow:
        aim = target if targets else None
        return bench_row(name + suffix, unit, ours, aim, {"transformers": theirs or []})

    return [
        row("decode batch 1", "tok/s", samples.decode_1, DECODE_1, other.decode_1),
        row("decode batch 8", "tok/s", samples.decode_8, DECODE_8, other.decode_8),
        row("first token cold", "ms", samples.first_cold_ms, None, other.first_cold_ms),
        row("first token cached", "ms", samples.first_cached_ms, None, other.first_cached_ms),
        row("transport share", "fraction", samples.transport_share, TRANSPORT_SHARE),
        row("memory", "MiB", samples.pss_mib, PSS_MIB),
        row("start-up", "s", samples.start_s, None),
    ]


def measure_shape(config: Config, tp: int, dtype: Dtype, plan: BenchPlan, say: Progress) -> Samples:
    """Start a server of this shape, measure it, stop it."""
    config = msgspec.structs.replace(
        config, tp=tp, dtype=dtype, port=0, state_dir="", admin_socket="", threads_per_rank=1
    )
    started_s = time.monotonic()
    with Supervisor(config, say) as server:
        start_s = time.monotonic() - started_s
        checkpoint = load_checkpoint(Path(prepared_model(server.run_dir).path))
        with AdminClient(server.admin_socket) as admin:
            key = admin.create_tenant("bench")["key"]
            with Client(server.url, key) as client:
                vocab_size = checkpoint.config.vocab_size
                served = Served(client, admin, vocab_size, config.block_size, server.pids)
                samples = measure_served(served, plan, say)
    samples.start_s.append(start_s)
    return samples


def measure_served(served: Served, plan: BenchPlan, say: Progress) -> Samples:
    """All measures of a running server but its start."""
    found = Samples()
    prompts = plan.decode_prompts(served.vocab_size)
    decode_rate(served, prompts, plan.new_tokens)
    for run in range(plan.runs):
        say("run", f"{run + 1} of {plan.runs}")
        before = _times(served)
        found.decode_1.append(decode_rate(served, prompts[:1], plan.new_tokens))
        after = _times(served)
        step_s = after["step_s"] - before["step_s"]
        found.transport_share.append(1 - (after["execution_s"] - before["execution_s"]) / step_s)
        found.decode_8.append(decode_rate(served, prompts, plan.new_tokens))
        prompt = plan.cold_prompt(run, served.vocab_size)
        found.first_cold_ms.append(first_token_ms(served, prompt, 0))
        cached_tokens = plan.cached_tokens(served.block_size)
        found.first_cached_ms.append(first_token_ms(served, prompt, cached_tokens))
        found.pss_mib.append(summed_pss_mib(served.pids()))
    return found


def decode_rate(served: Served, prompts: Sequence[list[int]], new_tokens: int) -> float:
    """Tokens per second of all prompts together, from the first stream's first token to the last one's end."""
    measured = ServedSubject(served.client, served.admin).measure(prompts, new_tokens, None)
    return len(prompts) * (new_tokens - 1) / measured.decode_s


def first_token_ms(served: Served, prompt: list[int], cached_tokens: int) -> float:
    """Time to the first token of a request that must reuse exactly ``cached_tokens``."""
    with served.client.stream_complete(prompt, max_tokens=1, ignore_eos=True) as answer:
        reply = answer.reply()
    require_reuse({reply.cached_tokens}, cached_tokens)
    return reply.time_to_first_token_s * 1e3


def _times(served: Served) -> dict[str, float]:
    return served.admin.status()["replicas"][0]["times"]


def _subprocess(task: PrepareTask | RandomModelTask | PeerTask, kind: Any) -> Any:
    """Run a task in a process of its own. Raises: ``BenchInvalid`` when it fails."""
    asked = msgspec.json.encode(task).decode()
    answer = run_child(type(task).__name__, "copyhold.cluster.bench_peer", asked)
    return msgspec.json.decode(answer, type=kind)
