"""Owns what makes a row's bits independent of its step: products in checked row counts, sums over ranks in one order.

Everything else a rank computes is row by row already: norms, rotation, activation, and attention, whose chunks of tokens
begin at fixed positions and whose row sums have one order (`copyhold.kernels.cpu`). A matrix product is not: the library
may cut the inner axis differently for another number of rows. So row counts are *checked* when the weights are loaded, for
each shape of weight, on this machine: a count is used only if every row of it has the bits of a row of the largest count.
Rows of an unchecked count are padded to the next one. Invariant: no product runs in a count that was not checked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from .collective import Collective
from .errors import DeterminismUnavailable
from .linear import Linear

LAYER_ROWS = (*range(1, 65), *range(72, 257, 8))
"""Counts tried for a layer's products: every small one, then steps of 8, so that little is padded."""

HEAD_ROWS = (*range(1, 17), 24, 32, 48, 64)
"""Counts tried for the vocabulary's product, which only sees the last row of each request."""

Product = Callable[[torch.Tensor], torch.Tensor]


class FixedRowsLinear:
    """A `Linear` in checked row counts only; same bits for a row, whatever the others are and however many."""

    def __init__(self, linear: Product, sizes: Sequence[int]) -> None:
        self._linear = linear
        self.sizes = tuple(sizes)
        self._checked = frozenset(sizes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, in]` to a new `[rows, out]`, contiguous."""
        rows, largest = x.shape[0], self.sizes[-1]
        if rows in self._checked or rows == 0:
            return self._linear(x)
        parts = [self._padded(x[start : start + largest]) for start in range(0, rows, largest)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        size = self.sizes[bisect_left(self.sizes, rows)]
        if size == rows:
            return self._linear(x)
        wide = x.new_zeros((size, x.shape[1]))
        wide[:rows] = x
        return self._linear(wide)[:rows]


class LinearMaker:
    """Makes a shard's linears; in deterministic mode each shape of weight is checked once."""

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic
        self._sizes: dict[tuple[torch.Size, tuple[int, ...]], tuple[int, ...]] = {}

    def __call__(self, weight: torch.Tensor, rows: Sequence[int] = LAYER_ROWS) -> Linear | FixedRowsLinear:
        """The product with `weight`. Raises: `DeterminismUnavailable`."""
        if not self._deterministic:
            return Linear(weight)
        key = weight.shape, tuple(rows)
        if key not in self._sizes:
            self._sizes[key] = checked_row_counts(weight.shape[0], weight.shape[1], weight.dtype, rows)
        return FixedRowsLinear(Linear(weight), self._sizes[key])


def checked_row_counts(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    candidates: Sequence[int],
    make: Callable[[torch.Tensor], Product] = Linear,
) -> tuple[int, ...]:
    """The `candidates` whose rows all have the bits of the largest one's first row, for weights of this shape.

    The sums tried cancel: their exact value is zero, what comes out is rounding alone, so that another order of adding
    shows in most outputs, even after rounding to bfloat16.

    Raises: `DeterminismUnavailable` when rows of the largest count differ among themselves.
    """
    weight, row = _cancelling(out_features, in_features, dtype)
    linear = make(weight)

    def product(rows: int) -> torch.Tensor:
        return linear(row.expand(rows, -1).contiguous())

    whole = product(max(candidates))
    if not _equal_bits(whole, whole[:1]):
        raise DeterminismUnavailable(out_features, in_features, str(dtype).removeprefix("torch."))
    return tuple(rows for rows in sorted(candidates) if _equal_bits(product(rows), whole[:1]))


class RankOrderSum:
    """A collective whose sums are taken in rank order on every rank, from a gather: for carriers that promise none."""

    def __init__(self, carrier: Collective) -> None:
        self._carrier = carrier
        self.kind = carrier.kind
        self.rank = carrier.rank
        self.world_size = carrier.world_size

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place. Raises: `CollectiveError`."""
        first, *others = self._carrier.all_gather(tensor)
        total = first.clone()
        for part in others:
            total += part
        tensor.copy_(total)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order. Raises: `CollectiveError`."""
        return self._carrier.all_gather(tensor)


def in_rank_order(collective: Collective) -> Collective:
    """A collective of fixed order: gloo's ring adds in an order that depends on a value's place in the message.

    Two ranks add the same two numbers in either order; shared memory adds in rank order already.
    """
    if collective.kind == "gloo" and collective.world_size > 2:
        return RankOrderSum(collective)
    return collective


def _cancelling(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and one row `[1, in]` whose products cancel in pairs that lie anywhere on the inner axis."""
    generator = torch.Generator().manual_seed(in_features)
    half = in_features // 2
    places = torch.randperm(in_features, generator=generator)
    ones, others = places[:half], places[half : 2 * half]
    weight = torch.zeros(out_features, in_features, dtype=dtype)
    weight[:, ones] = torch.randn(out_features, half, generator=generator).to(dtype)
    weight[:, others] = -weight[:, ones]
    row = torch.zeros(1, in_features, dtype=dtype)
    row[:, ones] = torch.randn(1, half, generator=generator).to(dtype)
    row[:, others] = row[:, ones]
    return weight, row


def _equal_bits(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    kind = torch.int16 if rows.dtype == torch.bfloat16 else torch.int32
    return bool((rows.view(kind) == expected.view(kind)).all())
