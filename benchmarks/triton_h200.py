"""The Triton kernels on a GPU: right first, then timed. Unattended, under 4 minutes: ``python benchmarks/triton_h200.py --json``.

Correctness is against float64 on the same device, with NaN in every row that must not be read. Times are CUDA events around
ten calls as an engine makes them, launches included; peers are torch's scaled_dot_product_attention on K/V that already lie
contiguous, and FlashInfer on the same pages where it can be imported. Bandwidth shares are bytes of K/V that must be read,
over the bandwidth of a large copy in the same run. Exit code 3 where there is no GPU: then nothing is measured.

Written for an H200 with torch 2.11 and Triton 3.6; any NVIDIA GPU from sm_80 on will do. ``--rehearse`` runs every line of it in
Triton's interpreter, without a GPU, over tiny shapes: it proves the script, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from copyhold.cluster.bench_report import BenchReport, BenchRow, Machine, Target, bench_row, versions
from copyhold.kernels.batch import StepBatch
from copyhold.kernels.triton_backend import device_config
from copyhold.kernels.triton_plan import Segment, partition_for, plan_attention

NO_GPU = 3
BUDGET_S = 200.0
"""No further row is begun after this; what was left out is a note."""
CALLS = 10
"""Calls of one run, launched one after another, so that the next is queued before one ends."""
BOUNDS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Largest norm of the error, relative to the norm of the result."""


@dataclass(frozen=True)
class Shape:
    """One step over one pool; the first `prefix` tokens of all sequences are the same blocks."""

    contexts: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    prefix: int = 0
    partition: int | None = None

    @property
    def kv_bytes(self) -> int:
        """K/V bytes of all contexts; a prefix counted for each sequence."""
        element = 4 if self.dtype == "float32" else 2
        return 2 * sum(self.contexts) * self.kv_heads * self.head_dim * element


class Place:
    """The device, and how time passes there."""

    def __init__(self, rehearsal: bool) -> None:
        self.rehearsal = rehearsal
        self.device = torch.device("cpu" if rehearsal else "cuda")
        self.notes: list[str] = []
        self.sms = 4 if rehearsal else torch.cuda.get_device_properties(0).multi_processor_count

    def times_ms(self, work: Callable[[], object], runs: int) -> list[float]:
        """Milliseconds of a call in each run, after some that are not counted."""
        for _ in range(0 if self.rehearsal else 5):
            work()
        return [self._once_ms(work) for _ in range(runs)]

    def _once_ms(self, work: Callable[[], object]) -> float:
        if self.rehearsal:
            started_ns = time.perf_counter_ns()
            work()
            return (time.perf_counter_ns() - started_ns) / 1e6
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(CALLS):
            work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / CALLS


class Step:
    """Random K/V and queries of a shape; every row and table cell that may not be read is poisoned."""

    def __init__(self, shape: Shape, place: Place, seed: int = 0) -> None:
        from copyhold.kernels.triton_pool import TritonPool

        self.shape, self.place = shape, place
        rng, size = np.random.default_rng(seed), shape.block_size
        needed = [-(-context // size) for context in shape.contexts]
        shared = shape.prefix // size
        blocks = shared + sum(count - shared for count in needed) + 8
        self.pool = TritonPool(
            1, blocks, shape.kv_heads, shape.head_dim, size, shape.dtype, device=place.device
        )
        tables = np.full((len(needed), max(needed) + 1), 2**30, dtype=np.int32)
        free = iter(rng.permutation(blocks).astype(np.int32))
        prefix = np.fromiter(itertools.islice(free, shared), dtype=np.int32)
        for seq, count in enumerate(needed):
            tables[seq, :shared] = prefix
            tables[seq, shared:count] = np.fromiter(itertools.islice(free, count - shared), dtype=np.int32)
        counts, lens = np.array(shape.queries), np.array(shape.contexts, dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.repeat(lens - counts - starts[:-1], counts) + np.arange(counts.sum())
        none = np.zeros(counts.sum(), dtype=np.int64)
        self.batch = StepBatch(none, positions, none, starts, lens, tables, none[:0])
        generator = torch.Generator(place.device).manual_seed(seed)
        for part in (self.pool.k, self.pool.v):
            part.normal_(generator=generator)
        self._poison(tables, np.fromiter(free, dtype=np.int32))
        q_shape = (int(counts.sum()), shape.heads, shape.head_dim)
        self.q = torch.empty(q_shape, dtype=self.pool.k.dtype, device=place.device).normal_(
            generator=generator
        )
        self.out = torch.full_like(self.q, math.nan)
        self.scale = 1 / math.sqrt(shape.head_dim)

    def _poison(self, tables: np.ndarray, unused: np.ndarray) -> None:
        tiles = self.pool.tiles_per_block
        for part in (self.pool.k[0], self.pool.v[0]):
            blocks = part.view(-1, tiles, *part.shape[1:])
            blocks[torch.from_numpy(unused.astype(np.int64)).to(part.device)] = math.nan
            for seq, context in enumerate(self.shape.contexts):
                if used := context % self.shape.block_size:
                    block = blocks[int(tables[seq, context // self.shape.block_size])]
                    for tile in range(tiles):
                        block[tile, :, max(0, used - tile * 16) :] = math.nan

    def prepared(self, segments: Sequence[Segment] | None = None) -> Any:
        """The step as an engine would launch it."""
        from copyhold.kernels.triton_step import AttentionShape, AttentionStep

        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        config = device_config(self.pool.k[0], shape.heads)
        partition = shape.partition or partition_for(
            self.batch, group, config, shape.kv_heads, self.place.sms
        )
        if segments is not None:
            partition = shape.partition or config.partition_tokens
        plan = plan_attention(
            self.batch,
            group,
            config,
            window=shape.window,
            segments=segments,
            partition_tokens=partition,
        )
        heads = (shape.heads, shape.kv_heads, shape.head_dim)
        return AttentionStep(
            self.batch,
            plan,
            AttentionShape(*heads, self.scale, shape.window, shape.soft_cap),
            self.place.device,
            self.pool.tiles_per_block,
        )

    def attention(self, segments: Sequence[Segment] | None = None) -> Callable[[], None]:
        step, pool = self.prepared(segments), self.pool
        return lambda: step.attend(self.q, pool.k[0], pool.v[0], self.out)

    def shared(self) -> list[Segment]:
        """The prefix for all, the rest of each alone."""
        everyone = tuple(range(len(self.shape.contexts)))
        own = [Segment(self.shape.prefix, context, (seq,)) for seq, context in enumerate(self.shape.contexts)]
        return [Segment(0, self.shape.prefix, everyone), *own]

    def gathered(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V rows `[context, kv_heads, head_dim]` of one sequence, copied."""
        at = np.arange(self.shape.contexts[seq])
        blocks = self.batch.block_tables[seq][at // self.shape.block_size].astype(np.int64)
        slots = blocks * self.shape.block_size + at % self.shape.block_size
        tiles, lanes = (torch.from_numpy(n).to(self.place.device) for n in (slots // 16, slots % 16))
        return self.pool.k[0][tiles, :, lanes], self.pool.v[0][tiles, :, lanes]

    def expected(self) -> torch.Tensor:
        """Float64 attention over contiguous rows."""
        shape, out = self.shape, torch.zeros_like(self.q, dtype=torch.float64)
        for seq, context in enumerate(shape.contexts):
            first, last = self.batch.seq_starts[seq : seq + 2].tolist()
            k, v = (rows.double() for rows in self.gathered(seq))
            q = self.q[first:last].double().view(last - first, shape.kv_heads, -1, shape.head_dim)
            scores = torch.einsum("nkgd,lkd->nkgl", q, k) * self.scale
            if shape.soft_cap:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            key = torch.arange(context, device=q.device)
            position = torch.arange(context - (last - first), context, device=q.device)[:, None]
            seen = key <= position
            if shape.window:
                seen &= key > position - shape.window
            scores.masked_fill_(~seen[:, None, None], -math.inf)
            out[first:last] = torch.einsum("nkgl,lkd->nkgd", scores.softmax(-1), v).reshape_as(
                out[first:last]
            )
        return out


def correctness(place: Place) -> Iterator[BenchRow]:
    """One row a case: the relative error, at most the dtype's bound."""
    ragged, mixed = (64, 63, 17, 1), ((64, 63, 17, 1, 90), (1, 40, 17, 1, 7))
    long = 97 if place.rehearsal else 2049
    for dtype in BOUNDS:
        small = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": dtype}
        yield from _checked(
            place,
            {
                f"{dtype} ragged decode": Shape(ragged, (1,) * 4, **small),
                f"{dtype} mixed, split": Shape(*mixed, **small, partition=64),
                f"{dtype} long, split": Shape((long, long - 1), (1, 1), 4, 1, 128, dtype, partition=64),
                f"{dtype} blocks of 32": Shape((100, 31, 65), (20, 1, 65), **small, block_size=32),
                f"{dtype} window of 17": Shape((70, 34, 9), (20, 1, 9), **small, window=17, partition=64),
                f"{dtype} soft cap": Shape((70, 34), (20, 1), **small, soft_cap=0.5),
                f"{dtype} 40 heads on one": Shape((50,), (3,), 40, 1, 80, dtype),
                f"{dtype} shared prefix": Shape((52, 49, 61), (1, 1, 9), **small, prefix=48),
            },
        )


def _checked(place: Place, cases: dict[str, Shape]) -> Iterator[BenchRow]:
    for name, shape in cases.items():
        step = Step(shape, place)
        step.attention(step.shared() if shape.prefix else None)()
        expected = step.expected()
        error = float((step.out.double() - expected).norm() / expected.norm())
        bound = Target(BOUNDS[shape.dtype], at_least=False)
        yield bench_row(f"error, {name}", "relative", [error if math.isfinite(error) else 1e9], bound)


def copy_bandwidth(place: Place, runs: int) -> BenchRow:
    """Bytes read and written by a large copy, per second."""
    size = 1 << (16 if place.rehearsal else 30)
    source = torch.empty(size, dtype=torch.uint8, device=place.device).random_()
    target = torch.empty_like(source)
    times = place.times_ms(lambda: target.copy_(source), runs)
    return bench_row("copy bandwidth", "GB/s", [2 * size / ms / 1e6 for ms in times])


def decode(place: Place, name: str, shape: Shape, copy_gb_s: float, runs: int) -> Iterator[BenchRow]:
    """Milliseconds, and the K/V bytes per second as a share of the copy's."""
    step = Step(shape, place)
    ours = place.times_ms(step.attention(), runs)
    peers = {"torch sdpa, contiguous": place.times_ms(_sdpa_decode(step), runs)}
    try:
        if (theirs := _flashinfer_decode(step)) is not None:
            peers["flashinfer"] = place.times_ms(theirs, runs)
    except Exception as error:  # noqa: BLE001 - whatever a peer's installation lacks must not cost our own figures
        place.notes.append(f"flashinfer failed at {name}: {type(error).__name__}: {error}"[:300])
    yield bench_row(name, "ms", ours, None, peers)
    shares = [shape.kv_bytes / ms / 1e6 / copy_gb_s for ms in ours]
    yield bench_row(f"{name}, share of copy bandwidth", "ratio", shares)


def _sdpa_decode(step: Step) -> Callable[[], object]:
    """Query groups folded into rows, which reads K/V once."""
    rows = [step.gathered(seq) for seq in range(len(step.shape.contexts))]
    k, v = (torch.stack([pair[i] for pair in rows]).transpose(1, 2).contiguous() for i in (0, 1))
    q = step.q.view(len(rows), step.shape.kv_heads, -1, step.shape.head_dim)
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=step.scale)


def _flashinfer_decode(step: Step) -> Callable[[], object] | None:
    """FlashInfer over the same pages; ``None`` where it is not installed or keeps other dtypes."""
    shape = step.shape
    if importlib.util.find_spec("flashinfer") is None or shape.dtype == "float32" or shape.block_size != 16:
        return None
    import flashinfer  # pyright: ignore[reportMissingImports]

    counts = [-(-context // 16) for context in shape.contexts]
    indices = np.concatenate([step.batch.block_tables[seq, :count] for seq, count in enumerate(counts)])
    last = [(context - 1) % 16 + 1 for context in shape.contexts]
    pages, starts, tails = (
        torch.tensor(n, dtype=torch.int32, device=step.place.device)
        for n in (indices, np.cumsum([0, *counts]), last)
    )
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=step.place.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
    wrapper.plan(
        starts,
        pages,
        tails,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        16,
        q_data_type=step.q.dtype,
        kv_data_type=step.q.dtype,
    )
    return lambda: wrapper.run(step.q, (step.pool.k[0], step.pool.v[0]))


def shared_prefix(place: Place, runs: int) -> BenchRow:
    """32 requests over one prefix: read once, beside our own kernel that reads it for each."""
    batch, prefix, own = (3, 32, 9) if place.rehearsal else (32, 2048, 64)
    step = Step(Shape((prefix + own,) * batch, (1,) * batch, prefix=prefix), place)
    plain = place.times_ms(step.attention(), runs)
    together = place.times_ms(step.attention(step.shared()), runs)
    return bench_row(f"shared {batch}x{prefix}", "ms", together, None, {"own plain kernel": plain})


def prefill(place: Place, runs: int) -> BenchRow:
    """The last rows of a context whose first rows are cached."""
    rows, context = (20, 60) if place.rehearsal else (512, 2048)
    step = Step(Shape((context,), (rows,)), place)
    group = step.shape.heads // step.shape.kv_heads
    k, v = (part.transpose(0, 1).repeat_interleave(group, 0)[None].contiguous() for part in step.gathered(0))
    from torch.nn.attention.bias import causal_lower_right

    q, bias = step.q.transpose(0, 1)[None].contiguous(), causal_lower_right(rows, context)
    theirs = place.times_ms(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias), runs
    )
    name = f"prefill {rows} on {context - rows}"
    return bench_row(
        name, "ms", place.times_ms(step.attention(), runs), None, {"torch sdpa, contiguous": theirs}
    )


def row_kernels(place: Place, runs: int) -> Iterator[BenchRow]:
    """Writing, copying, zeroing and counting, each checked and then beside a copy of as many bytes."""
    from copyhold.kernels.triton_pool import TritonPool

    layers, blocks, rows = (2, 4, 5) if place.rehearsal else (32, 2048, 512)
    pool = TritonPool(layers, blocks, 8, 128, 16, "bfloat16", device=place.device)
    new = torch.randn(rows, 8, 128, device=place.device).to(torch.bfloat16)
    slots = torch.randperm(blocks * 16, device=place.device)[:rows]
    half = blocks // 2
    jobs = [(source, half + source, 16) for source in range(half)]
    everything = list(range(blocks))

    def beside(size_bytes: int) -> list[float]:
        source = torch.empty(size_bytes // 2, dtype=torch.uint8, device=place.device)
        return place.times_ms(lambda: source.clone(), runs)

    write = place.times_ms(lambda: pool.write_rows(1, new, new, slots), runs)
    read = pool.k[1][slots // 16, :, slots % 16]
    copies = place.times_ms(lambda: pool.copy_rows(jobs), runs)
    copied = torch.equal(pool.k[:, :half], pool.k[:, half : 2 * half])
    counted = place.times_ms(lambda: pool.count_nonzero_bytes(everything), runs)
    same = pool.count_nonzero_bytes(everything) == sum(
        int(torch.count_nonzero(part.contiguous().view(torch.uint8))) for part in (pool.k, pool.v)
    )
    zeroed = place.times_ms(lambda: pool.zero_blocks(everything), runs)
    right = torch.equal(read, new) and copied and same and pool.count_nonzero_bytes(everything) == 0
    yield bench_row("row kernels exact", "bool", [float(right)], Target(1.0))
    size = pool.total_bytes
    for name, times, moved in (
        (f"write {rows} rows", write, 4 * new.nbytes),
        (f"copy {half} blocks, {layers} layers", copies, size),
        (f"zero {blocks} blocks, {layers} layers", zeroed, size),
        (f"count bytes of {blocks} blocks, {layers} layers", counted, size),
    ):
        yield bench_row(name, "ms", times, None, {"copy of as many bytes": beside(moved)})


def measured(place: Place, runs: int) -> Iterator[BenchRow]:
    """Every row, in the order of what matters most."""
    yield from correctness(place)
    bandwidth = copy_bandwidth(place, runs)
    yield bandwidth
    cut = 60 if place.rehearsal else 1

    def many(batch: int) -> int:
        return 2 if place.rehearsal else batch

    shapes = {
        "decode bf16, 64 x 4096": Shape((4096 // cut,) * many(64), (1,) * many(64)),
        "decode bf16, 32 x 2048": Shape((2048 // cut,) * many(32), (1,) * many(32)),
        "decode bf16, 1 x 32768": Shape((32768 // cut // 4,), (1,)),
        "decode fp32, 8 x 2048": Shape((2048 // cut,) * many(8), (1,) * many(8), dtype="float32"),
    }
    for name, shape in shapes.items():
        yield from decode(place, name, shape, bandwidth.value, runs)
    yield shared_prefix(place, runs)
    yield prefill(place, runs)
    yield from row_kernels(place, runs)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--rehearse", action="store_true", help="in Triton's interpreter, tiny, without a GPU"
    )
    options = parser.parse_args(argv)
    if (why := unable(options.rehearse)) is not None:
        sys.stderr.write(f"triton_h200: {why}; nothing was measured\n")
        if options.json:
            sys.stdout.write(
                json.dumps({"ok": False, "bench": "triton_h200", "reason": why, "rows": []}) + "\n"
            )
        return NO_GPU
    place, machine, began_s, rows = Place(options.rehearse), Machine(), time.monotonic(), []
    if place.rehearsal:
        sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))
        importlib.import_module("triton_bfloat16").widen_products()
        place.notes.append("a rehearsal in the interpreter: times mean nothing")
    with torch.inference_mode():
        for row in measured(place, 1 if place.rehearsal else options.runs):
            rows.append(row)
            sys.stderr.write(f"{row.name}: {row.value:g} {row.unit} {dict(row.peers) or ''}\n")
            if time.monotonic() - began_s > BUDGET_S:
                place.notes.append(f"stopped after {BUDGET_S:g} s; rows after '{row.name}' were not measured")
                break
    facts = machine.facts() | ({} if place.rehearsal else {"gpu": torch.cuda.get_device_name(0)})
    found = versions() | {"triton": importlib.import_module("triton").__version__}
    settings = {"clock": "CUDA events, launches included", "seconds": round(time.monotonic() - began_s, 1)}
    report = BenchReport("triton_h200", found, facts, settings, tuple(place.notes), tuple(rows))
    sys.stdout.write((json.dumps(report.document()) if options.json else report.text()) + "\n")
    return 0 if report.ok else 1


def unable(rehearse: bool) -> str | None:
    """Why nothing can be measured here."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if rehearse:
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "a rehearsal needs TRITON_INTERPRET=1"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is set: the interpreter would be measured"
    if not torch.cuda.is_available():
        return f"no CUDA device (torch {torch.__version__})"
    major, minor = torch.cuda.get_device_capability(0)
    return None if major >= 8 else f"sm_{major}{minor} is older than sm_80"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
