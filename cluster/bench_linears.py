"""Linear rows of ``copyhold bench kernels``: SmolLM2's packed matrices beside torch's product of plain ones."""

from __future__ import annotations

import torch

from copyhold.models.linear import Linear

from .bench_report import BenchRow, bench_row
from .bench_turns import in_turns, least_of

_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
_LAYERS = 30


def linear_rows(rounds: int) -> list[BenchRow]:
    """All layers' products, without the head; the peer is ``torch.nn.functional.linear``."""
    return [_row(dtype, count, rounds) for dtype in (torch.float32, torch.bfloat16) for count in (1, 8, 256)]


def _row(dtype: torch.dtype, count: int, rounds: int) -> BenchRow:
    plain = [torch.randn(shape).to(dtype) for _ in range(_LAYERS) for shape in _SHAPES]
    inputs = [torch.randn(count, weight.shape[1]).to(dtype) for weight in plain]
    packed = [Linear(weight) for weight in plain]

    def ours() -> None:
        for x, linear in zip(inputs, packed, strict=True):
            linear(x)

    def theirs() -> None:
        for x, weight in zip(inputs, plain, strict=True):
            torch.nn.functional.linear(x, weight)

    mine, other = in_turns([least_of(ours), least_of(theirs)], rounds, 3 if count < 256 else 1)
    name = f"linears {count} rows {str(dtype).removeprefix('torch.')} ms"
    peers = {"torch linear": [s * 1e3 for s in other]}
    return bench_row(name, "ms", [s * 1e3 for s in mine], None, peers)
