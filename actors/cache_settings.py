"""What an operator chooses of one pool's cache: policy, what counts as use, shares, limits; and the policies by name.

Invariant: everything offered keeps reuse exact. Methods that drop positions of a sequence answer another contract and are
refused by name (K200), wherever a policy is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from copyhold.kvcore.contract_errors import LossyEvictionInExactMode

from .compared_policies import Gdsf, Lhd, S3Fifo, Sieve, WTinyLfu
from .policies import RECENCY_RULES, Fifo, Filo, Lfu, Lru, Mru, Policy, RecencyRule, SegmentedLru
from .retention import RetentionLimits
from .shares import ShareSettings

MakePolicy = Callable[[int, int], Policy]
"""(units, capacity in units) -> a new policy."""

DEFAULT_POLICY = "cost"
TAIL_POLICY = 1
"""The ledger's number for tails that requests leave when they end."""


def _cost_aware(num_units: int, capacity: int, attention_pages: int = 0) -> Policy:
    """Its loops are compiled, and a process that only reads settings does without the compiler."""
    from .cost_policy import CostAware

    return CostAware(num_units, capacity, attention_pages=attention_pages)


SERVED_POLICIES: Mapping[str, MakePolicy] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "priority": Lru,
    "slru": SegmentedLru,
    "cost": _cost_aware,
}
"""``priority`` is LRU below priorities; so is every other one below them, with its own order within a priority."""

LAB_POLICIES: Mapping[str, MakePolicy] = {
    **SERVED_POLICIES,
    "mru": Mru,
    "filo": Filo,
    "gdsf": Gdsf,
    "lhd": Lhd,
    "s3-fifo": S3Fifo,
    "sieve": Sieve,
    "w-tinylfu": WTinyLfu,
}
"""What the lab plays beside them, to compare with."""


LOSSY_METHODS = frozenset(
    {"h2o", "keyformer", "pyramidkv", "quest", "scissorhands", "sink", "snapkv", "streaming-llm", "tova"}
)
"""Published methods that keep some positions of a sequence and drop the others."""


def refuse_lossy(name: str) -> None:
    """Raises: ``LossyEvictionInExactMode`` for the name of a method that drops positions."""
    if name.lower().replace("_", "-") in LOSSY_METHODS:
        raise LossyEvictionInExactMode(name)


class CacheSettings(msgspec.Struct, frozen=True):
    """One pool's policy, shares and limits. ``attention_pages``: see ``CostAware``; ``recency``: what counts as use.

    ``tails``: a request that ends well leaves the rows after its last whole block as a partial tail, and later ones may hit it.
    """

    policy: str = DEFAULT_POLICY
    recency: RecencyRule = "path"
    shares: ShareSettings = ShareSettings()
    limits: RetentionLimits = RetentionLimits()
    attention_pages: int = 0
    tails: bool = False

    def __post_init__(self) -> None:
        """Raises: ``LossyEvictionInExactMode``; ``ValueError`` for a rule that is none, or none for this policy."""
        refuse_lossy(self.policy)
        if self.recency not in RECENCY_RULES:
            raise ValueError(f"{self.recency!r} is not one of {', '.join(RECENCY_RULES)}")
        if self.recency == "edge" and self.policy == "cost":
            raise ValueError("edge is no rule for the policy cost, which learns from whole paths")
        if self.tails and (self.shares.isolation == "strict" or self.shares.named):
            raise ValueError(
                "tails are given back with their edges, which shares of single namespaces do not allow for"
            )

    def make_policy(self, num_units: int, capacity: int) -> Policy:
        """A new policy of the chosen kind."""
        if self.policy == "cost":
            return _cost_aware(num_units, capacity, self.attention_pages)
        return LAB_POLICIES[self.policy](num_units, capacity)


DEFAULT_CACHE = CacheSettings()
