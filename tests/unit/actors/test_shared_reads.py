"""A replica that reads shared prefixes once gives the tokens of one that does not, and counts what it shared."""

from __future__ import annotations

import pytest
from local_replica import BLOCK, LocalReplica, Stream, run_of

from copyhold.actors.shared_reads import SAMPLE_EVERY

SYSTEM = run_of(1, 4 * BLOCK)
"""What all prompts begin with: four whole blocks."""


def _turns(served: LocalReplica, count: int, max_new: int = 10) -> list[Stream]:
    """`count` requests at once over a system prompt that is cached already; every second pair shares more."""
    served.serve([*SYSTEM, 7], max_new=1)
    prompts = [[*SYSTEM, *run_of(300 + 40 * (n // 2), BLOCK), 5 + n] for n in range(count)]
    streams = [served.submit(prompt, max_new=max_new) for prompt in prompts]
    served.run()
    for stream in streams:
        assert stream.admitted.cached_tokens >= len(SYSTEM)
    return streams


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", ["hydragen", "chunk"])
def test_shared_reads_change_no_token(replica, ranks, mode):
    plain, shared = (
        replica(ranks, num_blocks=64, shared_prefix="off"),
        replica(ranks, num_blocks=64, shared_prefix=mode),
    )
    expected = [stream.tokens for stream in _turns(plain, 6)]
    assert [stream.tokens for stream in _turns(shared, 6)] == expected
    for rank in shared.ranks:
        report = rank.shared_reads.report()
        assert report.steps[mode] >= 9 and report.samples >= 1, report
        assert report.logical_rows - report.physical_rows >= 5 * len(SYSTEM) * report.steps[mode]
        assert report.max_abs_difference < 1e-4
        assert report.measured_gain > 0
    for rank in plain.ranks:
        report = rank.shared_reads.report()
        assert (report.steps["hydragen"], report.steps["chunk"], report.logical_rows) == (0, 0, 0)
    shared.check_quiet()
    assert shared.worst_audit() <= 1e-3


def test_every_rank_makes_the_same_choices(replica):
    served = replica(2, num_blocks=64, shared_prefix="chunk")
    _turns(served, 8)
    first, second = (rank.shared_reads.report() for rank in served.ranks)
    assert first.steps == second.steps and sum(first.steps.values()) > 10


def test_a_small_shared_prefix_is_left_to_plain_reads(replica):
    served = replica(num_blocks=64)
    served.serve([*SYSTEM[:BLOCK], 7], max_new=1)
    for tail in (8, 9):
        served.submit([*SYSTEM[:BLOCK], tail], max_new=6)
    served.run()
    report = served.ranks[0].shared_reads.report()
    assert report.steps["hydragen"] == report.steps["chunk"] == 0 and report.steps["plain"] >= 6


def test_namespaces_do_not_share_reads_of_the_same_prompt(replica):
    served = replica(num_blocks=64, shared_prefix="chunk")
    for namespace in ("a", "b"):
        served.serve([*SYSTEM, 7], namespace, max_new=1)
    for namespace in ("a", "b"):
        served.submit([*SYSTEM, 8], namespace, max_new=6)
    served.run()
    assert served.ranks[0].shared_reads.report().steps["chunk"] == 0


def test_levels_that_do_not_divide_are_refused_by_name_and_read_plainly(replica):
    served = replica(num_blocks=64, shared_prefix="hydragen")
    served.serve([*SYSTEM, 7], max_new=1)
    deeper = run_of(300, BLOCK)
    for prompt in ([*SYSTEM, *deeper, 7], [*SYSTEM, *deeper, 8], [*SYSTEM, 9]):
        served.serve(prompt, max_new=1)
    for prompt in ([*SYSTEM, *deeper, 7], [*SYSTEM, *deeper, 8], [*SYSTEM, 9]):
        served.submit(prompt, max_new=6)
    served.run()
    report = served.ranks[0].shared_reads.report()
    assert report.refused["hydragen:group_size_not_divisible"] >= 5
    assert report.steps["hydragen"] == 0


def test_the_gain_is_measured_now_and_then(replica):
    served = replica(num_blocks=64, shared_prefix="chunk")
    _turns(served, 2, max_new=SAMPLE_EVERY + 10)
    report = served.ranks[0].shared_reads.report()
    assert report.samples == 1 + (report.steps["chunk"] - 1) // SAMPLE_EVERY == 2
