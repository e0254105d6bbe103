"""Processes beside the benchmark's own: conversion and compilation before it, transformers as its peer.

``prepare`` converts a checkpoint and compiles the kernels, so that no start is measured with either. ``transformers``
measures what the server is measured for, without a server around it: one thread, the same file through transformers' own
reader, the same prompts and lengths. Each prints one JSON document on standard output.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from copyhold.models.layout import Dtype

from .bench_plan import BenchPlan, Samples, timed_ms

if TYPE_CHECKING:
    import torch


class PrepareTask(msgspec.Struct, frozen=True, tag="prepare"):
    """Convert ``source`` (empty: the installed default) for each (ranks, dtype)."""

    source: str
    cache_dir: str
    shapes: tuple[tuple[int, Dtype], ...]


class RandomModelTask(msgspec.Struct, frozen=True, tag="random-model"):
    """Make the random 56M-parameter model below ``cache_dir`` and convert it for one rank in bfloat16."""

    cache_dir: str


class PeerTask(msgspec.Struct, frozen=True, tag="transformers"):
    """Measure transformers on ``source`` in each dtype."""

    source: str
    dtypes: tuple[Dtype, ...]
    plan: BenchPlan
    block_size: int


def main(argv: list[str]) -> int:
    """``bench_peer TASK_JSON``."""
    task = msgspec.json.decode(argv[0], type=PrepareTask | RandomModelTask | PeerTask)
    match task:
        case PrepareTask():
            done = prepare(task)
        case RandomModelTask():
            done = prepare_random(task)
        case PeerTask():
            done = measure_transformers(task)
    sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
    return 0


def prepare(task: PrepareTask) -> dict[str, str]:
    """Fill both caches."""
    from copyhold.models.convert import convert

    from .prepare import compile_kernels

    source = Path(task.source) if task.source else None
    for tp_size, dtype in task.shapes:
        convert(source, Path(task.cache_dir), tp_size, None, dtype)
    compile_kernels()
    return {}


def prepare_random(task: RandomModelTask) -> dict[str, str]:
    """As ``prepare``; ``folder`` is where the checkpoint lies."""
    from .bench_checkpoint import random_llama

    folder = str(random_llama(Path(task.cache_dir)))
    prepare(PrepareTask(folder, task.cache_dir, ((1, "bfloat16"),)))
    return {"folder": folder}


def measure_transformers(task: PeerTask) -> dict[str, Samples]:
    """Samples by dtype; rows that only a server has stay empty."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = _load(_source(task.source))
    widest_first = sorted(task.dtypes, key=lambda dtype: dtype != "float32")
    return {
        dtype: _Subject(model.to(getattr(torch, dtype)).eval(), task.plan, task.block_size).samples()
        for dtype in widest_first
    }


class _Subject:
    """transformers' model, prompted as the server is."""

    def __init__(self, model: Any, plan: BenchPlan, block_size: int) -> None:
        self._model = model
        self._plan = plan
        self._cached_tokens = plan.cached_tokens(block_size)
        self._vocab_size: int = model.config.vocab_size

    def samples(self) -> Samples:
        plan, found = self._plan, Samples()
        prompts = plan.decode_prompts(self._vocab_size)
        self._decode_rate(prompts[:1])
        for run in range(plan.runs):
            found.decode_1.append(self._decode_rate(prompts[:1]))
            found.decode_8.append(self._decode_rate(prompts))
            prompt = plan.cold_prompt(run, self._vocab_size)
            found.first_cold_ms.append(timed_ms(lambda prompt=prompt: self._next([prompt], None)))
            _, past = self._next([prompt[: self._cached_tokens]], None)
            rest, own = [prompt[self._cached_tokens :]], copy.deepcopy(past)
            found.first_cached_ms.append(timed_ms(lambda rest=rest, own=own: self._next(rest, own)))
        return found

    def _decode_rate(self, prompts: list[list[int]]) -> float:
        """Tokens per second of the batch from its first tokens on."""
        best, past = self._next(prompts, None)
        started_s = time.perf_counter()
        for _ in range(self._plan.new_tokens - 1):
            best, past = self._next(best.tolist(), past)
        return len(prompts) * (self._plan.new_tokens - 1) / (time.perf_counter() - started_s)

    def _next(self, tokens: list[list[int]], past: Any) -> tuple[torch.Tensor, Any]:
        """Best next tokens `[batch, 1]` and the cache that now holds `tokens` too."""
        import torch

        answer = self._model(torch.tensor(tokens), past_key_values=past, use_cache=True, logits_to_keep=1)
        return answer.logits[:, -1:].argmax(-1), answer.past_key_values


def _source(source: str) -> Path:
    from copyhold.models.convert import default_source

    return Path(source) if source else default_source()


def _load(source: Path) -> Any:
    """The model in float32. The one-call loader for GGUF insists on a further package; its reader does not."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

    if source.is_dir():
        return AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config: Any = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.float()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
