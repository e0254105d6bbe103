"""Cache settings: what cannot be is refused by its key, the rest reaches the scheduler."""

from __future__ import annotations

import pytest

from copyhold.actors.cache_settings import CacheSettings
from copyhold.actors.shares import Share, ShareSettings
from copyhold.cluster.cache_config import cache_settings
from copyhold.cluster.config import Config
from copyhold.cluster.errors import ConfigError, UsageError
from copyhold.cluster.lab_trace import policies_to_play
from copyhold.kvcore.contract_errors import LossyEvictionInExactMode


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"eviction_policy": "random"}, "eviction_policy"),
        ({"eviction_policy": "mru"}, "eviction_policy"),
        ({"cache_recency": "root"}, "cache_recency"),
        ({"cache_recency": "edge"}, "cache_recency"),
        ({"isolation": "none"}, "isolation"),
        ({"tenant_share_blocks": 513, "isolation": "strict"}, "tenant_share_blocks"),
        ({"tenant_blocks": "acme"}, "tenant_blocks"),
        ({"tenant_blocks": "acme=300, bravo=300"}, "tenant_blocks"),
        ({"tenant_blocks": "acme=1-2", "isolation": "strict"}, "tenant_blocks"),
        ({"cache_tails": True, "isolation": "strict"}, "cache_tails"),
        ({"cache_tails": True, "tenant_blocks": "acme=64-128"}, "cache_tails"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(values, key):
    with pytest.raises(ConfigError) as refusal:
        Config(**values)
    assert refusal.value.key == key


@pytest.mark.parametrize("name", ["h2o", "SnapKV", "streaming_llm"])
def test_a_method_that_drops_positions_is_refused_by_its_contracts_reason(name):
    """K200: it is another contract, never an eviction policy of exact reuse."""
    with pytest.raises(ConfigError, match="lossy_eviction_in_exact_mode") as refusal:
        Config(eviction_policy=name)
    assert refusal.value.key == "eviction_policy"
    with pytest.raises(UsageError, match="lossy_eviction_in_exact_mode"):
        policies_to_play(name)
    with pytest.raises(LossyEvictionInExactMode):
        CacheSettings(policy=name)


def test_settings_reach_the_scheduler():
    made = cache_settings(
        Config(
            eviction_policy="slru",
            cache_recency="edge",
            tenant_blocks="acme=64-128",
            cache_priority_max=1,
            cache_ttl_max_s=60.0,
            pin_blocks=8,
        )
    )
    assert (made.policy, made.recency) == ("slru", "edge")
    assert made.shares == ShareSettings("elastic", 256, {"acme": Share(64, 128)})
    assert not made.tails and cache_settings(Config(cache_tails=True)).tails
    assert (made.limits.max_priority, made.limits.max_ttl_s, made.limits.pin_blocks) == (1, 60.0, 8)


def test_strict_without_a_share_gives_each_namespace_half_the_pool():
    assert cache_settings(Config(isolation="strict")).shares.share_blocks == 256
    assert cache_settings(Config(isolation="strict", tenant_share_blocks=100)).shares.share_blocks == 100
