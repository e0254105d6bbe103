"""Start and stop of whole servers through the command line: what cannot start says why, what stops leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from live_cluster import SERVE, copyhold, default_interrupt, marked_processes, options, runs, tiny_config
from tiny_checkpoint import make_tiny_checkpoint

from copyhold.cluster.admin_client import AdminClient
from copyhold.cluster.supervisor import Supervisor, leftovers
from copyhold.namespace.certificate import parse_certificate


def refused(run_base: Path, *arguments: str) -> str:
    """A failing command's one line; nothing of it is left."""
    done = copyhold("serve", *arguments)
    assert done.returncode != 0
    lines = [line for line in done.stderr.strip().splitlines() if line.startswith("copyhold: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert runs(run_base) == []
    assert marked_processes(run_base) == []
    return lines[0]


def test_a_model_folder_that_lacks_a_file_is_refused_by_name(
    run_base: Path, tmp_path: Path, model_cache: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", seed=3)
    (folder / "tokenizer.json").unlink()
    line = refused(run_base, *options(run_base, folder, model_cache), "--state-dir", str(tmp_path / "state"))
    assert "tokenizer.json" in line


def test_more_ranks_than_kv_heads_are_refused_by_name(
    run_base: Path, tiny_model: Path, tmp_path: Path, model_cache: Path
) -> None:
    line = refused(
        run_base,
        *options(run_base, tiny_model, model_cache),
        *("--tp", "3", "--state-dir", str(tmp_path / "state")),
    )
    assert "too_many_ranks" in line and "3" in line and "2" in line


def test_a_port_in_use_is_refused_before_anything_starts(
    run_base: Path, tiny_model: Path, tmp_path: Path, model_cache: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(
            run_base,
            *options(run_base, tiny_model, model_cache)[:-1],
            *(port, "--state-dir", str(tmp_path / "state")),
        )
        assert port in line


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_two_keys_serves_and_leaves_nothing_when_stopped(
    run_base: Path, tiny_model: Path, tmp_path: Path, model_cache: Path, how: signal.Signals
) -> None:
    state = tmp_path / "state"
    command = [
        *SERVE,
        "serve",
        *options(run_base, tiny_model, model_cache),
        "--state-dir",
        str(state),
        "--json",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=default_interrupt
    ) as process:
        assert process.stdout is not None
        text = ""
        while "\n}\n" not in text:
            line = process.stdout.readline()
            assert line, process.communicate()
            text += line
        document = json.loads(text)
        keys = [made["key"] for made in document["tenants"]]
        assert len(keys) == 2
        model = httpx.get(
            document["url"] + "/v1/models", headers={"authorization": f"Bearer {keys[0]}"}
        ).json()
        assert len(model["data"]) == 1
        listed = copyhold("tenants", "list", "--state-dir", str(state), "--json")
        assert {t["tenant"] for t in json.loads(listed.stdout)["tenants"]} == {"acme", "bravo"}
        status = copyhold("status", "--state-dir", str(state), "--json")
        assert json.loads(status.stdout)["replicas"][0]["serving"]
        process.send_signal(how)
        process.communicate(timeout=60)
    assert runs(run_base) == []
    assert marked_processes(run_base) == []
    assert not [name for name in os.listdir("/dev/shm") if run_base.name in name]


def test_keys_and_generations_outlive_a_server(
    run_base: Path, tiny_model: Path, tmp_path: Path, model_cache: Path
) -> None:
    state = tmp_path / "state"
    arguments = [*options(run_base, tiny_model, model_cache), "--state-dir", str(state), "--json"]

    def serve_once(act: str) -> tuple[dict, str]:
        with subprocess.Popen(
            [*SERVE, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=default_interrupt,
        ) as process:
            assert process.stdout is not None
            text = ""
            while "\n}\n" not in text:
                line = process.stdout.readline()
                assert line, process.communicate()
                text += line
            answer = copyhold(*act.split(), "--state-dir", str(state), "--json")
            assert copyhold("stop", "--state-dir", str(state)).returncode == 0
            process.communicate(timeout=60)
            assert answer.returncode == 0, answer.stderr
            return json.loads(text), answer.stdout

    first, _certificate = serve_once("tenants revoke acme --deadline-s 0")
    second, status = serve_once("status")
    assert len(first["tenants"]) == 2 and not second["tenants"]
    assert json.loads(status)["namespaces"]["acme"]["generation"] == 2
    assert json.loads(status)["namespaces"]["bravo"]["generation"] == 1


def test_a_revocation_after_a_restart_counts_earlier_servers_as_ended(
    run_base: Path, tiny_model: Path, tmp_path: Path, model_cache: Path
) -> None:
    state = tmp_path / "state"
    config = tiny_config(tiny_model, model_cache, run_dir=str(run_base), state_dir=str(state), tp=1)
    with Supervisor(config) as first, AdminClient(first.admin_socket) as admin:
        admin.create_tenant("acme")
    with Supervisor(config) as second, AdminClient(second.admin_socket) as admin:
        certificate = parse_certificate(admin.revoke("acme", 0.0))
    assert certificate.outcome == "complete"
    assert sorted(entry.outcome for entry in certificate.outcomes) == ["confirmed", "ended"]
    assert leftovers(second) == []
