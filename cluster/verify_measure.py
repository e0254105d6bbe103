"""What one run of ``copyhold verify`` found: streams held against cold runs, stored rows, and what really happened.

Owns the comparison. Tokens are compared to the end; logits as long as both have been fed the same tokens, since after a
different choice they answer different questions. Invariant: a run whose counts show that its kind of reuse did not happen is
not ok, however equal its tokens are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from copyhold.models.cold_run import ColdResult

from .demo_checks import Check
from .verify_plan import BOUNDS, ROW_BOUND_SHARES, VerifyCase

Logits = npt.NDArray[np.float32]


class Compared(msgspec.Struct, frozen=True):
    """One stream beside its cold run; ``fed`` are the tokens that were fed on, where they were not its own choice."""

    tokens: tuple[int, ...]
    logits: tuple[Logits, ...]
    cold: ColdResult
    failure: str = ""


class RunFound(msgspec.Struct, frozen=True):
    """One kind of reuse in one case. ``needed``: counts that must not be zero for the run to have been one."""

    kind: str
    streams: tuple[Compared, ...]
    counts: Mapping[str, int]
    needed: tuple[str, ...]
    rows_compared: int = 0
    row_difference: float = 0.0
    largest_row: float = 0.0


def deviation(stream: Compared) -> float:
    """Largest difference of a logit, as a share of the cold run's largest; 0 tokens compared is infinite."""
    worst, compared = 0.0, 0
    for place, (mine, cold) in enumerate(zip(stream.logits, stream.cold.logits, strict=False)):
        if stream.tokens[:place] != stream.cold.tokens[:place]:
            break
        difference = float(np.abs(mine - cold).max() / np.abs(cold).max())
        worst = max(worst, float("inf") if np.isnan(difference) else difference)
        compared += 1
    return worst if compared else float("inf")


def same_bits(stream: Compared) -> bool:
    """Whether every logit of every token has the bits of the cold run's."""
    pairs = zip(stream.logits, stream.cold.logits, strict=False)
    return len(stream.logits) == len(stream.cold.logits) and all(
        np.array_equal(mine.view(np.int32), cold.view(np.int32)) for mine, cold in pairs
    )


def judge(case: VerifyCase, found: RunFound) -> Check:
    """The verdict of one run. In float32 tokens must be equal; in bfloat16 near ties may fall either way."""
    equal = sum(stream.tokens == stream.cold.tokens and not stream.failure for stream in found.streams)
    worst = max((deviation(stream) for stream in found.streams), default=float("inf"))
    bound, row_share = BOUNDS[case.bound_dtype], ROW_BOUND_SHARES[case.bound_dtype]
    missing = [name for name in found.needed if not found.counts.get(name)]
    faults = [f"{stream.failure}" for stream in found.streams if stream.failure]
    if case.bound_dtype == "float32" and equal < len(found.streams):
        faults.append("output_differs_from_uncached: other tokens")
    if not worst <= bound:
        faults.append(f"numerical_mismatch: logits differ by {worst:.1e}")
    if case.deterministic and not all(same_bits(stream) for stream in found.streams):
        faults.append("numerical_mismatch: other bits")
    rows = found.row_difference / found.largest_row if found.largest_row else 0.0
    if not rows <= (0.0 if case.deterministic else row_share):
        faults.append(f"numerical_mismatch: stored rows differ by {rows:.1e}")
    if missing:
        faults.append(f"did not happen: {', '.join(missing)}")
    value: dict[str, Any] = {
        "equal_streams": equal,
        "streams": len(found.streams),
        "max_logit_deviation": worst if np.isfinite(worst) else None,
        "rows_compared": found.rows_compared,
        "max_row_deviation": rows if np.isfinite(rows) else None,
        "counts": {name: int(count) for name, count in sorted(found.counts.items()) if count},
    }
    held = f"logits within {bound:.0e}" + (", bits equal" if case.deterministic else "")
    return Check(f"{case.label}: {found.kind}", not faults, value, "; ".join(faults) or held)


def failed(case: VerifyCase, kind: str, error: Exception) -> Check:
    """The verdict of a run that stopped."""
    return Check(f"{case.label}: {kind}", False, None, f"{type(error).__name__}: {error}")


def largest(checks: Sequence[Check], field: str) -> float | None:
    """The largest of one measured figure over all checks that have it; None where none has."""
    found = [
        check.value[field]
        for check in checks
        if isinstance(check.value, dict) and check.value.get(field) is not None
    ]
    return max(found, default=None)
