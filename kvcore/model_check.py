"""Bounded exhaustive check: every state a tiny ledger can reach, each audited, every wrong command refused.

Breadth first from an empty ledger, so that a trace to a violation is as short as any. States are compared up to the
names of blocks, nodes and slots, with generations reduced to their order (see `model_state`). Commits are interrupted at
every write: of each distinct sequence of writes that a kind of command makes, in the first states where it occurs.
Invariant: single-threaded, without clock or randomness: two runs report the same figures.
Source: LEDGER "Two digests" (visited set), "Determinism"; contracts K048, K055, K066, K067, K209.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from .audit import AuditViolation, audit
from .commands import Command, Genesis
from .errors import LedgerRefusal
from .model_faults import Digests, WriteSites, interrupted, replayed, write_sites
from .model_moves import WORLD, Bounds, moves, probes
from .model_state import Arena, Snapshot, canonical_key

__all__ = [
    "DEEP",
    "FAULT_STATES",
    "TAILS",
    "WINDOW",
    "Bounds",
    "CheckReport",
    "Violation",
    "explore",
    "explore_all",
]

DEEP = Bounds(requests=1, longest=4, floors=0, prompts=((0, 0, 0, 0), (0, 0, 1)))
"""One request at a time over two index pages: edges are split, nodes have children."""

WINDOW = Bounds(requests=1, longest=4, floors=0, prompts=((0, 0, 0, 0), (0, 0, 1)), window=1)
"""The same where the single rows have a window of one row: blocks leave, are trimmed and come back."""

TAILS = Bounds(
    requests=1,
    longest=4,
    floors=0,
    blocks=4,
    page=2,
    prompts=((0, 0, 0, 0), (0, 0, 0), (0, 0, 1)),
    tails=True,
)
"""One cache group whose partial blocks are published as tails, and hit by requests that ask for them."""

FAULT_STATES = 32
"""States in which each distinct sequence of writes is interrupted."""

EXPECTED_MOVES = frozenset(
    [
        "Admit",
        "Dispatch",
        "Complete",
        "Publish",
        "PublishTail",
        "Release",
        "Fork",
        "Truncate",
        "Evict",
        "Reset",
        "Abort",
        "AdvanceGeneration",
    ]
)
EXPECTED_REFUSALS = frozenset(
    {
        "append_out_of_order",
        "double_release",
        "duplicate_transaction_id",
        "edge_partially_evicted",
        "evict_live_block",
        "fork_of_unpublished_state",
        "internal_node_evicted",
        "locked_leaf_evicted",
        "malformed_command",
        "namespace_generation_mismatch",
        "out_of_memory",
        "outside_request_context",
        "request_in_flight",
        "reset_with_live_references",
        "root_evicted",
        "stale_namespace_generation",
        "stale_request_generation",
        "stale_tree_version",
        "stale_block_generation",
        "step_out_of_order",
        "tails_need_one_full_group",
        "truncate_beyond_length",
        "unknown_transaction",
        "window_state_missing",
    }
)


class Violation(msgspec.Struct, frozen=True):
    """What is wrong, and the shortest way there."""

    what: str
    trace: tuple[Command, ...]


class CheckReport(msgspec.Struct, frozen=True):
    """`complete`: the whole state space within the bounds was seen.

    Of each of `write_paths` sequences of writes, `fault_states` states were interrupted; `faults` counts interrupted
    commits by the loop whose write failed.
    """

    bounds: tuple[Bounds, ...]
    states: int
    transitions: int
    depth: int
    complete: bool
    moves: dict[str, int]
    refusals: dict[str, int]
    faults: dict[str, int]
    write_paths: int
    fault_states: int
    violations: tuple[Violation, ...]

    def document(self) -> dict[str, Any]:
        """Checks as `--json` prints them."""
        missing_moves = sorted(EXPECTED_MOVES - set(self.moves))
        missing = sorted(EXPECTED_REFUSALS - set(self.refusals))
        checks = [
            ("state_space_complete", self.complete, self.states, f"depth {self.depth}"),
            ("no_violation", not self.violations, len(self.violations), self._first_violation()),
            ("every_transition_occurs", not missing_moves, len(self.moves), ", ".join(missing_moves)),
            ("every_refusal_occurs", not missing, len(self.refusals), ", ".join(missing)),
        ]
        spared = sorted(set(write_sites()) - set(self.faults))
        total = sum(self.faults.values())
        checks.append(("every_write_site_is_interrupted", not spared, total, ", ".join(spared)))
        listed = [{"name": n, "ok": ok, "value": value, "detail": detail} for n, ok, value, detail in checks]
        figures = {"states": self.states, "transitions": self.transitions, "depth": self.depth}
        counts = {"moves": self.moves, "refusals": self.refusals}
        sampled = {"states_each": self.fault_states, "write_paths": self.write_paths}
        faults = {"injected": total, "sites": self.faults, **sampled}
        bounds = msgspec.to_builtins(self.bounds)
        return {
            "ok": all(check[1] for check in checks),
            "checks": listed,
            **figures,
            **counts,
            "faults": faults,
            "bounds": bounds,
        }

    def text(self) -> str:
        """Figures, one a line."""
        lines = [f"{self.states} states, {self.transitions} transitions, depth {self.depth}"]
        lines += [f"  {name} {count}" for name, count in sorted(self.moves.items())]
        lines += [f"  refused {name} {count}" for name, count in sorted(self.refusals.items())]
        lines += [f"  interrupted at {name} {count}" for name, count in sorted(self.faults.items())]
        lines.append(
            f"{sum(self.faults.values())} commits interrupted: every write of {self.write_paths} sequences of writes, "
            f"each in the first {self.fault_states} states where it occurs"
        )
        lines.append(self._first_violation() or "no violation")
        return "\n".join(lines)

    def _first_violation(self) -> str:
        if not self.violations:
            return ""
        first = self.violations[0]
        return "\n  ".join([first.what, *[repr(command) for command in first.trace]])


class _Search:
    """Visited states with the move that first led to each."""

    def __init__(self, bounds: Bounds, fault_states: int) -> None:
        self.bounds = bounds
        self.fault_states = fault_states
        self.genesis = Genesis(WORLD, bounds.groups(), bounds.requests, bounds.longest, "model")
        self.arena = Arena(self.genesis)
        self.known: set[int] = set()
        self.came: list[tuple[int, Command]] = []
        self.moves: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.transitions = 0
        self.writes = WriteSites()
        self.write_paths: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.faults: Counter[str] = Counter()

    def trace(self, at: int, *last: Command) -> tuple[Command, ...]:
        """Commands from the empty ledger to a state, and those after it."""
        back: list[Command] = []
        while at:
            at, command = self.came[at]
            back.append(command)
        return (self.genesis, *back[::-1], *last)

    def visit(self, before: int, command: Command, layer: list[tuple[int, Snapshot]]) -> str:
        """Keeps the arena's state if it is new; what is wrong with it."""
        key = hash(canonical_key(self.arena.state))
        if key in self.known:
            return ""
        self.known.add(key)
        self.came.append((before, command))
        layer.append((len(self.came) - 1, self.arena.take()))
        try:
            audit(self.arena.ledger)
        except AuditViolation as violation:
            return str(violation)
        return ""


def explore(bounds: Bounds, most_states: int = 1_000_000, fault_states: int = FAULT_STATES) -> CheckReport:
    """Visits every state within the bounds, or stops at the first violation or after `most_states`."""
    search = _Search(bounds, fault_states)
    with search.writes:
        return _explore(search, most_states)


def _explore(search: _Search, most_states: int) -> CheckReport:
    layer: list[tuple[int, Snapshot]] = []
    wrong: Violation | None = None
    found = search.visit(0, search.genesis, layer)
    if found:
        wrong = Violation(found, search.trace(0))
    depth = 0
    while layer and wrong is None and len(search.came) < most_states:
        deeper: list[tuple[int, Snapshot]] = []
        for at, snapshot in layer:
            wrong = _expand(search, at, snapshot, deeper)
            if wrong is not None:
                break
        layer = deeper
        depth += bool(deeper)
    return CheckReport(
        bounds=(search.bounds,),
        states=len(search.came),
        transitions=search.transitions,
        depth=depth,
        complete=not layer and wrong is None,
        moves=dict(search.moves),
        refusals=dict(search.refusals),
        faults=dict(search.faults),
        write_paths=len(search.write_paths),
        fault_states=search.fault_states,
        violations=() if wrong is None else (wrong,),
    )


def explore_all(spaces: tuple[Bounds, ...]) -> CheckReport:
    """Visits several spaces; figures are sums, depth is the greatest."""
    reports = [explore(bounds) for bounds in spaces]
    moves: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for report in reports:
        moves.update(report.moves)
        refusals.update(report.refusals)
        faults.update(report.faults)
    return CheckReport(
        bounds=spaces,
        states=sum(report.states for report in reports),
        transitions=sum(report.transitions for report in reports),
        depth=max(report.depth for report in reports),
        complete=all(report.complete for report in reports),
        moves=dict(moves),
        refusals=dict(refusals),
        faults=dict(faults),
        write_paths=sum(report.write_paths for report in reports),
        fault_states=min(report.fault_states for report in reports),
        violations=tuple([found for report in reports for found in report.violations]),
    )


def _expand(
    search: _Search, at: int, snapshot: Snapshot, deeper: list[tuple[int, Snapshot]]
) -> Violation | None:
    """Tries every probe and every move from one state; the first violation."""
    arena = search.arena
    arena.restore(snapshot)
    for command, refusals in list(probes(arena.ledger)):
        wrong = _probe(search, command, refusals)
        if wrong:
            return Violation(wrong, search.trace(at, command))
    for command in list(moves(arena.ledger, search.bounds)):
        search.transitions += 1
        before = arena.ledger.committed_digest, arena.ledger.machine_digest
        search.writes.begin()
        try:
            arena.ledger.apply(command)
        except LedgerRefusal as refusal:
            search.refusals[refusal.reason] += 1
            if arena.state.sums.digests() != before:
                return Violation("a refusal changed the state", search.trace(at, command))
            continue
        except Exception as error:  # noqa: BLE001 - any other failure of a commit is what is looked for
            return Violation(f"{type(error).__name__}: {error}", search.trace(at, command))
        search.moves[type(command).__name__] += 1
        sites = tuple(search.writes.calls)
        after = arena.ledger.committed_digest, arena.ledger.machine_digest
        wrong = search.visit(at, command, deeper)
        arena.restore(snapshot)
        wrong = wrong or _interrupt(search, at, snapshot, command, sites, (before, after))
        if wrong:
            return Violation(wrong, search.trace(at, command))
    return None


def _interrupt(
    search: _Search,
    at: int,
    snapshot: Snapshot,
    command: Command,
    sites: tuple[str, ...],
    digests: tuple[Digests, Digests],
) -> str:
    """Fails each write of a command in turn, if few states had these writes so far; what is wrong afterwards."""
    path = type(command).__name__, sites
    if search.write_paths[path] == search.fault_states:
        return ""
    search.write_paths[path] += 1
    for number, site in enumerate(sites):
        search.faults[site] += 1
        wrong = interrupted(search.arena.ledger, command, search.writes, number)
        search.arena.restore(snapshot)
        if wrong:
            return wrong
    return replayed(search.trace(at), command, *digests)


def _probe(search: _Search, command: Command, refusals: tuple[type[LedgerRefusal], ...]) -> str:
    ledger = search.arena.ledger
    before = ledger.committed_digest, ledger.machine_digest
    try:
        ledger.apply(command)
    except refusals as refusal:
        search.refusals[refusal.reason] += 1
        if search.arena.state.sums.digests() != before:
            return "a refusal changed the state"
        return ""
    except LedgerRefusal as refusal:
        return f"refused as {refusal.reason}, expected {[kind.reason for kind in refusals]}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no refusal
        return f"accepted until {type(error).__name__}, expected {[kind.reason for kind in refusals]}"
    return f"accepted, expected {[kind.reason for kind in refusals]}"
