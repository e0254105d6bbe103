"""What the default policy learns: that a trait returns, at what age, and that both can change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from copyhold.actors.cost_policy import CostAware, savings_rate
from copyhold.actors.return_loops import follow_runs, levels_of, note_returns, read_path, write_path
from copyhold.actors.return_model import BANDS, REMEMBERED, ReturnModel, bands_of
from copyhold.cluster.lab_trace import Trace, replay


def model() -> ReturnModel:
    return ReturnModel(np.full(BANDS, -6.0), np.zeros(2), 1, 12)


def live(returns: ReturnModel, rounds: int, who_returns: int, age: float, start: int = 0) -> int:
    """Two runs a round, one of each trait; one of them comes back at ``age``."""
    for number in range(start, start + rounds):
        now = 100.0 * number
        serials = returns.follow(np.array([[0], [1]]), now)
        returns.came_back(serials[who_returns : who_returns + 1], np.array([age]))
        returns.learn(now)
    return start + rounds


def test_the_trait_whose_runs_come_back_gets_the_higher_level_and_a_shift_reverses_it():
    returns = model()
    end = live(returns, 300, 1, 900.0)
    levels = returns.level(np.array([[0], [1]]))
    assert levels[1] > levels[0]
    live(returns, 1200, 0, 900.0, end)
    levels = returns.level(np.array([[0], [1]]))
    assert levels[0] > levels[1]


def test_worth_rises_towards_the_age_of_return_and_falls_after_it():
    returns = model()
    live(returns, 400, 1, 3000.0)
    level = int(returns.level(np.array([[1]]))[0])
    young, due, late = (returns.rate(level, age) for age in (300.0, 2600.0, 12000.0))
    assert young < due > late


def test_what_it_remembers_is_bounded_and_a_forgotten_run_is_ignored():
    returns = model()
    first = returns.follow(np.zeros((1, 1), dtype=np.int64), 0.0)
    for _ in range(REMEMBERED // 1024 + 1):
        returns.follow(np.zeros((1024, 1), dtype=np.int64), 1.0)
    returns.came_back(first, np.array([2.0]))
    returns.learn(1e6)
    assert np.isfinite(returns.rate(0, 1.0))


@pytest.mark.parametrize("age", [0, 1, 2, 3, 250, 4096, 1 << 40])
def test_bands_are_half_octaves(age):
    band = int(bands_of(np.array([age]))[0])
    assert band == (0 if age < 1 else min(1 + int(2 * np.log2(age)), BANDS - 1))


def test_a_cycle_longer_than_the_cache_is_partly_kept_where_lru_keeps_nothing():
    paths = tuple(tuple(range(10 * (n % 60), 10 * (n % 60) + 10)) for n in range(1200))
    trace = Trace(paths, 600)
    assert replay(trace, "lru", 300).hit_rate == 0.0
    assert replay(trace, "cost", 300).hit_rate > 0.25


def test_a_flood_that_nobody_asks_for_again_does_not_sweep_the_hot_set_out():
    draw = np.random.default_rng(4)
    paths, fresh = [], 400
    for _ in range(1500):
        if draw.random() < 0.4:
            first = 8 * int(draw.integers(40))
            paths.append(tuple(range(first, first + 8)))
        else:
            paths.append(tuple(range(fresh, fresh + 20)))
            fresh += 20
    trace = Trace(tuple(paths), fresh)
    assert replay(trace, "cost", 400).hit_rate > 3 * replay(trace, "lru", 400).hit_rate


def test_the_length_of_a_reply_is_one_of_the_things_learnt():
    policy = CostAware(8, 8)
    policy.published([0, 1, 2], 0, [11, 12, 13])
    policy.held([0, 1, 2], 1)
    short = policy.lane(0)
    policy.published([3, 4, 5], 0, [21, 22, 23])
    policy.held([3, 4, 5], 700)
    assert policy.lane(3) != short


def test_two_blocks_that_meet_in_one_cell_do_not_see_each_other():
    cells = np.array([[5, 9, 0, 0], [5 + 64, 9, 0, 0]])
    identities = np.zeros((64, 4), dtype=np.int64)
    path = np.arange(2)
    for known_before in ([False, False], [False, True]):
        blocks, known, traits, ends, had_runs = read_path(path, cells, identities, 1)
        assert blocks[:, 0].tolist() == [5, 5] and known.tolist() == known_before
        write_path(
            path, cells, identities, blocks, ends, np.zeros(len(ends), np.int64), np.full(len(ends), 3), 20
        )
        assert ends.tolist() == [0, 1] and len(traits) == 2, "the last block of a path is a run of its own"
    assert had_runs.tolist() == [1] and blocks[1].tolist() == [5, 2, 3, 0]


def test_levels_are_rounded_sums_of_the_traits_odds_within_their_range():
    draw = np.random.default_rng(2)
    odds, traits = draw.normal(0, 3, 20), draw.integers(0, 20, (200, 6))
    expected = np.clip(np.rint(odds[traits].sum(axis=1) / 0.5) + 16, 0, 31)
    assert (levels_of(odds, traits, 0.5, 32) == expected).all()


def test_a_runs_first_return_counts_and_the_ring_forgets_what_it_overwrote():
    followed, ended, back = np.zeros((4, 1), dtype=np.int64), np.zeros(4), np.zeros(4)
    serials = follow_runs(followed, ended, back, np.array([[7], [8], [9]]), 3, 50.0)
    assert serials.tolist() == [3, 4, 5] and followed[:, 0].tolist() == [8, 9, 0, 7]
    note_returns(back, np.array([3, 3, 5, 1]), np.array([9, 4, 6, 1]), 2)
    assert back.tolist() == [np.inf, 6.0, 0.0, 4.0]


FIXTURES = json.loads((Path(__file__).parents[2] / "data" / "fixtures.json").read_text())["fixtures"]
FACTS = {fact["id"]: fact for fact in FIXTURES if fact["id"] in ("F109", "F10B")}


def test_the_hourly_giant_goes_before_the_preamble_of_every_second():
    """F109 and F10B (K194): what a prefix saves, per byte and hour."""
    inputs, expected = FACTS["F109"]["inputs"], FACTS["F109"]["expected"]
    big, small = (
        savings_rate(
            one["hits_per_hour"], one["tokens"], inputs["ms_per_token"], one["tokens"] * inputs["token_bytes"]
        )
        for one in (inputs["big"], inputs["small"])
    )
    assert small / big == pytest.approx(expected["per_byte_ratio"])
    cases = FACTS["F10B"]["inputs"]["cases"]
    rates = [savings_rate(one["p_per_hour"], one["tokens"], one["ms"], one["bytes"]) for one in cases]
    order = [name for _, name in sorted(zip(rates, ("big", "small"), strict=True))]
    assert order == FACTS["F10B"]["expected"]["order_evicted_first"]
