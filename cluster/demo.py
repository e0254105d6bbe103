"""The demonstration: one command starts everything, two tenants play, every claim is checked, everything is gone again.

Owns the run from start to exit code. The server it starts has state of its own inside its run folder, so that a demonstration
never meets the state of a server that serves.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from copyhold.models.tokenizer import ChatTokenizer

from .admin_client import AdminClient
from .cli_output import Output, Progress, progress_on_stderr
from .config import Config
from .demo_checks import (
    REUSE_RATIO_MOST,
    Check,
    Latency,
    Turn,
    check_explanations,
    check_isolation,
    check_latency,
    check_memory,
    check_pool,
    check_ranks,
    check_revocation,
    check_turns,
)
from .demo_content import ACME, BRAVO
from .demo_play import Player, measure_latency, play_explanations, play_isolation, play_revocation
from .demo_report import print_report
from .prepare import prepared_model
from .processes import summed_pss_mib
from .supervisor import Supervisor, leftovers

AUDIT_SAMPLES = 16
_LATENCY_ATTEMPTS_MOST = 2


class Observed(msgspec.Struct):
    """Everything the play yields before it is judged."""

    turns: list[Turn]
    latencies: list[Latency]
    isolation: dict[str, Any]
    explain: list[dict[str, Any]]
    revocation: dict[str, Any]
    agreement: dict[str, Any]
    workers: list[dict[str, Any]]
    findings: dict[str, list[str]]
    audit: list[dict[str, Any]]
    pool: dict[str, Any]
    memory: dict[str, Any]
    disk: dict[str, Any]


def run_demo(config: Config, json: bool) -> int:
    """Start, play, check, stop; 0 when every check holds, 1 when one does not."""
    started_s = time.monotonic()
    config = msgspec.structs.replace(config, port=0, state_dir="", admin_socket="")
    with progress_on_stderr() as say:
        with Supervisor(config, say) as server:
            observed = _play(server, say)
        say("stop", "looking for leftovers")
    left = leftovers(server)
    checks = [
        *judge(observed, config),
        Check("stop/leftovers", not left, left, "processes, sockets, folders, shared memory"),
    ]
    document = _document(observed, checks, round(time.monotonic() - started_s, 1))
    if json:
        Output(json=True).emit(document, "")
    else:
        print_report(Console(), document, observed.turns, checks)
    return 0 if document["ok"] else 1


def _play(server: Supervisor, say: Progress) -> Observed:
    block_size = server.config.block_size
    checkpoint = Path(prepared_model(server.run_dir).path)
    tokenizer = ChatTokenizer.load(checkpoint)
    with AdminClient(server.admin_socket) as admin:
        keys = {script.tenant: admin.create_tenant(script.tenant)["key"] for script in (ACME, BRAVO)}
        a, b = (Player(script, server.url, keys[script.tenant], tokenizer) for script in (ACME, BRAVO))
        for player in (a, b):
            player.converse(block_size, say)
        say("isolation", f"{b.name} sends {a.name}'s prompt")
        isolation = play_isolation(a, b, admin, block_size)
        say("explain", "one hit, one miss")
        explanations = play_explanations(a)
        latencies = [measure_latency(p, _LATENCY_ATTEMPTS_MOST, REUSE_RATIO_MOST, say) for p in (a, b)]
        memory = {"pss_mib": round(summed_pss_mib(server.pids()), 1), "processes": len(server.pids())}
        say("audit", "K/V rows against a cold recompute")
        audit = admin.audit_kv(b.name, AUDIT_SAMPLES)["ranks"]
        say("revocation", f"of {a.name}, while it streams")
        public_key = server.state_dir / "secrets" / "certificate.pub"
        revocation, _certificate = play_revocation(a, b, admin, block_size, public_key)
        ranks = admin.ranks()
        return Observed(
            turns=[*a.turns, *b.turns],
            latencies=latencies,
            isolation=isolation,
            explain=list(explanations),
            revocation=revocation,
            agreement=ranks["replicas"][0]["agreement"],
            workers=ranks["ranks"],
            findings=admin.audit_ledgers()["findings"],
            audit=audit,
            pool=admin.pool()["replicas"][0],
            memory=memory,
            disk={"model_cache_mib": round(_tree_bytes(checkpoint) / 2**20)},
        )


def judge(observed: Observed, config: Config) -> list[Check]:
    """One check per point and tenant."""
    return [
        *(
            check_turns(name, [t for t in observed.turns if t.tenant == name])
            for name in (ACME.tenant, BRAVO.tenant)
        ),
        *(check_latency(latency) for latency in observed.latencies),
        *check_isolation(observed.isolation),
        *check_explanations(observed.explain[0], observed.explain[1], config.block_size),
        *check_revocation(observed.revocation),
        *check_ranks(observed.agreement, observed.findings, observed.audit, config.tp),
        check_pool(observed.pool),
        check_memory(observed.memory["pss_mib"]),
    ]


def _document(observed: Observed, checks: list[Check], elapsed_s: float) -> dict[str, Any]:
    plain = msgspec.to_builtins(observed)
    return {
        "ok": all(check.ok for check in checks),
        "checks": msgspec.to_builtins(checks),
        "turns": plain["turns"],
        "first_token": plain["latencies"],
        "isolation": plain["isolation"],
        "explain": plain["explain"],
        "revocation": plain["revocation"],
        "ranks": {
            "agreement": plain["agreement"],
            "workers": plain["workers"],
            "ledger_findings": plain["findings"],
            "kv_audit": plain["audit"],
        },
        "pool": plain["pool"],
        "memory": plain["memory"],
        "disk": plain["disk"],
        "elapsed_s": elapsed_s,
    }


def _tree_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
