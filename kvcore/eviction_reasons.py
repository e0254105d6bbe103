"""Reasons of eviction and of the cache lab.

Owns rows of the registry in reasons.py, in the order of their contracts. Policies live outside this folder, so nearly all of
them are rules that no call here can break. Invariant: that of the registry. Source: contracts K193 to K201.
"""

from __future__ import annotations

from .reasons import Reason

EVICTION_ROWS: tuple[Reason, ...] = (
    Reason(
        "policy_input_missing",
        "docs",
        "claims",
        ("K193",),
        "The protocol of a policy hands it uses, depths, ages and replies; what it ignores is its own affair.",
    ),
    Reason(
        "evicted_without_pressure",
        "docs",
        "lease",
        ("K194",),
        "The evictor gives no victim while blocks are free; a test fills half a pool and counts none.",
    ),
    Reason(
        "score_without_decay",
        "docs",
        "claims",
        ("K195",),
        "Whether a policy forgets is its definition; the manual says which does not.",
    ),
    Reason(
        "admitted_then_immediately_evicted",
        "docs",
        "lease",
        ("K196",),
        "Admission asks the worth by which a victim is chosen; a test counts newcomers that were evicted unused.",
    ),
    Reason(
        "undeclared_recency_rule",
        "docs",
        "claims",
        ("K197",),
        "A pool's settings name one of two rules and no other value is accepted.",
    ),
    Reason(
        "static_value_used",
        "docs",
        "claims",
        ("K198",),
        "A worth is asked for at every choice; a test compares a free pool with a full one.",
    ),
    Reason(
        "hit_rate_only_report",
        "docs",
        "claims",
        ("K199",),
        "The report is a struct with the fields that the contract lists; a test compares its schema.",
    ),
    Reason("lossy_eviction_in_exact_mode", "runtime", "lease", ("K200",)),
    Reason(
        "lab_used_as_allocator_claim",
        "docs",
        "claims",
        ("K201",),
        "The lab prints what it does not model beside every result; what a text claims is prose.",
    ),
)
"""What is kept, what goes, and what may be said of it."""
