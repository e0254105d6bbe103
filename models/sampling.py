"""Owns how one token is drawn from one row of logits: what a request may ask for, and the draw itself.

Torch-free, so that a gateway can import it. Steps: temperature, then top-k, then top-p, then one inverse-CDF
draw over the kept ids in ascending order with the number that belongs to (seed, position). Invariants: equal
logits, parameters and position give the same token in every batch, chunking and rank; a difference of logits in the
last bits moves no boundary by more than its own size, because ids, not probabilities, order the draw.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from .errors import NonFiniteLogits
from .philox import uniform

MAX_TEMPERATURE = 2.0
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
_FIRST_CANDIDATES = 1024
"""How many of the heaviest ids are sorted before a whole vocabulary is."""

Float64s = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How a request's tokens are chosen; the default is greedy.

    ``top_k`` 0 and ``top_p`` 1 keep everything. ``seed`` has a meaning only where something is drawn.

    Raises: `ValueError` for a value out of range; nothing was made.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature {self.temperature} is outside [0, {MAX_TEMPERATURE}]")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p {self.top_p} is outside (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} is negative")
        if not MIN_SEED <= self.seed <= MAX_SEED:
            raise ValueError(f"seed {self.seed} does not fit 64 signed bits")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken without a draw."""
        return self.temperature == 0.0 or self.top_k == 1


GREEDY = SamplingParams()


class RowDraw(msgspec.Struct, frozen=True):
    """One row of a step's logits that is drawn; ``position`` is the absolute position of the new token."""

    row: int
    position: int
    params: SamplingParams


def sample_token(logits: npt.NDArray[np.floating], params: SamplingParams, position: int) -> int:
    """Draw one id from the logits `[vocab]` of the whole vocabulary.

    Raises: `NonFiniteLogits`.
    """
    if params.greedy:
        _largest_logit(logits)
        return int(logits.argmax())
    ids, weights = kept(logits, params)
    running = np.cumsum(weights)
    at = int(np.searchsorted(running, uniform(params.seed, position) * running[-1], side="right"))
    if at == len(ids):
        # The product was rounded up to the whole mass: the last id that has any.
        at = int(np.searchsorted(running, running[-1], side="left"))
    return int(ids[at])


def kept(logits: npt.NDArray[np.floating], params: SamplingParams) -> tuple[Ids, Float64s]:
    """The ids that top-k and top-p leave, ascending, and their weights (probabilities times a constant).

    Of equal values the lowest ids stay. Top-p keeps the shortest run of the heaviest ids whose weight is at
    least ``top_p`` of what top-k left.

    Raises: `NonFiniteLogits`.
    """
    values = logits.astype(np.float64)
    with np.errstate(over="ignore"):
        # A tiny temperature sends everything but the largest logits to minus infinity, which is its meaning.
        scaled = (values - _largest_logit(values)) / params.temperature
    count = params.top_k if 0 < params.top_k < len(scaled) else len(scaled)
    ids = _largest(scaled, count)
    weights = np.exp(scaled[ids])
    if params.top_p < 1.0:
        stay = _nucleus(weights, params.top_p)
        ids, weights = ids[stay], weights[stay]
    return ids, weights


def _largest_logit(logits: npt.NDArray[np.floating]) -> float:
    top = float(logits.max())
    if not math.isfinite(top):
        raise NonFiniteLogits("a row's best logit is not a finite number")
    return top


def _largest(values: Float64s, count: int) -> Ids:
    """Indices, ascending, of the ``count`` largest values; the lowest index stays of equal ones."""
    if count >= len(values):
        return np.arange(len(values), dtype=np.int64)
    bound = np.partition(values, len(values) - count)[len(values) - count]
    stay = values > bound
    ties = np.flatnonzero(values == bound)
    stay[ties[: count - int(np.count_nonzero(stay))]] = True
    return np.flatnonzero(stay)


def _nucleus(weights: Float64s, top_p: float) -> Ids:
    """Indices, ascending, of the shortest run of heaviest weights that holds ``top_p`` of their sum."""
    wanted = top_p * np.cumsum(weights)[-1]
    candidates = _largest(weights, _FIRST_CANDIDATES)
    size, order = _run_length(weights, candidates, wanted)
    if size > len(candidates) and len(candidates) < len(weights):
        size, order = _run_length(weights, np.arange(len(weights), dtype=np.int64), wanted)
    return np.sort(order[:size])


def _run_length(weights: Float64s, candidates: Ids, wanted: float) -> tuple[int, Ids]:
    """How many of the candidates, heaviest first, reach ``wanted``; one more than all of them if none does."""
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    return int(np.searchsorted(np.cumsum(weights[order]), wanted, side="left")) + 1, order
