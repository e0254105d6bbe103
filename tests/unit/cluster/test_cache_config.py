"""Cache settings: what cannot be is refused by its key, the rest reaches the scheduler."""

from __future__ import annotations

import pytest

from copyhold.actors.shares import Share, ShareSettings
from copyhold.cluster.cache_config import cache_settings
from copyhold.cluster.config import Config
from copyhold.cluster.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"eviction_policy": "random"}, "eviction_policy"),
        ({"eviction_policy": "mru"}, "eviction_policy"),
        ({"isolation": "none"}, "isolation"),
        ({"tenant_share_blocks": 513, "isolation": "strict"}, "tenant_share_blocks"),
        ({"tenant_blocks": "acme"}, "tenant_blocks"),
        ({"tenant_blocks": "acme=300, bravo=300"}, "tenant_blocks"),
        ({"tenant_blocks": "acme=1-2", "isolation": "strict"}, "tenant_blocks"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(values, key):
    with pytest.raises(ConfigError) as refusal:
        Config(**values)
    assert refusal.value.key == key


def test_settings_reach_the_scheduler():
    made = cache_settings(
        Config(
            eviction_policy="slru",
            tenant_blocks="acme=64-128",
            cache_priority_max=1,
            cache_ttl_max_s=60.0,
            pin_blocks=8,
        )
    )
    assert made.policy == "slru"
    assert made.shares == ShareSettings("elastic", 256, {"acme": Share(64, 128)})
    assert (made.limits.max_priority, made.limits.max_ttl_s, made.limits.pin_blocks) == (1, 60.0, 8)


def test_strict_without_a_share_gives_each_namespace_half_the_pool():
    assert cache_settings(Config(isolation="strict")).shares.share_blocks == 256
    assert cache_settings(Config(isolation="strict", tenant_share_blocks=100)).shares.share_blocks == 100
