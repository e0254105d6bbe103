"""From an operator's settings to the cache of each replica, and what is refused of them.

Owns the rule for namespaces without a share of their own: with strict isolation each gets ``tenant_share_blocks``, half the
pool where that is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from copyhold.actors.cache_settings import SERVED_POLICIES, CacheSettings, refuse_lossy
from copyhold.actors.policies import RecencyRule
from copyhold.actors.retention import RetentionLimits
from copyhold.actors.shares import ISOLATIONS, Isolation, ShareSettings, parse_shares
from copyhold.kvcore.contract_errors import LossyEvictionInExactMode

from .errors import ConfigError

if TYPE_CHECKING:
    from .config import Config


_EXACT = "methods that drop positions change answers, and reuse is exact here"


def check_cache(config: Config) -> None:
    """Raises: ConfigError for a policy, an isolation or shares that cannot be."""
    try:
        refuse_lossy(config.eviction_policy)
    except LossyEvictionInExactMode as error:
        raise ConfigError("eviction_policy", f"eviction_policy: {error}; {_EXACT}") from None
    if config.eviction_policy not in SERVED_POLICIES:
        known = ", ".join(sorted(SERVED_POLICIES))
        raise ConfigError(
            "eviction_policy", f"eviction_policy = {config.eviction_policy!r} is not one of {known}"
        )
    try:
        CacheSettings(config.eviction_policy, cast(RecencyRule, config.cache_recency))
    except ValueError as error:
        raise ConfigError("cache_recency", f"cache_recency = {config.cache_recency!r}: {error}") from None
    if config.isolation not in ISOLATIONS:
        known = ", ".join(ISOLATIONS)
        raise ConfigError("isolation", f"isolation = {config.isolation!r} is not one of {known}")
    sized = not config.pool_mb  # otherwise the pool is known once the model is, and checked then
    if sized and config.isolation == "strict" and config.tenant_share_blocks > config.num_blocks:
        raise ConfigError(
            "tenant_share_blocks",
            f"tenant_share_blocks = {config.tenant_share_blocks} exceeds the pool of {config.num_blocks} blocks",
        )
    try:
        named = parse_shares(config.tenant_blocks, config.isolation)
    except ValueError as error:
        raise ConfigError("tenant_blocks", f"tenant_blocks: {error}") from None
    if config.cache_tails and (config.isolation == "strict" or named):
        raise ConfigError(
            "cache_tails",
            "cache_tails needs isolation = elastic without tenant_blocks: shares do not allow for tails",
        )
    floors = sum(share.floor_blocks for share in named.values())
    if sized and floors > config.num_blocks:
        raise ConfigError(
            "tenant_blocks",
            f"tenant_blocks promises {floors} blocks, the pool (pool_tokens / block_size) has {config.num_blocks}",
        )


def cache_settings(config: Config) -> CacheSettings:
    """What each replica's scheduler is given."""
    shares = ShareSettings(
        cast(Isolation, config.isolation),
        config.tenant_share_blocks or config.num_blocks // 2,
        parse_shares(config.tenant_blocks, config.isolation),
    )
    limits = RetentionLimits(config.cache_priority_max, config.cache_ttl_max_s, config.pin_blocks)
    recency = cast(RecencyRule, config.cache_recency)
    return CacheSettings(config.eviction_policy, recency, shares, limits, tails=config.cache_tails)
