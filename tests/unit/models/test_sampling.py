"""One row of logits: which ids stay, how often each is drawn, and that a draw depends on nothing else."""

from __future__ import annotations

import math
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copyhold.models.errors import NonFiniteLogits
from copyhold.models.philox import philox, uniform
from copyhold.models.sampling import GREEDY, MAX_SEED, MIN_SEED, SamplingParams, kept, sample_token

WORDS = st.integers(0, 2**64 - 1)
# Few distinct values, so that ties are the rule.
LOGITS = st.lists(st.sampled_from([-30.0, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=24)
TEMPERATURES = st.sampled_from([1e-300, 1e-3, 0.3, 0.7, 1.0, 2.0])
# Upper 0.1 % of chi-square, by degrees of freedom.
CHI_SQUARE_LIMIT = {3: 16.27, 7: 24.32, 15: 37.70}


def naive_kept(logits: list[float], params: SamplingParams) -> list[int]:
    """Temperature, top-k, top-p, each as a sentence says it."""
    scaled = [(value - max(logits)) / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda index: (-scaled[index], index))
    stay = sorted(order[: params.top_k or None])
    weights = dict(zip(stay, np.exp(np.array([scaled[index] for index in stay])).tolist(), strict=True))
    if params.top_p == 1.0:
        return stay
    run: list[int] = []
    for index in sorted(stay, key=lambda index: (-weights[index], index)):
        run.append(index)
        if sum(weights[index] for index in run) >= params.top_p * sum(weights.values()):
            break
    return sorted(run)


@settings(max_examples=200, deadline=None)
@given(key=st.tuples(WORDS, WORDS), counter=st.tuples(st.integers(0, 2**64 - 2), WORDS, WORDS, WORDS))
def test_the_words_are_those_of_an_independent_philox(key, counter) -> None:
    other = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=np.array(counter, dtype=np.uint64))
    # numpy's generator counts up before its first block.
    assert list(philox(key, (counter[0] + 1, *counter[1:]))) == other.random_raw(4).tolist()


def test_known_draws_stay_what_they_are() -> None:
    """A change here would change every seeded answer ever given."""
    drawn = [
        uniform(seed, position) for seed, position in ((0, 0), (7, 1), (-1, 1), (MIN_SEED, 5), (MAX_SEED, 5))
    ]
    assert [round(number, 6) for number in drawn] == [0.087239, 0.872073, 0.234942, 0.514328, 0.268793]
    assert len({uniform(seed, 3) for seed in range(-500, 500)}) == 1000


@settings(max_examples=300, deadline=None)
@given(
    logits=LOGITS,
    temperature=TEMPERATURES,
    top_k=st.integers(0, 30).filter(lambda k: k != 1),
    top_p=st.sampled_from([1e-300, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0]),
)
def test_the_kept_ids_are_those_of_the_naive_rule(logits, temperature, top_k, top_p) -> None:
    params = SamplingParams(temperature, top_p, top_k)
    ids, weights = kept(np.array(logits, dtype=np.float32), params)
    assert ids.tolist() == naive_kept(logits, params)
    assert len(weights) == len(ids)
    for position in range(3):
        token = sample_token(np.array(logits, dtype=np.float32), params, position)
        assert token in ids and weights[ids.tolist().index(token)] > 0


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
@pytest.mark.parametrize("top_k", [0, 1500])
def test_a_wide_vocabulary_keeps_the_same_ids(top_p: float, top_k: int) -> None:
    """Flat enough that the sorted candidates do not reach the mass and the whole row is sorted."""
    logits = np.random.default_rng(4).normal(0, 0.5, 3000).astype(np.float32)
    params = SamplingParams(1.0, top_p, top_k)
    ids, _ = kept(logits, params)
    assert (len(ids) > 1024) == (top_p > 0.5)
    assert len(ids) == _size_by_sum(logits, params)
    assert sorted(logits[ids], reverse=True) == sorted(logits, reverse=True)[: len(ids)]


def _size_by_sum(logits: np.ndarray, params: SamplingParams) -> int:
    heaviest = np.sort(np.exp(logits.astype(np.float64) - logits.max()))[::-1][: params.top_k or None]
    return int(np.count_nonzero(np.cumsum(heaviest) < params.top_p * heaviest.sum())) + 1


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    flat = np.zeros(10, dtype=np.float32)
    assert kept(flat, SamplingParams(1.0, 1.0, 3))[0].tolist() == [0, 1, 2]
    assert kept(flat, SamplingParams(1.0, 0.35))[0].tolist() == [0, 1, 2, 3]
    assert kept(flat, SamplingParams(1.0, 0.5, 4))[0].tolist() == [0, 1], "top-p is of what top-k left"
    assert sample_token(flat, GREEDY, 9) == 0
    assert sample_token(flat, SamplingParams(1.0, 1.0, 1, seed=5), 9) == 0
    assert sample_token(flat, SamplingParams(1.0, 1e-9, 0, seed=5), 9) == 0


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, -(2**63), 123456789])
def test_positions_of_one_seed_follow_the_softmax(seed: int) -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, 0.1], dtype=np.float32)
    params = SamplingParams(0.8, seed=seed)
    drawn = [sample_token(logits, params, position) for position in range(6000)]
    share = np.exp(logits.astype(np.float64) / 0.8)
    share /= share.sum()
    assert chi_square(np.bincount(drawn, minlength=8), 6000 * share) < CHI_SQUARE_LIMIT[7]


def test_seeds_at_one_position_and_neighbouring_positions_are_independent() -> None:
    flat = np.zeros(4, dtype=np.float32)
    by_seed = np.array([sample_token(flat, SamplingParams(1.0, seed=seed), 17) for seed in range(8000)])
    assert chi_square(np.bincount(by_seed, minlength=4), np.full(4, 2000.0)) < CHI_SQUARE_LIMIT[3]
    by_position = np.array([sample_token(flat, SamplingParams(1.0, seed=3), at) for at in range(8001)])
    for draws in (by_seed, by_position):
        pairs = draws[:-1] * 4 + draws[1:]
        counts = np.bincount(pairs, minlength=16)
        assert chi_square(counts, np.full(16, len(pairs) / 16)) < CHI_SQUARE_LIMIT[15]


def test_filters_leave_the_shares_of_what_they_keep() -> None:
    logits = np.log(np.array([0.05, 0.4, 0.05, 0.3, 0.1, 0.1])).astype(np.float32)
    params = SamplingParams(1.0, 0.85, 5, seed=11)
    drawn = np.bincount([sample_token(logits, params, at) for at in range(6000)], minlength=6)
    assert np.flatnonzero(drawn).tolist() == [1, 3, 4, 5]
    expected = 6000 * np.array([0.4, 0.3, 0.1, 0.1]) / 0.9
    assert chi_square(drawn[[1, 3, 4, 5]], expected) < CHI_SQUARE_LIMIT[3]


def test_last_bits_of_the_logits_do_not_reorder_a_draw() -> None:
    """Two batches round differently; ids, not probabilities, order the draw, so near ties change nothing."""
    rng = np.random.default_rng(2)
    base = np.repeat(rng.normal(0, 1, 100), 3).astype(np.float32)
    noisy = base + rng.normal(0, 1e-6, 300).astype(np.float32)
    params = SamplingParams(1.0, seed=1)
    draws = [(sample_token(base, params, at), sample_token(noisy, params, at)) for at in range(500)]
    assert all(one == other for one, other in draws)


def test_the_largest_number_below_one_is_still_an_id_with_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([0.0, -0.1, -0.2, -2000.0], dtype=np.float32)
    for number in (math.nextafter(1.0, 0.0), 1.0):
        monkeypatch.setattr("copyhold.models.sampling.uniform", lambda seed, position, number=number: number)
        assert sample_token(logits, SamplingParams(1.0), 0) == 2
    monkeypatch.setattr("copyhold.models.sampling.uniform", lambda seed, position: 0.0)
    assert sample_token(logits[::-1].copy(), SamplingParams(1.0), 0) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0)])
def test_logits_that_are_no_numbers_are_refused(bad: float, params: SamplingParams) -> None:
    with pytest.raises(NonFiniteLogits):
        sample_token(np.array([0.0, bad, 1.0], dtype=np.float32), params, 0)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_p": math.nan}, {"top_k": -1}, {"seed": 2**63}, {"seed": -(2**63) - 1},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused_where_they_are_made(values: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SamplingParams(**values)  # pyright: ignore[reportArgumentType]
    row = [0.0, 1.0, 0, 0]
    row[["temperature", "top_p", "top_k", "seed"].index(next(iter(values)))] = next(iter(values.values()))
    if row[3] < 2**63 and row[3] >= -(2**63):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=SamplingParams)


def test_only_what_can_draw_is_not_greedy() -> None:
    assert GREEDY.greedy and SamplingParams(0.0, 0.5, 7, 3).greedy and SamplingParams(1.0, 1.0, 1).greedy
    assert not SamplingParams(1e-9).greedy


def test_the_parameters_load_without_torch() -> None:
    code = "import sys, copyhold.models.sampling; assert not {'torch', 'numba', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
