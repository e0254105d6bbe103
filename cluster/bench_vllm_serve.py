"""vLLM's engine as the peer of the rows ``56m``: a process of its own environment that answers one measure at a time.

Owns what it is asked and its answers; how it is started, asked and ended is bench_process.py's. Invariant: between measures it
sleeps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .bench_process import Peer, PeerProcess

VLLM = Peer("vLLM", "vllm_serve.py")


class Measure(msgspec.Struct, frozen=True):
    """One batch: seconds to its earliest first token, and from there to its latest end."""

    first_s: float
    decode_s: float


class VllmEngine(PeerProcess):
    """A running engine. Raises: ``BenchInvalid`` of ``measure`` and of a start that fails."""

    def __init__(self, model: Path, threads: int, peer: Peer = VLLM) -> None:
        # A session of its own, as the server's processes have.
        super().__init__(peer, str(model), str(threads), own_session=True)

    def measure(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, cached_tokens: int | None
    ) -> Measure:
        """Raises: ``BenchInvalid`` when the engine ended or reused other than ``cached_tokens`` (None: any)."""
        asked = {"prompts": prompts, "new_tokens": new_tokens, "cached": cached_tokens}
        return msgspec.json.decode(self.ask(json.dumps(asked)), type=Measure)
