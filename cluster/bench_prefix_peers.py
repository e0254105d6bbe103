"""vLLM's block manager and SGLang's radix caches as peers of ``copyhold bench prefix``: processes of their own environment.

Owns which they are and what they are asked; how they are started is bench_process.py's. Each reads the load from its file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .bench_process import Peer, PeerNote, run_peer
from .bench_report import Samples

_PEERS = (Peer("vLLM", "vllm_prefix.py"), Peer("SGLang", "sglang_prefix.py"))


def measure_peers(
    load: Path, runs: int, plays: int, root: Path = _PEERS[0].root
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    """Samples by peer and row name, and notes. `root` holds `.venv-peers` and `benchmarks`."""
    found: dict[str, Samples] = {}
    notes: list[str] = []
    for peer in _PEERS:
        answer = run_peer(msgspec.structs.replace(peer, root=root), str(load), str(runs), str(plays))
        if isinstance(answer, PeerNote):
            notes.append(answer.text)
        else:
            found |= answer
    return found, tuple(notes)
