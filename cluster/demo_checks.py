"""The demonstration's checks: pure functions from what was observed to a verdict that can be negative.

Owns the expected values. Nothing here talks to a server, so that a test can hand in a wrong observation and see the check
that names it (planted faults).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import msgspec

REUSE_RATIO_MOST = 0.4
KV_DIFFERENCE_MOST = 1e-3
LOG_INDICES_LEAST = 50
MEMORY_MIB_MOST = 3072
STREAMED_TOKENS_LEAST = 8


class Check(msgspec.Struct, frozen=True):
    """One computed point: what was found (``value``), whether it holds, and what it was held against."""

    name: str
    ok: bool
    value: Any
    detail: str


class Turn(msgspec.Struct, frozen=True):
    """One turn of one tenant, as its client saw it; ``expected_cached_tokens`` is computed from token ids alone."""

    tenant: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    expected_cached_tokens: int
    time_to_first_token_ms: float
    reply: str
    receipt_id: str


class Latency(msgspec.Struct, frozen=True):
    """Times to first token of one tenant, milliseconds; one entry of ``attempts`` per repetition."""

    tenant: str
    prompt_tokens: int
    attempts: tuple[LatencyAttempt, ...]


class LatencyAttempt(msgspec.Struct, frozen=True):
    """Three runs with reuse, three without."""

    cached_ms: tuple[float, ...]
    cold_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median with reuse over median cold."""
        return median(self.cached_ms) / median(self.cold_ms)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two token lists."""
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


def rows_with_kv(prompt: Sequence[int], generated: Sequence[int], stopped: bool) -> list[int]:
    """Tokens of a finished request that have K/V.

    The last sampled token never has: at ``length`` it is the last one generated, at ``stop`` it is the end token,
    which is not among ``generated``.
    """
    return [*prompt, *(generated if stopped else generated[:-1])]


def expected_cached(prompt: Sequence[int], history: Sequence[Sequence[int]], block_size: int) -> int:
    """Block size x floor(min(common prefix with what has K/V, prompt - 1) / block size)."""
    common = max((common_prefix(prompt, known) for known in history), default=0)
    return block_size * (min(common, len(prompt) - 1) // block_size)


def check_turns(tenant: str, turns: Sequence[Turn]) -> Check:
    """Every turn's cached tokens are the computed ones, and reuse really happened from the second on."""
    wrong = [turn.turn for turn in turns if turn.cached_tokens != turn.expected_cached_tokens]
    cold = [turn.turn for turn in turns[1:] if turn.cached_tokens == 0]
    ok = bool(turns) and not wrong and not cold and turns[0].cached_tokens == 0
    found = [turn.cached_tokens for turn in turns]
    return Check(f"turns/{tenant}", ok, found, f"expected {[turn.expected_cached_tokens for turn in turns]}")


def check_latency(latency: Latency) -> Check:
    """First token with reuse at most 0.4 of cold, in the first attempt or in the one repetition."""
    ratios = [round(attempt.ratio, 3) for attempt in latency.attempts]
    ok = min(ratios) <= REUSE_RATIO_MOST
    return Check(
        f"first_token/{latency.tenant}", ok, ratios, f"at most {REUSE_RATIO_MOST} of cold, medians of three"
    )


def check_isolation(isolation: dict[str, Any]) -> list[Check]:
    """A's prompt is cold for B, warm for B the second time, still warm for A, and no block is shared."""
    expected = isolation["expected_cached_tokens"]
    shared = isolation["shared_blocks"]
    held = isolation["blocks_held"]
    return [
        Check("isolation/first", isolation["b_first_cached"] == 0, isolation["b_first_cached"], "expected 0"),
        Check(
            "isolation/second",
            isolation["b_second_cached"] == expected > 0,
            isolation["b_second_cached"],
            f"expected {expected}",
        ),
        Check(
            "isolation/owner",
            isolation["a_again_cached"] == expected > 0,
            isolation["a_again_cached"],
            f"expected {expected}",
        ),
        Check(
            "isolation/blocks",
            not shared and all(count > 0 for count in held.values()),
            shared,
            f"blocks held {held}, none in common",
        ),
    ]


def check_explanations(hit: dict[str, Any], miss: dict[str, Any], block_size: int) -> list[Check]:
    """Each explanation's lengths bound its hit, and the limit it names is the length that did."""
    return [
        _check_explanation("explain/hit", hit, block_size),
        _check_explanation("explain/miss", miss, block_size),
    ]


def _check_explanation(name: str, found: dict[str, Any], block_size: int) -> Check:
    lengths = found["lengths"]
    bound = min(lengths["semantic"], lengths["indexed"], lengths["cap"])
    aligned = block_size * (bound // block_size)
    hit_wanted = name.endswith("hit")
    ok = (
        lengths["runtime"] == found["cached_tokens"] == aligned
        and lengths["cap"] == found["prompt_tokens"] - 1
        and (found["cached_tokens"] > 0) == hit_wanted
        and bool(found["limit"])
        and bool(found["reason"])
    )
    held_against = f"lengths {lengths}; limit {found['limit']}, reason {found['reason']}"
    return Check(name, ok, found["cached_tokens"], held_against)


def check_revocation(facts: dict[str, Any]) -> list[Check]:
    """The stream ended typed and silent, the certificate holds and breaks, the blocks are free, B is untouched."""
    certified = facts["certified_blocks_released"]
    rose = facts["free_blocks_after"] - facts["free_blocks_before"]
    ranks = facts["ranks"]
    return [
        Check(
            "revocation/stream",
            facts["stream_error"] == "namespace_revoked"
            and facts["tokens_before"] >= STREAMED_TOKENS_LEAST
            and facts["events_after_error"] == 0,
            facts["stream_error"],
            f"{facts['tokens_before']} texts before it, {facts['events_after_error']} events after it",
        ),
        Check(
            "revocation/certificate",
            facts["certificate_ok"] and facts["certificate_outcome"] == "complete",
            facts["certificate_outcome"],
            f"verified offline; {len(facts['not_covered'])} mechanisms listed as not covered",
        ),
        Check(
            "revocation/forgery",
            not facts["flipped_certificate_ok"],
            f"byte {facts['flipped_byte']}",
            "one flipped byte must not verify",
        ),
        Check(
            "revocation/zeroed",
            bool(ranks)
            and all(
                rank["nonzero_bytes"] == 0
                and rank["inventory_after_blocks"] == 0
                and rank["blocks_zeroed"] >= rank["blocks_released"] > 0
                for rank in ranks
            ),
            [rank["bytes_zeroed"] for rank in ranks],
            "bytes zeroed per rank; nonzero bytes found by reading back: 0",
        ),
        Check(
            "revocation/free",
            rose == certified - facts["grown_blocks"] and certified > 0,
            rose,
            f"free blocks rose by the certified {certified}, less {facts['grown_blocks']} taken until the deadline",
        ),
        Check(
            "revocation/next",
            facts["a_next_cached"] == 0 and facts["generation_after"] == facts["generation_before"] + 1,
            facts["a_next_cached"],
            f"generation {facts['generation_before']} -> {facts['generation_after']}, the namespace serves on",
        ),
        Check(
            "revocation/receipts",
            facts["old_receipt_error"] == "not_found",
            facts["old_receipt_error"],
            "a receipt of the revoked generation is gone",
        ),
        Check(
            "revocation/others",
            facts["b_blocks_before"] == facts["b_blocks_after"]
            and facts["b_cached"] == facts["b_expected_cached"] > 0,
            facts["b_cached"],
            f"the other tenant still holds its {len(facts['b_blocks_after'])} blocks",
        ),
    ]


def check_ranks(
    agreement: dict[str, Any], findings: dict[str, list[str]], audit: Sequence[dict[str, Any]], tp: int
) -> list[Check]:
    """All ledgers were compared often enough, never differed and audit clean; K/V rows equal a cold recompute."""
    largest = max((rank["max_abs_difference"] for rank in audit), default=float("inf"))
    rows = [rank["rows_compared"] for rank in audit]
    return [
        Check(
            "ranks/ledgers",
            agreement["ledgers"] == tp + 1
            and agreement["differing"] == 0
            and agreement["compared_log_indices"] >= LOG_INDICES_LEAST,
            agreement["compared_log_indices"],
            f"log indices compared over {agreement['ledgers']} ledgers, {agreement['differing']} differing",
        ),
        Check(
            "ranks/audit",
            len(findings) == tp + 1 and not any(findings.values()),
            [finding for found in findings.values() for finding in found],
            f"contradictions found by recomputing {len(findings)} ledgers from scratch",
        ),
        Check(
            "ranks/kv",
            len(audit) == tp and all(count > 0 for count in rows) and largest <= KV_DIFFERENCE_MOST,
            largest,
            f"largest difference to a cold recompute over {rows} rows; at most {KV_DIFFERENCE_MOST}",
        ),
    ]


def check_pool(pool: dict[str, int]) -> Check:
    """free + evictable + live + reserved = total, and a quiet pool holds nothing live."""
    parts = [pool["free"], pool["evictable"], pool["live"], pool["reserved"]]
    ok = sum(parts) == pool["total"] > 0 and min(parts) >= 0 and pool["live"] == pool["reserved"] == 0
    return Check("pool", ok, parts, f"free + evictable + live + reserved = {sum(parts)} of {pool['total']}")


def check_memory(pss_mib: float) -> Check:
    """Summed PSS of every process of the server."""
    return Check(
        "memory", pss_mib <= MEMORY_MIB_MOST, round(pss_mib), f"MiB summed PSS; at most {MEMORY_MIB_MOST}"
    )
