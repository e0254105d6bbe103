"""What an operator chooses of one pool's cache: policy, shares, limits; and the table of policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from .compared_policies import Gdsf, Lhd, S3Fifo, Sieve, WTinyLfu
from .cost_policy import CostAware
from .policies import Fifo, Filo, Lfu, Lru, Mru, Policy, SegmentedLru
from .retention import RetentionLimits
from .shares import ShareSettings

MakePolicy = Callable[[int, int], Policy]
"""(units, capacity in units) -> a new policy."""

DEFAULT_POLICY = "cost"

SERVED_POLICIES: Mapping[str, MakePolicy] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "priority": Lru,
    "slru": SegmentedLru,
    "cost": CostAware,
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


class CacheSettings(msgspec.Struct, frozen=True):
    """One pool's policy, shares and limits. ``attention_pages``: see ``CostAware``."""

    policy: str = DEFAULT_POLICY
    shares: ShareSettings = ShareSettings()
    limits: RetentionLimits = RetentionLimits()
    attention_pages: int = 0

    def make_policy(self, num_units: int, capacity: int) -> Policy:
        """A new policy of the chosen kind."""
        if self.policy == "cost":
            return partial(CostAware, attention_pages=self.attention_pages)(num_units, capacity)
        return LAB_POLICIES[self.policy](num_units, capacity)


DEFAULT_CACHE = CacheSettings()
