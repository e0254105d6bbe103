"""What a request may ask of the cache: store nothing, live so long, be kept firmly; within its namespace's quota."""

from __future__ import annotations

import pytest
from dry_replica import DryReplica
from local_replica import run_of

from copyhold.actors.cache_settings import CacheSettings
from copyhold.actors.errors import InvalidRequest
from copyhold.actors.retention import Retention, RetentionLimits

LRU = CacheSettings(policy="lru", limits=RetentionLimits(max_priority=2, max_ttl_s=100.0, pin_blocks=10))
LONG = run_of(0, 33)
"""Eight whole blocks."""


def test_no_store_reuses_and_leaves_nothing_behind():
    served = DryReplica(LRU)
    served.serve(LONG)
    longer = LONG[:32] + run_of(100, 33)
    assert served.serve(longer, retention=Retention(no_store=True)).cached_tokens == 32
    assert served.serve(longer).cached_tokens == 32, "its own part was not kept"
    assert served.serve(longer).cached_tokens == 64
    served.check()


def test_a_lifetime_ends_what_nobody_else_wanted_longer():
    served = DryReplica(LRU)
    served.serve(LONG, retention=Retention(ttl_s=10.0))
    served.now_s = 9.0
    served.step()
    assert served.ledger.gauge().evictable == 8
    served.now_s = 10.0
    assert served.step()
    assert served.ledger.gauge().evictable == 0
    assert served.scheduler.cache_report().expired_blocks == 8
    assert served.serve(LONG).cached_tokens == 0
    served.check()


def test_a_shared_stem_lives_as_long_as_the_longest_of_its_requests_asked():
    served = DryReplica(LRU)
    stem = run_of(0, 16)
    served.serve(stem + run_of(100, 17), retention=Retention(ttl_s=10.0))
    served.serve(stem + run_of(200, 17), retention=Retention(ttl_s=50.0))
    served.now_s = 11.0
    served.step()
    assert served.ledger.gauge().evictable == 8, "the first tail is gone, the stem and the second tail stay"
    served.now_s = 49.0
    served.step()
    assert served.serve(stem + run_of(300, 1)).cached_tokens == 16
    served.now_s = 70.0
    served.step()
    assert served.ledger.gauge().evictable == 4, "the third asked for no end, and it uses the stem"
    served.check()


def test_a_lifetime_that_ends_while_in_use_is_carried_out_after_it():
    served = DryReplica(LRU)
    served.serve(LONG, retention=Retention(ttl_s=10.0))
    running = served.submit(LONG + run_of(100, 10), max_new=40, retention=Retention(ttl_s=5.0))
    served.step()
    served.now_s = 20.0
    served.step()
    assert running.cached_tokens == 32
    assert not running.ended
    served.run()
    served.now_s = 26.0
    served.step()
    assert served.ledger.gauge().evictable == 0
    served.check()


def test_a_higher_priority_goes_last_whatever_its_age():
    served = DryReplica(LRU)
    served.serve(LONG, retention=Retention(priority=1))
    for number in range(10):
        served.serve(run_of(1000 + 100 * number, 41))
        served.check()
    assert served.serve(LONG).cached_tokens == 32


def test_priority_does_not_hold_what_a_request_must_have():
    served = DryReplica(LRU)
    served.serve(LONG, retention=Retention(priority=2))
    assert served.serve(run_of(1000, 128)).failure == ""
    assert served.serve(LONG).cached_tokens == 0
    assert served.scheduler.cache_report().pinned_blocks == 0
    served.check()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (Retention(priority=3), "cache_priority"),
        (Retention(priority=-1), "cache_priority"),
        (Retention(ttl_s=101.0), "cache_ttl_s"),
        (Retention(ttl_s=0.0), "cache_ttl_s"),
    ],
)
def test_what_exceeds_the_quota_is_refused_by_the_name_of_its_field(asked, param):
    served = DryReplica(LRU)
    served.step()
    digest = served.ledger.machine_digest
    with pytest.raises(InvalidRequest) as refusal:
        served.submit(LONG, retention=asked)
    assert refusal.value.param == param
    assert served.scheduler.idle
    assert served.ledger.machine_digest == digest


def test_the_pin_budget_is_the_namespaces_own():
    served = DryReplica(LRU, num_blocks=64)
    served.serve(LONG, retention=Retention(priority=1))
    with pytest.raises(InvalidRequest, match="8 of this namespace's 10 are kept already"):
        served.submit(run_of(100, 33), retention=Retention(priority=1))
    served.serve(run_of(100, 33), "b", retention=Retention(priority=1))
    served.serve(run_of(100, 9), retention=Retention(priority=1))
    assert served.scheduler.cache_report().pinned_blocks == 18


def test_two_that_race_for_the_budget_do_not_exceed_it():
    served = DryReplica(LRU, num_blocks=64)
    for number in range(2):
        served.submit(run_of(100 * number, 33), retention=Retention(priority=1))
    served.run()
    assert served.scheduler.cache_report().pinned_blocks == 8
