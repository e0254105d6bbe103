"""Case B18 on ranks: a prompt that is cached whole still computes its last token, and the next turn finds all of it."""

from __future__ import annotations

import pytest
from local_replica import BLOCK, run_of

LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK)
"""The case's lengths around its pages of 8, around the kernels' blocks."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_b18_a_whole_prompt_in_the_cache_is_capped_and_gives_the_cold_tokens(replica, cold, ranks):
    served = replica(ranks, num_blocks=64)
    second, third = [], []
    for length in LENGTHS:
        namespace, prompt = f"tenant-{length}", run_of(1, length)
        first = served.serve(prompt, namespace, max_new=1)
        again = served.serve(prompt, namespace, max_new=1)
        longer = served.serve([*prompt, *run_of(900, 9)], namespace, max_new=1)
        assert first.tokens == again.tokens == cold(prompt, 1)
        assert longer.tokens == cold([*prompt, *run_of(900, 9)], 1)
        second.append(again.admitted.cached_tokens)
        third.append(longer.admitted.cached_tokens)
        assert again.admitted.junction_tokens == length // BLOCK * BLOCK
        served.check_quiet()
    assert second == [(length - 1) // BLOCK * BLOCK for length in LENGTHS]
    assert third == [length // BLOCK * BLOCK for length in LENGTHS]
    assert all(hit < length for hit, length in zip(second, LENGTHS, strict=True))
