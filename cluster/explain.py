"""One plain sentence on why a prefix hit had its length (K092-K095).

Owns the wording of ``/v1/explain`` and the tenant's projection of a ``ReuseReceipt``. Invariant: every
number in the sentence stands in the receipt, and nothing in it speaks of another tenant.
"""

from __future__ import annotations

from typing import Any

from copyhold.actors.messages import ReuseReceipt

# The reason completes "... because <reason>"; names are the ledger's (kvcore receipts).
_REASONS = {
    "tokens_differ": "the tokens after it differ from everything kept in this namespace",
    "not_indexed": "nothing longer is kept in this namespace now",
    "page_alignment": "only whole blocks can be reused and the next one is not whole",
    "whole_prompt": "there is no more of the prompt",
    "logits_cap": "the last prompt token is always computed: its output chooses the first new token",
    "prompt_shorter_than_block": "the prompt is shorter than one block and only full blocks are kept",
    "window_state_missing": "layers with a sliding window have given up rows that a longer hit would read",
    "tail_ends": "the partial block that was kept ends there",
    "root_empty": "nothing is kept in this namespace yet",
    "lookup_not_permitted": "this key has no right to reuse, so the prompt was computed cold",
}

_LIMITS = {
    "semantic": "the length of equal tokens",
    "indexed": "what is kept in the index",
    "cap": "the cap of prompt length - 1",
    "alignment": "the rounding down to full blocks",
    "tail": "the end of a kept partial block",
    "junction": "the junction (the longest boundary that all cache groups of the model can serve)",
}


def explanation_sentence(receipt: ReuseReceipt) -> str:
    """Say in one sentence how much was reused, which length was the limit, and why it is not more."""
    cached, prompt = receipt.cached_tokens, receipt.prompt_tokens
    why = _REASONS.get(receipt.reason, receipt.reason.replace("_", " "))
    if cached == 0:
        return f"None of the {prompt} prompt tokens came from the cache because {why}."
    limit = _LIMITS.get(receipt.limit, receipt.limit)
    blocks = cached // receipt.block_size
    return (
        f"{cached} of {prompt} prompt tokens ({blocks} blocks of {receipt.block_size}) came from the cache; "
        f"the limit was {limit}, because {why}."
    )


def lengths(receipt: ReuseReceipt) -> dict[str, int]:
    """The lengths of K092 and K109, in tokens; ``runtime`` is what was reused, ``recompute`` what is left of the prompt."""
    return {
        "semantic": receipt.semantic_tokens,
        "indexed": receipt.indexed_tokens,
        "cap": receipt.cap_tokens,
        "junction": receipt.junction_tokens,
        "runtime": receipt.cached_tokens,
        "recompute": receipt.prompt_tokens - receipt.cached_tokens,
    }


def explanation(receipt: ReuseReceipt) -> dict[str, Any]:
    """The body of ``GET /v1/explain/{id}``."""
    return {
        "object": "copyhold.explanation",
        "receipt_id": receipt.receipt_id,
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
        "lengths": lengths(receipt),
        "block_size": receipt.block_size,
        "limit": receipt.limit,
        "reason": receipt.reason,
        "explanation": explanation_sentence(receipt),
        "time_to_first_token_ms": receipt.time_to_first_token_ms,
    }


def receipt_projection(receipt: ReuseReceipt) -> dict[str, Any]:
    """The body of ``GET /v1/receipts/{id}``: the caller's own figures."""
    return {
        "object": "copyhold.receipt",
        "receipt_id": receipt.receipt_id,
        "request_id": receipt.request_id,
        "namespace": receipt.namespace,
        "model": receipt.model,
        "created": int(receipt.created_at),
        "prompt_tokens": receipt.prompt_tokens,
        "cached_tokens": receipt.cached_tokens,
        "completion_tokens": receipt.completion_tokens,
        "lengths": lengths(receipt),
        "block_size": receipt.block_size,
        "limit": receipt.limit,
        "reason": receipt.reason,
        "time_to_first_token_ms": receipt.time_to_first_token_ms,
        "finish_reason": receipt.finish_reason,
        "deterministic": receipt.deterministic,
    }
