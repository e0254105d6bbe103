"""What a serving benchmark sends: lengths and prompts, equal for the server and for its peers.

Owns nothing but numbers; imported by the process that measures and by the one that runs the peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np


class BenchPlan(msgspec.Struct, frozen=True):
    """Lengths in tokens; every measure is taken ``runs`` times."""

    runs: int = 3
    prompt_tokens: int = 512
    decode_prompt_tokens: int = 128
    new_tokens: int = 64
    batch: int = 8
    seed: int = 1

    def cached_tokens(self, block_size: int) -> int:
        """What a prompt sent again finds: all whole blocks below its last token."""
        return (self.prompt_tokens - 1) // block_size * block_size

    def cold_prompt(self, run: int, vocab_size: int) -> list[int]:
        """A prompt that no other run shares its first token with, nearly surely."""
        return self._tokens(1000 + run, self.prompt_tokens, vocab_size)

    def decode_prompts(self, vocab_size: int) -> list[list[int]]:
        """One prompt for each sequence of a batch."""
        return [self._tokens(row, self.decode_prompt_tokens, vocab_size) for row in range(self.batch)]

    def _tokens(self, stream: int, count: int, vocab_size: int) -> list[int]:
        generator = np.random.default_rng([self.seed, stream])
        return generator.integers(min(1000, vocab_size // 4), vocab_size, count).tolist()


class Samples(msgspec.Struct):
    """Measured values of one subject, one list entry a run; an empty list was not measured."""

    decode_1: list[float] = []
    """Tokens per second, batch of one."""
    decode_8: list[float] = []
    """Tokens per second of the whole batch."""
    first_cold_ms: list[float] = []
    first_cached_ms: list[float] = []
    transport_share: list[float] = []
    """Step wall time less the slowest rank's execution, as a share of it, over a batch of one."""
    pss_mib: list[float] = []
    start_s: list[float] = []


def timed_ms(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started_s = time.perf_counter()
    work()
    return (time.perf_counter() - started_s) * 1e3
