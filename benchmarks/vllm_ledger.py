"""The peer of ``copyhold bench ledger``: vLLM's KVCacheManager under the same loads, medians in us as one JSON document.

Run by the interpreter of its own environment (``make bench-peers``), never imported. One thread, blocks of 16 tokens, prefix
caching on, block hashes made beforehand where vLLM makes them outside the manager.
"""

# pyright: reportMissingImports=false
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PYTHONHASHSEED", "0")

BLOCK, LONG_TOKENS, DECODING = 16, 32768, 256


def main(runs: int) -> dict[str, float]:
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request, RequestStatus

    hashing = get_hash_fn_by_name("sha256")
    init_none_hash(hashing)
    hasher = get_request_block_hasher(BLOCK, hashing)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)

    def manager(blocks: int) -> Any:
        config = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)]
        )
        return KVCacheManager(
            config,
            max_model_len=65536,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            enable_caching=True,
        )

    def request(name: str, tokens: list[int]) -> Any:
        sampling = SamplingParams(max_tokens=512)
        return Request(
            request_id=name,
            prompt_token_ids=tokens,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher,
        )

    figures: dict[str, list[float]] = {"allocate 32k": [], "free 32k": [], f"decode step {DECODING}": []}
    pool = manager(1 << 14)
    for run in range(runs):
        long = request(f"long-{run}", [run + 3] + [(7 * at) % 50_000 for at in range(LONG_TOKENS - 1)])
        computed, hit, *_ = pool.get_computed_blocks(long)
        figures["allocate 32k"].append(timed_us(pool.allocate_slots, long, LONG_TOKENS - hit, hit, computed))
        long.num_computed_tokens = LONG_TOKENS
        figures["free 32k"].append(timed_us(pool.free, long))
    pool, running = manager(1 << 15), []
    for at in range(DECODING):
        short = request(f"short-{at}", [at + 3, *range(1, 200)])
        computed, hit, *_ = pool.get_computed_blocks(short)
        pool.allocate_slots(short, 200 - hit, hit, computed)
        short.num_computed_tokens, short.status = 200, RequestStatus.RUNNING
        running.append(short)
    for _ in range(runs):
        for short in running:
            short.append_output_token_ids(5)
        figures[f"decode step {DECODING}"].append(timed_us(decode, pool, running))
        for short in running:
            short.num_computed_tokens += 1
    return {name: statistics.median(samples) for name, samples in figures.items()}


def decode(pool: Any, running: list[Any]) -> None:
    for short in running:
        pool.allocate_slots(short, 1)


def timed_us(work: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter_ns()
    work(*arguments)
    return (time.perf_counter_ns() - started) / 1e3


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(int(sys.argv[1]))) + "\n")
