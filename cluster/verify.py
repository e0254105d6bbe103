"""``copyhold verify``: on this checkpoint and this machine, reuse changes nothing (contracts K147, K219).

Owns the order of the cases and the document. The runs are the real scheduler, ledgers, ranks, pools and kernels in this
process; the measure is a cold run of each prompt alone. One set of shards is in memory at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from copyhold.actors.errors import ActorError
from copyhold.kernels import cpu
from copyhold.kernels.errors import KernelError, UnsupportedKernelBlockSize
from copyhold.kernels.pool import KVPool
from copyhold.kvcore.errors import LedgerRefusal
from copyhold.models.cold_run import cold_run
from copyhold.models.config import ModelConfig
from copyhold.models.convert import convert
from copyhold.models.errors import ModelError
from copyhold.models.shard_set import ShardSet

from .cli_output import Progress
from .demo_checks import Check
from .prepare import compile_kernels
from .verify_fork import forked
from .verify_measure import RunFound, failed, judge, largest
from .verify_plan import BOUNDS, VerifyCase, VerifyPrompts, verify_cases, verify_prompts
from .verify_runs import Cold, ScheduledRuns

_FAULTS = (ActorError, KernelError, LedgerRefusal, ModelError, AssertionError)
"""What a run can stop with; it is a finding about the run, and the others go on."""


class VerifyReport(msgspec.Struct, frozen=True):
    """Everything that was found."""

    model: str
    quick: bool
    checks: tuple[Check, ...]
    not_applicable: tuple[Check, ...]
    elapsed_s: float

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def document(self) -> dict[str, Any]:
        """The JSON document; ``totals`` adds up every run's counts."""
        totals: dict[str, int] = {}
        for check in self.checks:
            counts = check.value.get("counts", {}) if isinstance(check.value, dict) else {}
            for name, count in counts.items():
                totals[name] = totals.get(name, 0) + count
        return {
            "ok": self.ok,
            "model": self.model,
            "quick": self.quick,
            "checks": msgspec.to_builtins(self.checks),
            "not_applicable": msgspec.to_builtins(self.not_applicable),
            "totals": dict(sorted(totals.items())),
            "bounds": dict(BOUNDS),
            "max_logit_deviation": {
                dtype: largest(
                    [check for check in self.checks if ("bfloat16" in check.name) == (dtype == "bfloat16")],
                    "max_logit_deviation",
                )
                for dtype in BOUNDS
            },
            "elapsed_s": round(self.elapsed_s, 1),
        }


def run_verify(model: str, cache_dir: Path, quick: bool, say: Progress) -> VerifyReport:
    """Convert what is missing, run every case. Raises: ``ModelError`` for a checkpoint that cannot be used at all."""
    started_s = time.monotonic()
    source = Path(model).expanduser() if model else None
    say("kernels", "compiling")
    compile_kernels()
    say("model", "checking the converted checkpoint")
    first = convert(source, cache_dir, 1)
    checks: list[Check] = []
    reference: Cold = {}
    with _one_thread():
        for case in verify_cases(first.config, quick):
            say("case", f"{case.label}: loading")
            checkpoint = convert(source, cache_dir, case.tp, dtype=case.dtype)
            prompts = verify_prompts(first.path, case.whole)
            cpu.warm_up(case.kv_dtype)
            shards = ShardSet(checkpoint, case.deterministic, kv_dtype=case.kv_dtype)
            try:
                cold = _cold_runs(shards, case, prompts, reference)
                reference = reference or cold
                checks += _runs(shards, case, prompts, cold, say)
            finally:
                shards.close()
    checks.append(_small_blocks())
    elapsed_s = time.monotonic() - started_s
    return VerifyReport(
        model or "installed default", quick, tuple(checks), _not_applicable(first.config), elapsed_s
    )


def _cold_runs(shards: ShardSet, case: VerifyCase, prompts: VerifyPrompts, reference: Cold) -> Cold:
    """Cold runs on these shards; where bits need not be equal, the first case's serve every cut in the same dtype."""
    if reference and case.bound_dtype == "float32" and not case.deterministic:
        return _shortened(reference, prompts)
    return {prompt: cold_run(shards, prompt, prompts.new_tokens) for prompt in prompts.prompts}


def _shortened(reference: Cold, prompts: VerifyPrompts) -> Cold:
    count = prompts.new_tokens
    return {
        prompt: msgspec.structs.replace(
            reference[prompt],
            tokens=reference[prompt].tokens[:count],
            logits=reference[prompt].logits[:count],
        )
        for prompt in prompts.prompts
    }


def _runs(
    shards: ShardSet, case: VerifyCase, prompts: VerifyPrompts, cold: Cold, say: Progress
) -> Iterator[Check]:
    scheduled = ScheduledRuns(shards, case, prompts, cold).all()
    runs = {**scheduled, "forked and cut back": lambda: forked(shards, case, prompts)}
    for kind, run in runs.items():
        say("case", f"{case.label}: {kind}")
        try:
            found: RunFound = run()
        except _FAULTS as error:
            yield failed(case, kind, error)
            continue
        yield judge(case, found)


def _small_blocks() -> Check:
    """Blocks below the kernels' tile are refused by name; nothing computes with them quietly."""
    try:
        KVPool(1, 1, 1, 16, 8)
    except UnsupportedKernelBlockSize as error:
        return Check("block 8", True, error.reason, f"refused: {error}")
    return Check("block 8", False, None, "a pool of blocks that are no multiple of a tile was made")


def _not_applicable(config: ModelConfig) -> tuple[Check, ...]:
    if config.num_layers > 1:
        return ()
    return (Check("two cache groups", True, "not applicable", "the model has one layer"),)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One compute thread a rank, as ranks are served."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
