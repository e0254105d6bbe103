"""The rows ``56m`` of ``copyhold bench serve``: a small random Llama behind a real server, beside vLLM's engine.

Owns what is measured and the targets, which are vLLM's medians of the same call. The model is small, so that what a step costs
besides its products shows. The two take turns, measure by measure, with one compute thread each. Invariants: a prompt counts
only if it was reused to the token; the batch with a shared prompt counts only if its steps took a shared schedule.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from .admin_client import AdminClient
from .bench_report import BenchRow, Target, bench_row
from .bench_vllm_serve import VLLM, Measure, VllmEngine
from .cli_output import Progress
from .config import Config
from .errors import BenchInvalid
from .sdk import Client
from .supervisor import Supervisor

Prompts = Sequence[Sequence[int]]

SERVER: dict[str, Any] = {"tp": 1, "dtype": "bfloat16", "pool_tokens": 16384, "threads_per_rank": 1}
"""What the server differs in from its defaults."""

_LEAST_SHARED = 0.8
"""Share of the steps of the shared batch that must have taken a shared schedule: some come before all have arrived."""


class Plan56m(msgspec.Struct, frozen=True):
    """Lengths in tokens. The first ``prefix_tokens`` of a long prompt are cached before it is sent."""

    runs: int = 3
    batch: int = 8
    decode_prompt_tokens: int = 128
    new_tokens: int = 64
    prefix_tokens: int = 1792
    rest_tokens: int = 256
    own_tokens: int = 16
    vocab_size: int = 32_000

    def tokens(self, stream: int, count: int) -> list[int]:
        """Ids of one stream of numbers, equal for every subject."""
        return np.random.default_rng([56, stream]).integers(1000, self.vocab_size, count).tolist()

    def decode_prompts(self) -> list[list[int]]:
        """One prompt for each sequence of a batch; sent once before, so that a batch starts in one step."""
        return [self.tokens(row, self.decode_prompt_tokens) for row in range(self.batch)]

    def prefix(self) -> list[int]:
        """What the long prompts share."""
        return self.tokens(500, self.prefix_tokens)

    def long_prompt(self, run: int) -> list[int]:
        """The prefix, and what nobody sent before."""
        return self.prefix() + self.tokens(1000 + run, self.rest_tokens)

    def shared_prompts(self, run: int) -> list[list[int]]:
        """A batch below the prefix, each with tokens of its own."""
        return [
            self.prefix() + self.tokens(2000 + run * self.batch + row, self.own_tokens)
            for row in range(self.batch)
        ]


class Samples56m(msgspec.Struct):
    """Measured values of one subject, one list entry a run. ``shared_steps``: the share that took a shared schedule."""

    decode_1: list[float] = []
    decode_8: list[float] = []
    first_cached_ms: list[float] = []
    shared: list[float] = []
    shared_steps: list[float] = []


class Subject(Protocol):
    """What can be measured; ``cached_tokens`` must be reused of every prompt, None does not ask."""

    def measure(self, prompts: Prompts, new_tokens: int, cached_tokens: int | None) -> Measure: ...


class ServedSubject:
    """A running server, driven over HTTP with one key."""

    def __init__(self, client: Client, admin: AdminClient) -> None:
        self._client, self._admin = client, admin

    def measure(self, prompts: Prompts, new_tokens: int, cached_tokens: int | None) -> Measure:
        """Raises: ``BenchInvalid`` for a stream of another length or other reuse."""
        began_s = time.perf_counter()

        def stream(prompt: Sequence[int]) -> tuple[float, float, int, int]:
            sent_s = time.perf_counter()
            with self._client.stream_complete(list(prompt), max_tokens=new_tokens, ignore_eos=True) as answer:
                reply = answer.reply()
            first_s = sent_s + reply.time_to_first_token_s
            return first_s, time.perf_counter(), reply.completion_tokens, reply.cached_tokens

        with ThreadPoolExecutor(len(prompts)) as threads:
            streams = list(threads.map(stream, prompts))
        lengths, reused = {came for _, _, came, _ in streams}, {found for *_, found in streams}
        if lengths != {new_tokens}:
            raise BenchInvalid(f"{lengths} tokens came, {new_tokens} were asked for")
        if cached_tokens is not None:
            require_reuse(reused, cached_tokens)
        first_s = min(first for first, *_ in streams)
        return Measure(first_s - began_s, max(end for _, end, *_ in streams) - first_s)

    def attention_steps(self) -> tuple[int, int]:
        """(steps with a shared schedule, all steps) of the rank so far."""
        steps = self._admin.ranks()["ranks"][0]["shared_reads"]["steps"]
        return steps["hydragen"] + steps["chunk"], sum(steps.values())


def require_reuse(reused: Collection[int], cached_tokens: int) -> None:
    """Raises: ``BenchInvalid`` when any prompt reused other than ``cached_tokens``."""
    if set(reused) != {cached_tokens}:
        found = ", ".join(str(tokens) for tokens in sorted(set(reused)))
        raise BenchInvalid(f"{found} tokens were reused, {cached_tokens} expected")


def measure_56m(
    config: Config, model: Path, plan: Plan56m, peers: bool, say: Progress
) -> tuple[list[BenchRow], list[str]]:
    """Rows and notes. ``model``: the folder of ``bench_checkpoint``. Raises: ``BenchInvalid``, ``ClusterError``."""
    config = msgspec.structs.replace(
        config, model=str(model), port=0, state_dir="", admin_socket="", **SERVER
    )
    with (
        Supervisor(config, say) as server,
        AdminClient(server.admin_socket) as admin,
        Client(server.url, admin.create_tenant("bench")["key"]) as client,
        ExitStack() as stack,
    ):
        ours = ServedSubject(client, admin)
        theirs, notes = _peer(model, stack, say) if peers else (None, [])
        return rows_56m(*alternate(plan, ours, theirs, say)), notes


def _peer(model: Path, stack: ExitStack, say: Progress) -> tuple[Subject | None, list[str]]:
    """vLLM's engine for as long as the stack is open, or the note that says why there is none."""
    if not VLLM.is_installed:
        return None, [VLLM.not_installed().text]
    say("vllm", "starting")
    try:
        return stack.enter_context(VllmEngine(model, SERVER["threads_per_rank"])), []
    except BenchInvalid as error:
        return None, [VLLM.note(error).text]


def alternate(
    plan: Plan56m, ours: ServedSubject, theirs: Subject | None, say: Progress
) -> tuple[Samples56m, Samples56m]:
    """Every measure of every run, ours and the peer's in turn. Raises: ``BenchInvalid``."""
    found = (Samples56m(), Samples56m())
    subjects: list[tuple[Subject, Samples56m]] = [(ours, found[0])]
    if theirs is not None:
        subjects.append((theirs, found[1]))
    prompts, generated = plan.decode_prompts(), plan.batch * (plan.new_tokens - 1)
    for subject, _ in subjects:
        subject.measure(prompts, plan.new_tokens, None)
        subject.measure([plan.prefix()], 1, None)
    for run in range(plan.runs):
        say("run", f"{run + 1} of {plan.runs}")
        for subject, samples in subjects:
            one = subject.measure(prompts[:1], plan.new_tokens, None)
            samples.decode_1.append((plan.new_tokens - 1) / one.decode_s)
        for subject, samples in subjects:
            samples.decode_8.append(generated / subject.measure(prompts, plan.new_tokens, None).decode_s)
        for subject, samples in subjects:
            first = subject.measure([plan.long_prompt(run)], 1, plan.prefix_tokens)
            samples.first_cached_ms.append(first.first_s * 1e3)
        shared_before, all_before = ours.attention_steps()
        for subject, samples in subjects:
            batch = subject.measure(plan.shared_prompts(run), plan.new_tokens, plan.prefix_tokens)
            samples.shared.append(generated / batch.decode_s)
        shared_after, all_after = ours.attention_steps()
        found[0].shared_steps.append(shared_share(shared_after - shared_before, all_after - all_before))
    return found


def shared_share(shared: int, steps: int) -> float:
    """Share of steps that took a shared schedule. Raises: ``BenchInvalid`` below ``_LEAST_SHARED``."""
    if shared < _LEAST_SHARED * steps or not steps:
        raise BenchInvalid(f"{shared} of {steps} steps read the shared prompt together")
    return shared / steps


def rows_56m(ours: Samples56m, theirs: Samples56m) -> list[BenchRow]:
    """One row a figure; without the peer's samples there are no targets."""

    def row(name: str, unit: str, ours: list[float], theirs: list[float], factor: float = 1.0) -> BenchRow:
        aim = Target(factor * float(np.median(theirs)), at_least=unit != "ms") if theirs else None
        return bench_row(f"56m {name}", unit, ours, aim, {"vllm": theirs})

    return [
        row("decode 1", "tok/s", ours.decode_1, theirs.decode_1),
        row("decode 8", "tok/s", ours.decode_8, theirs.decode_8),
        row("first token cached", "ms", ours.first_cached_ms, theirs.first_cached_ms),
        row("shared 8x1792", "tok/s", ours.shared, theirs.shared, 1.1),
        row("shared steps", "fraction", ours.shared_steps, []),
    ]
