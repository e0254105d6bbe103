"""Which backend computes a rank's kernels: decided once, at start, with every refusal told.

Owns the list of backends. A backend is a module that offers what `KernelBackend` asks for, `NAME`, and
`refusal(request)`, which says why it cannot serve a request, or nothing. To add one, add its row to `BACKENDS`.
Invariant: the choice depends only on what was asked for and on this machine, is made before any K/V memory exists, and
never changes; nothing falls back later. Contracts: K145, K232.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, cast, get_args

import msgspec

from .choices import BackendChoice, KVChoice, KVDtype, kv_dtype_for
from .errors import NoKernelBackend
from .interface import TILE, KernelBackend, KernelLayout, KernelRequest

Outcome = Literal[
    "selected",
    "not_needed",
    "not_asked",
    "only_by_name",
    "unsupported_kernel_block_size",
    "kernel_contract_mismatch",
    "triton_not_installed",
    "no_cuda_device",
    "host_activations",
]


class BackendRow(msgspec.Struct, frozen=True):
    """One backend: its module, and whether `auto` may choose it."""

    name: str
    module: str
    automatic: bool = True


BACKENDS: tuple[BackendRow, ...] = (
    BackendRow("triton", "copyhold.kernels.triton_backend"),
    BackendRow("cpu", "copyhold.kernels.cpu"),
    BackendRow("reference", "copyhold.kernels.reference_backend", automatic=False),
)
"""In the order in which `auto` asks them."""


class Considered(msgspec.Struct, frozen=True):
    """What became of one backend; `outcome` is a word of a fixed list, `why` is for people."""

    backend: str
    outcome: Outcome
    why: str = ""


class KernelChoice(msgspec.Struct, frozen=True):
    """The decision of one rank, as its status shows it."""

    asked: BackendChoice
    layout: KernelLayout
    considered: tuple[Considered, ...]

    @property
    def backend(self) -> str:
        return self.layout.backend

    @property
    def kv_dtype(self) -> KVDtype:
        return self.layout.kv_dtype


def choose_kernels(
    asked: BackendChoice, kv_choice: KVChoice, kv_heads: int, head_dim: int, block_size: int
) -> KernelChoice:
    """Ask the backends in order; the first that can serve is it.

    Raises: `NoKernelBackend` with every refusal (nothing was allocated).
    """
    kv_dtype = kv_dtype_for(kv_choice)
    request = KernelRequest(kv_dtype, kv_heads, head_dim, block_size)
    selected = ""
    considered: list[Considered] = []
    for row in BACKENDS:
        refusal = None
        if selected:
            outcome: Outcome = "not_needed"
        elif asked != row.name and (asked != "auto" or not row.automatic):
            outcome = "only_by_name" if asked == "auto" else "not_asked"
        elif (refusal := _backend(row).refusal(request)) is not None:
            outcome = cast(Outcome, refusal.outcome)
            assert outcome in get_args(Outcome), f"{row.name} refuses by a word of its own: {outcome}"
        else:
            outcome, selected = "selected", row.name
        considered.append(Considered(row.name, outcome, "" if refusal is None else refusal.why))
    if not selected:
        raise NoKernelBackend(asked, [f"{each.backend}: {each.why or each.outcome}" for each in considered])
    return KernelChoice(asked, KernelLayout(selected, kv_dtype, TILE, kv_heads, head_dim), tuple(considered))


def backend_named(name: str) -> KernelBackend:
    """The module of a backend that was chosen. Raises: `NoKernelBackend`."""
    for row in BACKENDS:
        if row.name == name:
            return _backend(row)
    raise NoKernelBackend(name, [f"known: {', '.join(row.name for row in BACKENDS)}"])


def _backend(row: BackendRow) -> KernelBackend:
    return cast(KernelBackend, importlib.import_module(row.module))


def kernel_report(choice: KernelChoice | None) -> dict[str, Any]:
    """The decision as plain values for a status document; empty where none was made."""
    if choice is None:
        return {}
    return {
        "backend": choice.backend,
        "kv_dtype": choice.kv_dtype,
        "tile": choice.layout.tile,
        "asked": choice.asked,
        "considered": [msgspec.to_builtins(each) for each in choice.considered],
    }
