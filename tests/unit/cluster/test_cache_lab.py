"""The cache lab: the bounded-identity facts, the trace formats, and the reference hit rates of two published traces."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from copyhold.actors.cache_settings import LAB_POLICIES
from copyhold.cluster.cli import run
from copyhold.cluster.errors import UsageError
from copyhold.cluster.lab import play_identities, requests_at
from copyhold.cluster.lab_trace import (
    OPTIMUM,
    OPTIMUM_LEAF_FIRST,
    PrefixCache,
    Trace,
    policies_to_play,
    read_trace,
    replay,
)

FACTS = {
    fact["id"]: fact
    for fact in json.loads((Path(__file__).parents[2] / "data" / "fixtures.json").read_text())["fixtures"]
    if fact["id"] in ("F120", "F121", "F122", "F123")
}
TRACES = Path(__file__).resolve().parents[4] / "shared" / "data" / "mooncake"


def hits(capacity: int, stride: int, time_s: float, policy: str = "lru") -> int:
    return sum(step.hit for step in play_identities(capacity, stride, time_s, policy))


@pytest.mark.parametrize("fact", ["F120", "F121"])
@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_cliff_at_the_stride(fact, policy):
    inputs, expected = FACTS[fact]["inputs"], FACTS[fact]["expected"]
    assert hits(inputs["C"], inputs["s"], 0.0, policy) == expected["hits"]
    assert requests_at(0.0) - hits(inputs["C"], inputs["s"], 0.0, policy) == expected["misses"]


def test_below_the_cliff_another_policy_hits():
    assert hits(3, 4, 0.0, "mru") > 0


def test_requests_by_time():
    fact = FACTS["F122"]
    assert [requests_at(time_s) for time_s in fact["inputs"]["t"]] == fact["expected"]["N"]


def test_an_edit_keeps_the_time_and_plays_again_from_empty():
    fact = FACTS["F123"]
    for capacity in fact["inputs"]["C"]:
        found = [hits(capacity, fact["inputs"]["s"], time_s) for time_s in fact["inputs"]["t"]]
        assert found == fact["expected"][f"hits_C{capacity}"]


@pytest.mark.parametrize("name", ["conversation_trace", "synthetic_trace"])
@pytest.mark.parametrize("capacity", [1000, 5000, 20000])
def test_reference_rates_of_published_traces(name, capacity):
    file = TRACES / f"{name}.jsonl"
    if not file.exists():
        pytest.skip("the published traces are not here")
    expected = {
        ("conversation_trace", 1000): ("0.0434", "0.1779"),
        ("conversation_trace", 5000): ("0.1128", "0.3255"),
        ("conversation_trace", 20000): ("0.2797", "0.3456"),
        ("synthetic_trace", 1000): ("0.0194", "0.1488"),
        ("synthetic_trace", 5000): ("0.0858", "0.2964"),
        ("synthetic_trace", 20000): ("0.2887", "0.3293"),
    }[name, capacity]
    trace = read_trace(file, 16)
    lru, optimum = replay(trace, "lru", capacity), replay(trace, OPTIMUM, capacity)
    assert (f"{lru.hit_rate:.4f}", f"{optimum.hit_rate:.4f}") == expected
    assert replay(trace, OPTIMUM_LEAF_FIRST, capacity).hit_rate >= optimum.hit_rate - 1e-9
    assert f"{replay(trace, 'default', capacity).hit_rate:.4f}" >= expected[0]


def test_every_format_gives_the_same_paths(tmp_path):
    tokens = [list(range(8)), list(range(4)) + [9] * 5, list(range(8))]
    files = {
        "lists.jsonl": "\n".join(map(json.dumps, tokens)),
        "lists.csv": "\n".join(",".join(map(str, one)) for one in tokens),
        "hashes.jsonl": "\n".join(
            json.dumps({"timestamp": 0, "hash_ids": ids}) for ids in ([5, 7], [5, 8], [5, 7])
        ),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
        trace = read_trace(tmp_path / name, 4)
        assert trace == Trace(((0, 1), (0, 2), (0, 1)), 3), name
    (tmp_path / "ids.csv").write_text("a\nb\na\n")
    (tmp_path / "ids.jsonl").write_text('"a"\n"b"\n\n"a"\n')
    for name in ("ids.csv", "ids.jsonl"):
        assert read_trace(tmp_path / name, 4) == Trace(((0,), (1,), (0,)), 2)


@pytest.mark.parametrize("text", ["{", '{"hash_ids": 3}', '{"other": []}', "[1, true]", "1.5", ""])
def test_a_line_that_is_no_request_is_refused_with_its_number(tmp_path, text):
    file = tmp_path / "bad.jsonl"
    file.write_text(f"1\n{text}\n" if text else "")
    with pytest.raises(UsageError, match="line 2" if text else "no request"):
        read_trace(file, 4)


@pytest.mark.parametrize("policy", sorted(LAB_POLICIES))
def test_a_cache_never_holds_a_block_without_its_parent_nor_more_than_its_capacity(policy):
    paths = [tuple(range(10 * n, 10 * n + 4)) for n in range(5)]
    cache = PrefixCache(policy, 50, 9)
    for number in (0, 1, 2, 0, 3, 0, 4, 1, 0, 0, 2):
        cache.ask(paths[number])
        present = set(cache.present())
        assert len(present) <= 9
        for path in paths:
            held = [block in present for block in path]
            assert held == sorted(held, reverse=True)


def test_a_policy_that_forgets_follows_a_shift_and_one_that_counts_for_ever_does_not():
    """K195: the former hot prefixes lose their rank."""
    hot = [tuple(range(10 * n, 10 * n + 3)) for n in range(4)]
    new = [tuple(range(100 + 10 * n, 100 + 10 * n + 3)) for n in range(4)]
    trace = Trace((*(hot * 60), *(new * 60)), 150)
    counting = replay(trace, "lfu", 12)
    for fading in ("lru", "cost"):
        assert replay(trace, fading, 12).hit_blocks > counting.hit_blocks, fading


def test_rows_of_the_command(tmp_path, capsys):
    file = tmp_path / "t.jsonl"
    file.write_text("\n".join(json.dumps({"hash_ids": [0, n % 5, n % 3]}) for n in range(60)))
    plot = tmp_path / "p.svg"
    assert run(["lab", "--trace", str(file), "--capacity", "6", "--plot", str(plot), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in document["rows"]}
    assert {"default", "lru", "optimum", "lfu", "fifo", "slru", "cost", "mru", "filo"} <= set(rows)
    for row in rows.values():
        assert {"policy", "hit_rate", "capacity", "evictions", "seconds"} <= set(row)
        assert {"hit_blocks", "published_blocks", "evicted_unused_blocks"} <= set(row), "more than a hit rate"
        assert row["hit_rate"] <= rows["optimum-leaf-first"]["hit_rate"] + 1e-9
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert run(["lab", "--trace", str(file), "--capacity", "6", "--policy", "fifo", "--json"]) == 0
    found = [row["policy"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert found == policies_to_play("fifo")


def test_the_identity_lab_says_what_it_does_not_model(capsys):
    assert run(["lab", "--capacity", "4", "--stride", "4"]) == 0
    text = capsys.readouterr().out
    assert "12 hits and 4 misses in 16 requests" in text
    assert "models no token positions, block tables, addresses, pins" in text
    assert text.count("\n") == 16 + 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--capacity", "4"],
        ["--capacity", "0", "--stride", "4"],
        ["--capacity", "4", "--stride", "4", "--policy", "best"],
        ["--capacity", "4", "--trace", "absent.jsonl"],
        ["--capacity", "4", "--stride", "4", "--trace", "absent.jsonl"],
    ],
)
def test_a_wrong_call_is_exit_code_2(arguments):
    assert run(["lab", *arguments]) == 2


def test_the_examples_of_the_document_run(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[3] / "docs" / "prefix-reuse.md").read_text("utf-8")
    calls = re.findall(r"^\$ copyhold (lab .*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text("".join(json.dumps({"hash_ids": [0, n % 5]}) + "\n" for n in range(40)))
    Path("trace.csv").write_text("a\nb\na\n")
    for call in calls:
        assert run(shlex.split(call)) == 0, call
        assert capsys.readouterr().out
    assert len(calls) >= 6
    assert Path("rates.svg").exists()
