"""Prefix lengths: how a hit is cut, and which of the lengths was the limit.

Owns one pure function. Invariant: runtime <= min(junction, cap), junction <= indexed <= semantic <= prompt, and runtime
is a multiple of the alignment.
Source: contracts K092 (lengths and inequality), K093 (logits cap), K094 (cap, then align), K095 (empty prompt), K108,
K109 (the junction of all cache groups).
"""

from __future__ import annotations

from collections.abc import Callable

from .receipts import PrefixMatch


def every_boundary(length: int) -> int:
    """What full attention serves: any length."""
    return length


def prefix_lengths(
    prompt: int,
    semantic: int,
    indexed: int,
    alignment: int,
    *,
    diverged: bool = False,
    root_empty: bool = False,
    lookup: bool = True,
    requires_logits: bool = True,
    servable: Callable[[int], int] = every_boundary,
) -> PrefixMatch:
    """The lengths of one lookup, in tokens.

    `semantic` is the longest token-exact common prefix, `indexed` the part of it that the index can serve;
    `diverged` says that the index holds other tokens after `semantic`. With `requires_logits` the last token
    is computed again. `servable` gives the longest boundary at or below a length that every cache group can serve; it
    is asked for the indexed length first, then for a length that is not greater.
    """
    if prompt < 1:
        raise ValueError("an empty prompt has no lengths")
    if not 0 <= indexed <= semantic <= prompt:
        raise ValueError(f"lengths out of order: indexed={indexed} semantic={semantic} prompt={prompt}")
    cap = prompt - 1 if requires_logits else prompt
    by_semantic, by_index = semantic - semantic % alignment, indexed - indexed % alignment
    by_cap, by_prompt = cap - cap % alignment, prompt - prompt % alignment
    common = min(by_semantic, by_index, by_cap)
    junction = servable(by_index)
    runtime = servable(common)
    limit, reason = "alignment", "page_alignment"
    if runtime < common:
        limit, reason = "junction", "window_state_missing"
    elif by_index == runtime < min(by_semantic, by_cap):
        limit, reason = "indexed", "not_indexed"
    elif by_semantic == runtime < by_cap:
        limit, reason = ("semantic", "tokens_differ") if diverged else ("indexed", "not_indexed")
    elif by_cap == runtime < by_prompt:
        limit, reason = "cap", "logits_cap"
    elif runtime == prompt:
        limit, reason = "semantic", "whole_prompt"
    if not lookup:
        limit, reason = "indexed", "lookup_not_permitted"
    elif prompt < alignment:
        limit, reason = "alignment", "prompt_shorter_than_block"
    elif root_empty:
        limit, reason = "indexed", "root_empty"
    left = prompt - runtime
    return PrefixMatch(prompt, semantic, indexed, cap, alignment, runtime, limit, reason, junction, left)
