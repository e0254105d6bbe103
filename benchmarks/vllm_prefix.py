"""The peer of ``copyhold bench prefix``: vLLM's KVCacheManager under the same loads, samples as one JSON document.

Run by the interpreter of its own environment (``make bench-peers``), never imported. One thread, blocks of 16 tokens, prefix
caching on, sha256 of blocks. ``vllm`` makes a request's hashes inside the clock, ``vllm, hashes given`` before it; prompts are
lists made beforehand, and the manager evicts, as it allocates, in its own order.
"""

# pyright: reportMissingImports=false
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")

BLOCK, POOL_BLOCKS, IN_FLIGHT, MISS_TOKENS = 16, 20_000, 64, 1024
Samples = dict[str, dict[str, list[float]]]


def timed_us(call: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter_ns()
    call(*arguments)
    return (time.perf_counter_ns() - started) / 1e3


class Manager:
    """One KVCacheManager, and requests for it."""

    def __init__(self, blocks: int) -> None:
        import torch
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK, hash_function)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        self.pool = KVCacheManager(
            KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)]
            ),
            max_model_len=65536,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=True,
        )

    def request(self, name: int, tokens: list[int], salt: str) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=str(name),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=512),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )

    def admit(self, request: Any) -> int:
        """The tokens that were cached."""
        computed, hit, *_ = self.pool.get_computed_blocks(request)
        given = self.pool.allocate_slots(request, request.num_tokens - hit, hit, computed)
        assert given is not None, "the pool is too small"
        request.num_computed_tokens = request.num_tokens
        return hit


def match_samples(prompt: list[int], runs: int) -> Samples:
    """A cached prompt looked up again from its tokens, and a prompt whose first block is not cached."""
    manager = Manager(POOL_BLOCKS)
    first = manager.request(0, prompt, "salt")
    manager.admit(first)
    manager.pool.free(first)
    found: Samples = {"vllm": {"match 32k": [], "miss": []}, "vllm, hashes given": {"match 32k": []}}
    for run in range(1, runs + 1):
        started = time.perf_counter_ns()
        asked = manager.request(run, [*prompt, 5], "salt")
        hashed = time.perf_counter_ns()
        hit = manager.pool.get_computed_blocks(asked)[1]
        ended = time.perf_counter_ns()
        assert hit == len(prompt), hit
        found["vllm"]["match 32k"].append((ended - started) / 1e3)
        found["vllm, hashes given"]["match 32k"].append((ended - hashed) / 1e3)
        other = manager.request(-run, [31_999 - prompt[0], *prompt[1:MISS_TOKENS]], "salt")
        found["vllm"]["miss"].append(timed_us(manager.pool.get_computed_blocks, other))
    return found


def play(tenants: list[int], prompts: list[list[int]], *, hashed: bool) -> tuple[float, float]:
    """Requests per second and hit tokens as a share of prompt tokens."""
    manager = Manager(POOL_BLOCKS)
    made = []
    if hashed:
        for at, (tenant, prompt) in enumerate(zip(tenants, prompts, strict=True)):
            made.append(manager.request(at, prompt, f"tenant-{tenant}"))
    running: deque[Any] = deque()
    hit = total = 0
    gc.collect()
    started = time.perf_counter()
    for at, (tenant, prompt) in enumerate(zip(tenants, prompts, strict=True)):
        request = made[at] if hashed else manager.request(at, prompt, f"tenant-{tenant}")
        hit += manager.admit(request)
        total += len(prompt)
        running.append(request)
        if len(running) > IN_FLIGHT:
            manager.pool.free(running.popleft())
    return len(prompts) / (time.perf_counter() - started), hit / total


def main(load_path: str, runs: int, plays: int) -> Samples:
    import numpy as np

    load = np.load(load_path)
    tenants, starts, tokens = load["tenants"].tolist(), load["starts"].tolist(), load["tokens"]
    prompts = [tokens[starts[at] : starts[at + 1]].tolist() for at in range(len(tenants))]
    found = match_samples(load["long_prompt"].tolist(), runs)
    for peer, hashed in (("vllm", False), ("vllm, hashes given", True)):
        played = [play(tenants, prompts, hashed=hashed) for _ in range(plays)]
        found[peer]["churn"] = [rate for rate, _ in played]
        found[peer]["churn hit rate"] = [share for _, share in played]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))) + "\n")
