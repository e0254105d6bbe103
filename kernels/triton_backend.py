"""The triton backend: the calls of `KernelBackend` over CUDA tensors, and why it cannot serve where it cannot.

Layout of a layer's K/V: both `[tiles, kv_heads, TILE, head_dim]`, a token's dimensions together, in float32, float16 or
bfloat16 as torch knows them. Activations and K/V rows are CUDA tensors; what a plan is made from (tables, starts, lengths) stays
in numpy on the host. Each attention call plans its step anew; an engine makes one `AttentionStep` a step and calls that per
layer. Rotation, norm and activation are torch's own kernels.

Importing this module loads neither torch nor Triton, so that it can be asked on any machine. Invariant: `unavailable`
allocates nothing, and is the only place that decides where this backend may run.
Contracts: K140, K145, K149, K150, K232.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .batch import StepBatch
from .errors import PartitionNotWholeTiles
from .interface import TILE, Int32s, Int64s, KernelRequest, Refusal, tile_refusal
from .triton_config import AttentionConfig, attention_config
from .triton_plan import AttentionPlan, Segment, partition_for, plan_attention

if TYPE_CHECKING:
    import torch

    from .choices import KVDtype
    from .triton_step import AttentionStep

NAME = "triton"

_DEFAULT_SM = 80
"""Whose table entry Triton's interpreter uses, which has no SM."""


def unavailable() -> tuple[str, str] | None:
    """Why it can run nothing here: a word to count, and a sentence for people."""
    if importlib.util.find_spec("triton") is None:
        return "triton_not_installed", "triton is not installed: the extra `triton` brings it"
    import torch

    if torch.version.cuda is None:
        return "no_cuda_device", f"no CUDA device: torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else ("no_cuda_device", "no CUDA device")


def refusal(request: KernelRequest) -> Refusal | None:
    """In this order: no Triton, no GPU, a layout that no kernel serves, and models whose activations are on the host."""
    if (missing := unavailable()) is not None:
        return Refusal(*missing)
    if (tiles := tile_refusal(request)) is not None:
        return tiles
    return Refusal("host_activations", "models compute on the CPU: their activations are not CUDA tensors")


def device_config(k_layer: torch.Tensor, heads: int) -> AttentionConfig:
    """The table's entry for a layer's K/V on the device that holds it.

    Raises: `KernelContractMismatch`.
    """
    import torch

    sm = _DEFAULT_SM
    if k_layer.is_cuda:
        major, minor = torch.cuda.get_device_capability(k_layer.device)
        sm = 10 * major + minor
    dtype = str(k_layer.dtype).removeprefix("torch.")
    return attention_config(k_layer.shape[3], dtype, sm, heads // k_layer.shape[1])


def write_rows(
    k_layer: torch.Tensor,
    v_layer: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Store rows `[T, kv_heads, head_dim]` at `slots[T]` (int64, on the device); writes k_layer, v_layer there."""
    from .triton_pool import write_layer_rows

    write_layer_rows(k_layer, v_layer, k_rows, v_rows, slots)


def rotate_and_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_layer: torch.Tensor,
    v_layer: torch.Tensor,
    q_out: torch.Tensor,
) -> None:
    """Split `qkv [T, (heads + 2 * kv_heads) * head_dim]`, rotate q and k in float32; writes q_out, k_layer, v_layer."""
    import torch

    heads, kv_heads, head_dim = q_out.shape[1], k_layer.shape[1], k_layer.shape[3]
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    low, high = split[:, : heads + kv_heads].float().chunk(2, dim=-1)
    c, s = cos[positions][:, None].float(), sin[positions][:, None].float()
    turned = torch.cat((low * c - high * s, high * c + low * s), dim=-1)
    q_out.copy_(turned[:, :heads])
    write_rows(k_layer, v_layer, turned[:, heads:], split[:, heads + kv_heads :], slots)


def paged_attention(
    q: torch.Tensor,
    k_layer: torch.Tensor,
    v_layer: torch.Tensor,
    tile_tables: Int32s,
    seq_starts: Int32s,
    context_lens: Int32s,
    scale: float,
    out: torch.Tensor,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Causal attention `[T, heads, head_dim]`, split where rows alone leave multiprocessors idle; writes out."""

    def split(batch: StepBatch, config: AttentionConfig) -> int | None:
        if not q.is_cuda:
            return None
        import torch

        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        return partition_for(batch, q.shape[1] // k_layer.shape[1], config, k_layer.shape[1], sms)

    batch = _batch(tile_tables, seq_starts, context_lens)
    _run(q, k_layer, v_layer, batch, split, scale, out, (window, soft_cap))


def paged_attention_split(
    q: torch.Tensor,
    k_layer: torch.Tensor,
    v_layer: torch.Tensor,
    tile_tables: Int32s,
    seq_starts: Int32s,
    context_lens: Int32s,
    partition: int,
    scale: float,
    out: torch.Tensor,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Causal attention cut at every multiple of `partition` keys, whatever the batch; writes out.

    Raises: `PartitionNotWholeTiles`.
    """
    if partition <= 0 or partition % TILE:
        raise PartitionNotWholeTiles(partition, TILE)
    batch = _batch(tile_tables, seq_starts, context_lens)
    _run(q, k_layer, v_layer, batch, lambda _batch, _config: partition, scale, out, (window, soft_cap))


def paged_attention_states(
    q: torch.Tensor,
    k_layer: torch.Tensor,
    v_layer: torch.Tensor,
    tile_tables: Int32s,
    seq_starts: Int32s,
    first_rows: Int32s,
    context_lens: Int32s,
    causal: bool,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Attention over `[first_rows[s], context_lens[s])` only; writes out and lse `[T, heads]` (natural).

    causal False: every query row sees the whole range. A row that sees nothing: zeros and minus infinity (K150).
    """
    batch = _batch(tile_tables, seq_starts, context_lens)
    if not causal:
        window = 0
        batch.positions = np.repeat(context_lens.astype(np.int64) - 1, np.diff(seq_starts))
    heads, kv_heads = q.shape[1], k_layer.shape[1]
    config = device_config(k_layer, heads)
    bounds = zip(first_rows.tolist(), context_lens.tolist(), strict=True)
    segments = [Segment(first, stop, (seq,)) for seq, (first, stop) in enumerate(bounds) if stop > first]
    plan = plan_attention(
        batch, heads // kv_heads, config, window=window or None, segments=segments, states_only=True
    )
    out.zero_()
    step = _step(batch, plan, k_layer, heads, scale, (window, soft_cap))
    step.attend(q, k_layer, v_layer, out)
    lse.copy_(step.lse.masked_fill(step.key_counts == 0, float("-inf")))


def merge_states(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    """The state over both sets of tokens; writes out_a, lse_a. Outputs are never averaged (K149)."""
    merge_rows(out_a, lse_a, np.arange(out_a.shape[0]), out_b, lse_b)


def merge_rows(
    out_a: torch.Tensor, lse_a: torch.Tensor, rows: Int64s, out_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    """`merge_states` of row i of state b with row `rows[i]` of state a, in that order; writes out_a, lse_a."""
    from . import triton_step

    triton_step.merge_rows(out_a, lse_a, rows, out_b, lse_b)


def narrow_rows(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Rows `[T, heads, head_dim]` in the type of out; writes out."""
    out.copy_(rows)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """`x += delta`, then `out = rms_norm(x) * weight`; writes x, out."""
    import torch

    x += delta
    wide = x.float()
    out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """`out = silu(gate) * up` of rows that hold gate, then up; writes out."""
    import torch

    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def warm_up(kv_dtype: KVDtype = "float32") -> None:
    """Nothing: Triton compiles a kernel at its first launch with given constants, and keeps it on disk."""


def compile_counts() -> dict[str, tuple[int, int]]:
    """Nothing is counted here; the compile checks count."""
    return {}


def _batch(tile_tables: Int32s, seq_starts: Int32s, context_lens: Int32s) -> StepBatch:
    """A step as planning sees it; what only writing or sampling needs is empty."""
    counts = np.diff(seq_starts)
    rows = int(counts.sum())
    positions = np.repeat(context_lens - counts - seq_starts[:-1], counts) + np.arange(rows)
    none = np.zeros(rows, dtype=np.int64)
    return StepBatch(none, positions, none, seq_starts, context_lens, tile_tables, none[:0])


def _step(
    batch: StepBatch,
    plan: AttentionPlan,
    k_layer: torch.Tensor,
    heads: int,
    scale: float,
    limits: tuple[int, float],
) -> AttentionStep:
    from .triton_step import AttentionShape, AttentionStep

    window, soft_cap = limits
    shape = AttentionShape(
        heads, k_layer.shape[1], k_layer.shape[3], float(scale), window or None, soft_cap or None
    )
    return AttentionStep(batch, plan, shape, k_layer.device)


def _run(
    q: torch.Tensor,
    k_layer: torch.Tensor,
    v_layer: torch.Tensor,
    batch: StepBatch,
    split: Callable[[StepBatch, AttentionConfig], int | None],
    scale: float,
    out: torch.Tensor,
    limits: tuple[int, float],
) -> None:
    heads = q.shape[1]
    config = device_config(k_layer, heads)
    plan = plan_attention(
        batch,
        heads // k_layer.shape[1],
        config,
        window=limits[0] or None,
        partition_tokens=split(batch, config),
    )
    _step(batch, plan, k_layer, heads, scale, limits).attend(q, k_layer, v_layer, out)
