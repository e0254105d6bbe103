"""Row counts are checked before they are used: planted products that depend on their step are found and avoided."""

from __future__ import annotations

import pytest
import torch

from copyhold.models.deterministic import (
    HEAD_ROWS,
    LAYER_ROWS,
    FixedRowsLinear,
    RankOrderSum,
    checked_row_counts,
    in_rank_order,
)
from copyhold.models.errors import DeterminismUnavailable
from copyhold.models.linear import Linear
from copyhold.models.thread_collective import ThreadMeeting

SHAPES = [(96, 64), (64, 1536), (576, 1408)]


class SplitBelow:
    """A product that adds the two halves of the inner axis apart when it has fewer rows than `rows`."""

    def __init__(self, weight: torch.Tensor, rows: int) -> None:
        self.weight, self.rows = weight, rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        if x.shape[0] >= self.rows:
            return whole_product(x, self.weight)
        return whole_product(x[:, :half], self.weight[:, :half]) + whole_product(
            x[:, half:], self.weight[:, half:]
        )


def whole_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One row after another in float32, rounded once: its bits cannot depend on the number of rows."""
    rows = [torch.mv(weight.float(), row.float()) for row in x]
    return torch.stack(rows).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_that_sum_in_another_order_are_not_used(dtype: torch.dtype) -> None:
    found = checked_row_counts(40, 96, dtype, (1, 2, 3, 4, 8, 16), lambda weight: SplitBelow(weight, 4))
    assert found == (4, 8, 16)


def test_a_product_whose_rows_differ_among_themselves_is_refused() -> None:
    def uneven(weight: torch.Tensor):
        def product(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([SplitBelow(weight, 9)(x[:1]), SplitBelow(weight, 1)(x[1:])])

        return product

    with pytest.raises(DeterminismUnavailable, match=r"\[40, 96\]"):
        checked_row_counts(40, 96, torch.float32, (1, 2, 8), uneven)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_count(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    linear = FixedRowsLinear(Linear(weight), checked_row_counts(*shape, dtype, LAYER_ROWS))
    x = torch.randn(300, shape[1], generator=torch.Generator().manual_seed(2)).to(dtype)
    whole = linear(x)
    for rows in (*range(1, 70), 79, 81, 255, 256, 257, 299):
        assert torch.equal(linear(x[300 - rows :].contiguous()), whole[300 - rows :]), rows
    assert linear(x[:0]).shape == (0, shape[0])


def test_rows_between_two_counts_are_padded_and_more_than_the_largest_are_cut() -> None:
    seen: list[int] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return x * 2

    linear = FixedRowsLinear(product, (2, 8))
    x = torch.arange(21.0).reshape(21, 1)
    assert torch.equal(linear(x), x * 2) and seen == [8, 8, 8]
    seen.clear()
    assert torch.equal(linear(x[:1]), x[:1] * 2) and seen == [2]


def test_the_head_is_tried_with_the_counts_of_decoding() -> None:
    assert set(range(1, 17)) <= set(HEAD_ROWS) and set(range(1, 65)) <= set(LAYER_ROWS)


def test_sums_over_gloo_are_taken_in_rank_order() -> None:
    class Gathers:
        kind, rank, world_size = "gloo", 1, 3

        def all_reduce(self, tensor: torch.Tensor) -> None:
            raise AssertionError("the carrier's own order is not used")

        def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
            return [torch.tensor([1e8]), tensor, torch.tensor([-1e8])]

    collective = in_rank_order(Gathers())
    assert isinstance(collective, RankOrderSum)
    value = torch.tensor([1.0])
    collective.all_reduce(value)
    assert value.item() == 0.0 and collective.all_gather(torch.tensor([2.0]))[1].item() == 2.0
    threads = ThreadMeeting(3).collective(0)
    assert in_rank_order(threads) is threads
