"""Routing: the longest expected hit, then load, then name; entries die with their incarnation and generation."""

from __future__ import annotations

from copyhold.actors.routing import RoutingIndex

CHAIN = [b"d256", b"d512", b"d768"]
HELD = [(b"d256", 256), (b"d512", 512), (b"d768", 768)]


def index_of(*replicas: str) -> RoutingIndex:
    index = RoutingIndex(5.0)
    for name in replicas:
        index.attach(name, f"{name}.1")
    return index


def chosen(index: RoutingIndex, digests=CHAIN, namespace: str = "a", generation: int = 1) -> tuple[str, int]:
    receipt = index.route(namespace, generation, digests, 100.0)
    assert receipt is not None
    return receipt.replica, receipt.expected_hit_tokens


def hit(index: RoutingIndex, namespace: str = "a", generation: int = 1) -> int:
    """Expected tokens of the best replica, whichever it is."""
    return chosen(index, CHAIN, namespace, generation)[1]


def test_no_replica_no_route():
    assert index_of().route("a", 1, CHAIN, 0.0) is None


def test_the_longest_hit_wins_over_load_and_name():
    index = index_of("r0", "r1", "r2")
    index.publish("a", 1, "r1.1", HELD[:1])
    index.publish("a", 1, "r2.1", HELD[:2])
    index.report_load("r2.1", 50, 50)
    assert chosen(index) == ("r2", 512)
    assert chosen(index, CHAIN[:1]) == ("r1", 256), "a shorter prompt hits both alike: load decides"


def test_without_a_hit_the_least_load_then_the_name_decides():
    index = index_of("r2", "r1", "r0")

    def reported(r0: int, r1: int, r2: int) -> str:
        for name, load in (("r0", r0), ("r1", r1), ("r2", r2)):
            assert index.report_load(f"{name}.1", load - load // 2, load // 2)
        return chosen(index)[0]

    assert reported(0, 0, 0) == "r0"
    assert reported(1, 2, 0) == "r2"
    assert reported(3, 2, 3) == "r1"
    assert reported(4, 4, 4) == "r0"


def test_what_was_routed_counts_as_load_until_the_replica_reports():
    index = index_of("r1", "r0")
    assert [chosen(index)[0] for _ in range(4)] == ["r0", "r1", "r0", "r1"]
    index.report_load("r1.1", 0, 0)
    assert [chosen(index)[0] for _ in range(3)] == ["r1", "r1", "r0"]
    assert index.attached() == ["r0.1", "r1.1"]


def test_a_gap_in_the_chain_ends_the_hit_there():
    index = index_of("r0", "r1")
    index.publish("a", 1, "r1.1", [HELD[0], HELD[2]])
    assert chosen(index) == ("r1", 256)
    index.publish("a", 1, "r0.1", HELD[1:])
    assert chosen(index) == ("r1", 256)
    assert chosen(index, []) == ("r0", 0)


def test_another_namespace_or_generation_does_not_hit():
    index = index_of("r0", "r1")
    index.publish("a", 1, "r1.1", HELD)
    assert hit(index, namespace="b") == 0
    assert hit(index, generation=2) == 0
    assert hit(index) == 768


def test_a_new_incarnation_drops_what_the_old_one_published():
    index = index_of("r0", "r1")
    index.publish("a", 1, "r1.1", HELD)
    index.attach("r1", "r1.2")
    assert index.entries() == 0
    assert chosen(index) == ("r0", 0)
    index.publish("a", 1, "r1.1", HELD)
    assert not index.report_load("r1.1", 9, 9)
    assert index.entries() == 0, "reports of a dead incarnation are ignored"
    index.publish("a", 1, "r1.2", HELD[:1])
    receipt = index.route("a", 1, CHAIN, 100.0)
    assert receipt is not None
    assert (receipt.incarnation, receipt.expected_hit_tokens) == ("r1.2", 256)


def test_detaching_forgets_one_incarnation_and_an_unknown_one_changes_nothing():
    index = index_of("r0", "r1")
    index.publish("a", 1, "r0.1", HELD)
    index.publish("a", 1, "r1.1", HELD)
    version = index.version
    index.detach("r9.1")
    assert index.version == version
    index.detach("r0.1")
    assert index.entries() == 3
    assert chosen(index) == ("r1", 768)
    index.detach("r1.1")
    assert index.route("a", 1, CHAIN, 0.0) is None


def test_dropping_a_generation_forgets_the_older_ones_of_that_namespace_only():
    index = index_of("r0", "r1")
    index.publish("a", 1, "r0.1", HELD)
    index.publish("a", 2, "r1.1", HELD[:2])
    index.publish("a", 3, "r1.1", HELD[:1])
    index.publish("b", 1, "r1.1", HELD)
    assert index.drop("a", 3) == 5
    assert [hit(index, generation=generation) for generation in (1, 2, 3)] == [0, 0, 256]
    assert hit(index, "b") == 768
    assert index.drop("a", 3) == 0


def test_a_route_carries_its_version_and_expiry():
    index = index_of("r0")
    before = index.route("a", 1, CHAIN, 100.0)
    index.publish("a", 1, "r0.1", HELD)
    after = index.route("a", 1, CHAIN, 100.0)
    assert before is not None
    assert after is not None
    assert before.expires_at == after.expires_at == 105.0
    assert after.index_version > before.index_version
