"""The peer of ``copyhold bench prefix``: SGLang's radix caches under the same loads, samples as one JSON document.

Run by the interpreter of its own environment (``make bench-peers``), never imported. One thread. ``sglang`` is the compiled tree
core behind its own Python adapter with pages of 16 tokens, ``sglang, page 1`` the same with pages of one, ``sglang, Python`` the
plain RadixCache. Prompts are int64 arrays made beforehand, as its keys want them; the allocator is a torch free list with the
operations of SGLang's own. Modules that only its GPU parts need are served as empty ones, so that it imports without them.
"""

# pyright: reportMissingImports=false
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SGLANG_RUST_BUILD_MODE"] = "never"

POOL_TOKENS, IN_FLIGHT, PATH_NODES, MISS_TOKENS = 320_000, 64, 64, 1024
LEAVES, LEAF_TOKENS = 5_000, 64
Samples = dict[str, dict[str, list[float]]]
ABSENT = [
    "torchvision", "flashinfer", "sgl_kernel", "decord", "modelscope", "outlines", "xgrammar",
    "partial_json_parser", "torchao", "cuda", "pynvml", "llguidance", "soundfile", "gguf",
    "compressed_tensors", "timm", "blobfile", "openai_harmony", "av", "kernels", "tiktoken",
    "interegular", "tilelang", "quack", "torch_memory_saver", "anthropic", "openai", "easydict", "scipy",
    "deep_gemm", "mistral_common", "datasets", "IPython", "triton_kernels", "apache_tvm_ffi", "tvm_ffi",
    "cutlass", "watchfiles", "sentencepiece",
]  # fmt: skip


class _Empty(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty_class(name)


def _empty_class(name: str) -> Any:
    def call(_: Any, *arguments: Any, **__: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else None

    return _Empty(name, (object,), {"__init__": lambda self, *_, **__: None, "__call__": call})


class _EmptyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _empty_class(name)
        setattr(self, name, made)
        return made


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under names that are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name for name in names if importlib.util.find_spec(name) is None)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = _EmptyModule(spec.name)
        module.__path__ = []
        module.__version__ = "99.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: Any) -> None:
        return


class Pages:
    """Free pages of a pool as one torch tensor, from which indices are sliced and to which they are appended."""

    device = "cpu"

    def __init__(self, page: int) -> None:
        import torch

        self._torch, self._page = torch, page
        self.free = torch.arange(1, POOL_TOKENS // page + 1, dtype=torch.int64)
        self._offsets = torch.arange(page)

    def available(self) -> int:
        return len(self.free) * self._page

    def take(self, tokens: int) -> Any:
        count = -(-tokens // self._page)
        assert count <= len(self.free), "the pool is too small"
        pages, self.free = self.free[:count], self.free[count:]
        if self._page == 1:
            return pages
        return (pages[:, None] * self._page + self._offsets).reshape(-1)[:tokens]

    def free_segment(self, indices: Any, start_pos: int = 0) -> None:
        if indices.numel():
            pages = indices if self._page == 1 else indices[:: self._page] // self._page
            self.free = self._torch.cat((self.free, pages))


class Cache:
    """What both caches are asked alike."""

    def __init__(self, pages: Pages, page: int) -> None:
        self.pages, self.page = pages, page

    def key(self, tokens: array, salt: str = "salt") -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(tokens, salt)


class PythonCache(Cache):
    def __init__(self, pages: Pages, page: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache

        super().__init__(pages, page)
        self._match, self._insert, self._evict = MatchPrefixParams, InsertParams, EvictParams
        self.cache = RadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=pages, page_size=page
            )
        )

    def match(self, key: Any) -> tuple[int, Any]:
        found = self.cache.match_prefix(self._match(key=key))
        return found.device_prefix_len, found.last_device_node

    def indices(self, node: Any) -> Any:
        return self.cache.path_device_indices(node)

    def lock(self, node: Any) -> Any:
        self.cache.inc_lock_ref(node)
        return node

    def unlock(self, held: Any) -> None:
        self.cache.dec_lock_ref(held)

    def insert(self, key: Any, indices: Any, known: int = 0) -> Any:
        return self.cache.insert(self._insert(key=key, value=indices)).last_device_node

    def evict(self, tokens: int) -> int:
        return self.cache.evict(self._evict(num_tokens=tokens)).num_tokens_evicted


class CompiledCache(Cache):
    def __init__(self, pages: Pages, page: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        super().__init__(pages, page)
        self._match, self._insert, self._full = MatchPrefixParams, InsertParams, ComponentType.FULL
        self.cache = RustUnifiedTreeCore(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=pages,
                page_size=page,
                tree_components=(self._full,),
            )
        )
        self._root = self.cache.empty_match_result.last_device_node

    def match(self, key: Any) -> tuple[int, Any]:
        found = self.cache.match_prefix(self._match(key=key))
        return found.device_prefix_len, found.last_device_node

    def indices(self, node: Any) -> Any:
        return self.cache.collect_full_device_indices(node, self._root)

    def lock(self, node: Any) -> Any:
        return node, self.cache.inc_lock_ref(node).to_dec_params()

    def unlock(self, held: Any) -> None:
        self.cache.dec_lock_ref(held[0], held[1])

    def insert(self, key: Any, indices: Any, known: int = 0) -> Any:
        state = self.cache.begin_insert(self._insert(key=key, value=indices, prev_prefix_len=known))
        while True:
            self._carry_out(state.actions)
            if state.result is not None:
                break
            state = self.cache.resume_insert()
        self._carry_out(self.cache.end_insert())
        return state.result.last_device_node

    def evict(self, tokens: int) -> int:
        done = {self._full: 0}
        self.cache.evict_device_start(self._full, tokens)
        while done[self._full] < tokens:
            step = self.cache.evict_device_next_node(self._full, done)
            self._take(step, done)
            if step.node_id is not None:
                self._take(self.cache.evict_device_leaf(step.node_id, False), done)
            elif not step.made_progress:
                break
        self.cache.evict_device_end(self._full)
        return done[self._full]

    def _take(self, step: Any, done: dict[Any, int]) -> None:
        for freed in step.device_frees.values():
            for indices in freed:
                self.pages.free_segment(indices)
        step.device_frees.clear()
        self._carry_out(step.cache_actions)
        step.cache_actions.clear()
        for kind, tokens in step.tracker.items():
            done[kind] += tokens

    def _carry_out(self, actions: Any) -> None:
        for action in actions:
            for indices in getattr(action, "indices", ()):
                self.pages.free_segment(indices)


Make = Callable[[], Any]


def timed_us(call: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter_ns()
    call(*arguments)
    return (time.perf_counter_ns() - started) / 1e3


def small_samples(make: Make, prompt: array, runs: int) -> dict[str, list[float]]:
    """Matches, a miss, an insertion and an eviction; keys are made inside the clock."""
    tokens = len(prompt)
    cache, deep = make(), make()
    indices = cache.pages.take(tokens)
    cache.insert(cache.key(prompt), indices)
    for node in range(1, PATH_NODES + 1):
        part = tokens * node // PATH_NODES
        deep.insert(deep.key(prompt[:part]), indices[:part])
    longer = array("q", [*prompt, 5])
    other = array("q", [31_999 - prompt[0], *prompt[1:MISS_TOKENS]])
    assert cache.match(cache.key(longer))[0] == deep.match(deep.key(longer))[0] == tokens
    assert cache.match(cache.key(other))[0] == 0
    found: dict[str, list[float]] = {
        "match 32k": [timed_us(lambda: cache.match(cache.key(longer))) for _ in range(runs)],
        "match path 64": [timed_us(lambda: deep.match(deep.key(longer))) for _ in range(runs)],
        "miss": [timed_us(lambda: cache.match(cache.key(other))) for _ in range(runs)],
        "publish 32k": [],
        "evict 1000": [],
    }
    for _ in range(min(runs, 15)):
        empty = make()
        taken = empty.pages.take(tokens)
        found["publish 32k"].append(timed_us(lambda one, two: one.insert(one.key(prompt), two), empty, taken))
    leaves = make()
    for leaf in range(LEAVES):
        content = array("q", [leaf % 32_000, leaf // 32_000 + 1, *range(LEAF_TOKENS - 2)])
        leaves.insert(leaves.key(content), leaves.pages.take(LEAF_TOKENS))
    for _ in range(min(runs, 15)):
        started = time.perf_counter_ns()
        freed = leaves.evict(16_000)
        found["evict 1000"].append((time.perf_counter_ns() - started) / 1e3)
        assert freed >= 16_000, freed
    return found


def play(make: Make, tenants: list[int], prompts: list[array]) -> tuple[float, float]:
    """Requests per second and hit tokens as a share of prompt tokens."""
    import torch

    cache = make()
    pages, page = cache.pages, cache.page
    running: deque[tuple[Any, Any]] = deque()
    hit = total = 0
    gc.collect()
    started = time.perf_counter()
    for tenant, prompt in zip(tenants, prompts, strict=True):
        key = cache.key(prompt, f"tenant-{tenant}")
        known, node = cache.match(key)
        before = cache.indices(node) if known else None
        held = cache.lock(node)
        needed = len(prompt) - known
        if pages.available() < needed + page:
            cache.evict(needed + page - pages.available())
        fresh = pages.take(needed)
        whole = len(prompt) // page * page
        indices = fresh if before is None else torch.cat((before, fresh))
        terminal = cache.insert(key, indices[:whole], known)
        kept = cache.lock(terminal)
        cache.unlock(held)
        running.append((kept, indices[whole:]))
        hit += known
        total += len(prompt)
        if len(running) > IN_FLIGHT:
            kept, tail = running.popleft()
            cache.unlock(kept)
            if page > 1 and tail.numel():
                pages.free = torch.cat((pages.free, tail[:1] // page))
    return len(prompts) / (time.perf_counter() - started), hit / total


def main(load_path: str, runs: int, plays: int) -> Samples:
    sys.meta_path.insert(0, _Absent(ABSENT))
    import numpy as np
    import torch

    torch.set_num_threads(1)
    load = np.load(load_path)
    tenants, starts, tokens = load["tenants"].tolist(), load["starts"].tolist(), load["tokens"]
    prompts = [array("q", tokens[starts[at] : starts[at + 1]].tolist()) for at in range(len(tenants))]
    long_prompt = array("q", load["long_prompt"].tolist())
    kinds = {
        "sglang": (CompiledCache, 16),
        "sglang, page 1": (CompiledCache, 1),
        "sglang, Python": (PythonCache, 16),
    }
    found: Samples = {}
    for peer, (kind, page) in kinds.items():

        def make(kind: Any = kind, page: int = page) -> Any:
            return kind(Pages(page), page)

        found[peer] = small_samples(make, long_prompt, runs)
        played = [play(make, tenants, prompts) for _ in range(plays)]
        found[peer]["churn"] = [rate for rate, _ in played]
        found[peer]["churn hit rate"] = [share for _, share in played]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))) + "\n")
