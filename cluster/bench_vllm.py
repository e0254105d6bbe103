"""vLLM's block manager as the peer of ``copyhold bench ledger``: a process of its own environment, in the same call.

Owns what it is asked: the rows and lengths of this call's own. How it is started is bench_process.py's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .bench_load import BLOCK, GROWTH_TOKENS, LONG_TOKENS, SHORT_TOKENS
from .bench_process import Peer, PeerNote, run_peer
from .bench_report import Samples

_VLLM = Peer("vLLM", "vllm_ledger.py")


def measure_vllm(
    runs: int, decoding: Sequence[int], pools: Sequence[int], root: Path = _VLLM.root
) -> tuple[dict[str, Samples], tuple[str, ...]]:
    """Samples in us by peer and row name, and notes. `root` holds `.venv-peers` and `benchmarks`."""
    asked = {
        "runs": runs,
        "decoding": list(decoding),
        "pools": list(pools),
        "block": BLOCK,
        "long_tokens": LONG_TOKENS,
        "short_tokens": SHORT_TOKENS,
        "growth_tokens": GROWTH_TOKENS,
    }
    found = run_peer(msgspec.structs.replace(_VLLM, root=root), json.dumps(asked))
    return ({}, (found.text,)) if isinstance(found, PeerNote) else ({"vllm": found}, ())
