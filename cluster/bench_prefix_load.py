"""The loads of ``copyhold bench prefix``: what this ledger and its peers are both given.

Owns the churn: tenants with a system prompt each, asked for by Zipf, every request with a suffix of its own. Invariant: one
seed gives one load, and a peer in another environment reads the very arrays, from a file.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

BLOCK = 16
LONG_TOKENS = 32768
VOCABULARY = 32_000
TENANTS, SYSTEM_TOKENS, ZIPF = 50, 1024, 1.1
SUFFIX_LOW, SUFFIX_HIGH = 64, 512
POOL_BLOCKS, IN_FLIGHT = 20_000, 64


class Churn(msgspec.Struct, frozen=True):
    """Requests in order: ``tenants`` int64 [requests], prompt r is ``tokens[starts[r]:starts[r + 1]]`` (int32)."""

    tenants: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tenants)

    def prompts(self) -> list[np.ndarray]:
        """One array a request, each with memory of its own."""
        ends = self.starts.tolist()
        return [self.tokens[start:end].copy() for start, end in pairwise(ends)]


def make_churn(requests: int, tenants: int = TENANTS, seed: int = 1) -> Churn:
    """A load of so many requests."""
    random = np.random.default_rng(seed)
    systems = random.integers(0, VOCABULARY, (tenants, SYSTEM_TOKENS), dtype=np.int32)
    weights = 1.0 / np.arange(1, tenants + 1) ** ZIPF
    asked = random.choice(tenants, requests, p=weights / weights.sum())
    lengths = random.integers(SUFFIX_LOW, SUFFIX_HIGH + 1, requests)
    parts: list[np.ndarray] = []
    for tenant, length in zip(asked.tolist(), lengths.tolist(), strict=True):
        parts += [systems[tenant], random.integers(0, VOCABULARY, length, dtype=np.int32)]
    starts = np.concatenate([[0], np.cumsum(lengths + SYSTEM_TOKENS)])
    return Churn(asked, starts, np.concatenate(parts))


def write_load(folder: Path, churn: Churn, long_prompt: np.ndarray) -> Path:
    """The file that peers read."""
    path = folder / "load.npz"
    np.savez(path, tenants=churn.tenants, starts=churn.starts, tokens=churn.tokens, long_prompt=long_prompt)
    return path


def random_tokens(count: int, seed: int) -> np.ndarray:
    """A prompt, int32."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)
