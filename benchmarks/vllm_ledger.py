"""The peer of ``copyhold bench ledger``: vLLM's KVCacheManager under the same loads, samples in us as one JSON document.

Run by the interpreter of its own environment (``make bench-peers``), never imported. One thread, blocks of 16 tokens, prefix
caching on. Every choice favours vLLM: prompts are hashed beforehand, outputs are appended outside the clock, no command is
decoded, pools are empty beside what a row measures, nothing it has to evict is left in them, and the garbage collector does
not walk what was made before.
"""

# pyright: reportMissingImports=false
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")

BLOCK, LONG_TOKENS, SHORT_TOKENS = 16, 32768, 200
Samples = dict[str, list[float]]


class Manager:
    """One KVCacheManager over a pool, and requests for it."""

    def __init__(self, blocks: int, hasher: Any) -> None:
        import torch
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        groups = [KVCacheGroupSpec(["l0"], spec)]
        self._hasher = hasher
        self.pool = KVCacheManager(
            KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=65536,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=True,
        )

    def request(self, name: str, tokens: list[int]) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=512),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def allocate(self, request: Any) -> tuple[float, Any]:
        """Microseconds of the allocation alone, and what it gave: None is a refusal."""
        computed, hit, *_ = self.pool.get_computed_blocks(request)
        return timed_us(self.pool.allocate_slots, request, request.num_tokens - hit, hit, computed)

    def running(self, count: int, tokens: int) -> list[Any]:
        """Requests that decode: `tokens` of each are computed."""
        from vllm.v1.request import RequestStatus

        made = []
        for at in range(count):
            request = self.request(f"short-{at}", [at + 3, *range(1, tokens)])
            assert self.allocate(request)[1] is not None
            request.num_computed_tokens, request.status = tokens, RequestStatus.RUNNING
            made.append(request)
        gc.collect()
        gc.freeze()
        return made

    def decode_us(self, running: list[Any], runs: int) -> list[float]:
        """One token for each request."""
        samples = []
        for _ in range(runs):
            for request in running:
                request.append_output_token_ids(5)
            samples.append(timed_us(decode, self.pool, running)[0])
            for request in running:
                request.num_computed_tokens += 1
        return samples


def long_rows(hasher: Any, runs: int) -> Samples:
    """Allocation and release of a long prompt, and one that finds no room."""
    found: Samples = {"allocate 32k": [], "free 32k": [], "refuse 32k": []}
    manager, full = Manager(1 << 13, hasher), Manager(LONG_TOKENS // BLOCK, hasher)
    for run in range(runs):
        tokens = [run + 3] + [(7 * at) % 50_000 for at in range(LONG_TOKENS - 1)]
        request = manager.request(f"long-{run}", tokens)
        found["allocate 32k"].append(manager.allocate(request)[0])
        request.num_computed_tokens = LONG_TOKENS
        found["free 32k"].append(timed_us(manager.pool.free, request)[0])
        elapsed, given = full.allocate(full.request(f"refused-{run}", tokens))
        assert given is None, "a prompt larger than the pool was given blocks"
        found["refuse 32k"].append(elapsed)
        assert manager.pool.reset_prefix_cache()
    return found


def main(runs: int, decoding: list[int], pools: list[int]) -> Samples:
    """Samples by row name."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hashing = get_hash_fn_by_name("sha256")
    init_none_hash(hashing)
    hasher = get_request_block_hasher(BLOCK, hashing)
    found = long_rows(hasher, runs)
    for count in decoding:
        manager = Manager(1 << 15, hasher)
        tokens = SHORT_TOKENS if count <= 256 else 33
        running = manager.running(count, tokens)
        found[f"decode step {count}"] = manager.decode_us(running, min(runs, 30))
    for blocks in pools:
        manager = Manager(blocks, hasher)
        found[f"pool {blocks}"] = manager.decode_us(manager.running(16, 33), min(runs, 30))
    return found


def decode(pool: Any, running: list[Any]) -> None:
    for request in running:
        assert pool.allocate_slots(request, 1) is not None


def timed_us(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = time.perf_counter_ns()
    told = work(*arguments)
    return (time.perf_counter_ns() - started) / 1e3, told


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(main(asked["runs"], asked["decoding"], asked["pools"])) + "\n")
