"""The table of reasons of prefix identity: lengths, chains, cache groups, tree and handoff (K092 to K129).

Owns the rows that reasons.py serves after those of reason_table.py. Invariant: a name appears once in both; a `docs` row says why
nothing can raise it. Source: the contracts named in each row; K245.
"""

from __future__ import annotations

from .reasons import Reason

_MINIMUM = (
    "Match lengths come from one pure function that takes the minimum; its tests bound it by every limit."
)

_LENGTHS = (
    ("runtime_hit_exceeds_semantic", "candidate", "K092", _MINIMUM),
    ("runtime_hit_exceeds_indexed", "candidate", "K092", _MINIMUM),
    (
        "full_prompt_hit_without_logits_path",
        "candidate",
        "K093",
        "Every admission is capped one token below the prompt; no command admits without logits.",
    ),
    (
        "useful_bytes_reported_as_capacity",
        "accounting",
        "K096",
        "A match counts tokens to compute and a receipt the blocks it reserved; no field holds both.",
    ),
    (
        "decode_saving_claimed",
        "claims",
        "K097",
        "Receipts speak of prompt tokens alone; a test compares outputs with caching on and off.",
    ),
)

_CHAINS = (
    (
        "parent_not_in_key",
        "candidate",
        "K098",
        "Every link of a chain is keyed over the link before it; no function makes one alone.",
    ),
    (
        "partial_block_hashed",
        "candidate",
        "K099",
        "A chain has one link for each whole spacing, the rest gets none; Publish enters whole pages.",
    ),
    (
        "hash_block_not_aligned",
        "candidate",
        "K100",
        "Links are spaced in tokens and lengths are tokens, so no size is taken for another.",
    ),
    (
        "gap_in_prefix",
        "candidate",
        "K101",
        "A match walks edges from the root, so nothing behind a missing page can be reached.",
    ),
    (
        "tail_identity_without_length",
        "candidate",
        "K103",
        "A tail's digest, and its entry in a ledger, cover its rows, their number, its policy and all that it follows.",
    ),
    (
        "append_under_frozen_tail_key",
        "candidate",
        "K103",
        "A tail is made from all its rows and never lengthened; its own request goes on in a copy of the block.",
    ),
    (
        "lookup_mutated_table",
        "candidate",
        "K104",
        "A probe returns values and only commands write; a rule machine compares digests around it.",
    ),
    (
        "missing_copy_rows",
        "lease",
        "K104",
        "A dispatch that writes into a shared block names source, target and rows in its receipt.",
    ),
    (
        "hash_policy_mismatch",
        "candidate",
        "K105",
        "Version and spacing enter the head of a chain, so chains of two encodings share no link.",
    ),
)

_GROUPS = (
    (
        "missing_group_entry",
        "candidate",
        "K106",
        "The hit is the longest boundary that every group serves; a group without rows shortens it.",
    ),
    (
        "junction_not_agreed",
        "candidate",
        "K107",
        "One descent lowers one candidate for all groups until none lacks a row, so there is one answer.",
    ),
    (
        "group_alignment_violated",
        "candidate",
        "K107",
        "Boundaries are multiples of the least common multiple of all block sizes from the start.",
    ),
    (
        "recurrent_state_missing",
        "candidate",
        "K108",
        "A group is full attention or has a window; no kind of group keeps recurrent state.",
    ),
    (
        "best_group_reported_as_hit",
        "claims",
        "K109",
        "A match has one runtime length, which is at most the junction; metrics are made from it.",
    ),
    (
        "state_group_without_spec",
        "compatibility",
        "K110",
        "A group's manifest cannot be built without its window: the field has no default.",
    ),
)

_TREE = (
    (
        "split_changed_slots",
        "lease",
        "K113",
        "A split cuts arrays at one place and frees nothing; the audit finds a moved block as path_slot_mismatch.",
    ),
    (
        "match_zero_lcp",
        "candidate",
        "K113",
        "A child is found by its whole first page, so a match on an edge has at least that page.",
    ),
    (
        "split_lost_lock",
        "lease",
        "K114",
        "A lock is the count of an edge's first block, which a split leaves as it is.",
    ),
    (
        "split_token_only",
        "lease",
        "K114",
        "Tokens and blocks are cut in one commit; the audit finds unequal halves as edge_length_mismatch.",
    ),
    (
        "duplicate_slot_retained",
        "lease",
        "K115",
        "A block outside the index becomes free with its last reference, whoever computed the same.",
    ),
    (
        "tree_slot_freed",
        "lease",
        "K115",
        "Dropping a reference frees only blocks outside the index; those inside wait for an eviction.",
    ),
    (
        "publish_without_rematch",
        "lease",
        "K117",
        "Publish matches, splits, enters and moves the lease in one commit; no step can be left out.",
    ),
    (
        "lock_gap",
        "lease",
        "K117",
        "The lease moves within one commit, and no command is applied between its writes.",
    ),
    (
        "rematch_shorter_than_key",
        "lease",
        "K117",
        "The path that a publication returns ends where it entered the last whole page.",
    ),
    (
        "private_rows_leaked",
        "accounting",
        "K118",
        "A release drops a whole table; the audit finds what is left as refcount_mismatch.",
    ),
    (
        "lock_leaked",
        "accounting",
        "K118",
        "Leases are counts of blocks that tables reach; the audit finds one too many as refcount_mismatch.",
    ),
    (
        "lock_underflow",
        "lease",
        "K119",
        "A request drops its references once; a second release is refused as double_release.",
    ),
    (
        "evictable_reported_as_ready",
        "accounting",
        "K120",
        "The gauge counts evictable blocks, evictable_leaves lists what may go now; they are two calls.",
    ),
    (
        "policy_selected_illegal_victim",
        "lease",
        "K122",
        "Every ledger checks every handle that a policy named and refuses it by its own reason.",
    ),
    (
        "access_time_not_updated",
        "accounting",
        "K124",
        "Times belong to the scheduler's policies, which are told of each hit with its whole path.",
    ),
    (
        "lookup_before_authorization",
        "authorization",
        "K124",
        "A lookup needs a scope, and scopes are made from verified grants only.",
    ),
    (
        "key_view_mismatch",
        "candidate",
        "K125",
        "The view enters a chain's head and the world of a root, so keys of two views never meet.",
    ),
)

_HANDOFF = (
    (
        "suffix_mismatch",
        "lease",
        "K126",
        "The suffix is what the match leaves of its own prompt; the receipt has no second figure.",
    ),
    (
        "policy_in_receipt",
        "claims",
        "K126",
        "Receipts have no field for a decision; victims are part of the command that names them.",
    ),
    (
        "lease_leaked",
        "accounting",
        "K127",
        "An admission nobody wants is aborted or released; the audit counts leases from requests.",
    ),
    (
        "receipt_without_lease",
        "lease",
        "K127",
        "Admit leases in the commit that makes its receipt; a probe has no handle that a command takes.",
    ),
    (
        "theorem_out_of_scope",
        "claims",
        "K128",
        "The depth-first bound is stated for an offline batch alone; no function claims it online.",
    ),
    (
        "tree_version_not_advanced",
        "generation",
        "K129",
        "The log index is the version: each commit takes the next one and its receipt has both digests.",
    ),
)

_FOUND_BY_AUDIT = (
    ("edge_length_mismatch", "K111"),
    ("child_selector_mismatch", "K111"),
    ("slot_owned_twice", "K112"),
    ("slot_lost", "K112"),
    ("lock_mismatch", "K119"),
    ("unaligned_boundary", "K123"),
    ("path_slot_mismatch", "K126"),
)

PREFIX_ROWS: tuple[Reason, ...] = (
    *[
        Reason(name, "docs", stage, (contract,), why)
        for name, stage, contract, why in (*_LENGTHS, *_CHAINS, *_GROUPS, *_TREE, *_HANDOFF)
    ],
    *[Reason(name, "auditor", "lease", (contract,)) for name, contract in _FOUND_BY_AUDIT],
)
