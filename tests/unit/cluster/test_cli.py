"""The command line: exit codes, one-line errors, one JSON document, and no heavy import."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from copyhold.cluster import cli, cli_options, cli_output
from copyhold.cluster.config import FIELDS
from copyhold.namespace.certificate import Certificate, issue_certificate
from copyhold.namespace.signing import public_bytes

FAKE_DRIVER = Path(__file__).with_name("fake_driver.py")

RUN_WITH_FAKE_DRIVER = """
import sys
from copyhold.cluster import cli, supervisor
supervisor.DRIVER_COMMAND = (sys.executable, sys.argv[1], sys.argv[2])
sys.exit(cli.run(sys.argv[3:]))
"""


def command(arguments: list[str], behaviour: str = "serve") -> list[str]:
    return [sys.executable, "-c", RUN_WITH_FAKE_DRIVER, str(FAKE_DRIVER), behaviour, *arguments]


@pytest.fixture
def server_options() -> Iterator[list[str]]:
    """Options of a server whose folders are short and empty again at the end."""
    base = Path("/tmp") / f"chcli-{os.getpid()}"
    base.mkdir(mode=0o700)
    folders = {"--run-dir": base / "run", "--state-dir": base / "state", "--cache-dir": base / "cache"}
    folders["--run-dir"].mkdir()
    options = [text for option, folder in folders.items() for text in (option, str(folder))]
    yield [*options, "--port", "0", "--stop-grace-s", "0.2"]
    left = list(folders["--run-dir"].iterdir())
    subprocess.run(["rm", "-rf", str(base)], check=True)
    assert left == []


@pytest.fixture
def state_options(server_options: list[str]) -> list[str]:
    return server_options[2:4]


def one_line(text: str, type_name: str) -> str:
    """The message of the only error line."""
    matched = re.fullmatch(rf"copyhold: {re.escape(type_name)}: (.+)\n", text)
    assert matched is not None, text
    return matched.group(1)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == "copyhold 0.1.0\n"
    assert cli.run(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in shown, name


def test_the_command_line_imports_neither_ray_nor_torch_nor_numba() -> None:
    code = (
        "import sys; from copyhold.cluster import cli; cli.run(['--help']); cli.run(['demo', '--help']); "
        "heavy = sorted({'ray', 'torch', 'numba', 'transformers', 'redis', 'httpx'} & set(sys.modules)); "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


@pytest.mark.parametrize(
    ("arguments", "type_name", "says"),
    [
        (["bogus"], "usage", "No such command 'bogus'"),
        (["serve", "--foo"], "usage", "No such option"),
        (["serve", "--tp"], "usage", "requires an argument"),
        (["serve", "--tp", "two"], "usage", "'--tp'"),
        (["serve", "--tp", "9"], "config", "tp = 9 is out of range: 1 to 8 ranks"),
        (["demo", "--pool-tokens", "100"], "config", "pool_tokens = 100"),
        (["serve", "--config", "/nonexistent.toml"], "config", "/nonexistent.toml"),
        (["status", "--config", "/nonexistent.toml"], "config", "/nonexistent.toml"),
        (["explain", "rcpt", "--key-file", "/nonexistent"], "usage", "/nonexistent"),
        (["certificate", "verify", "/nonexistent", "--public-key", "/nonexistent"], "usage", "/nonexistent"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_wrong_call_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], type_name: str, says: str, as_json: bool
) -> None:
    options = [i for i, argument in enumerate(arguments) if argument.startswith("--")]
    at = min(options, default=len(arguments))
    assert cli.run([*arguments[:at], *(["--json"] if as_json else []), *arguments[at:]]) == 2
    shown = capsys.readouterr()
    message = one_line(shown.err, type_name)
    assert says in message
    if as_json:
        assert json.loads(shown.out) == {"ok": False, "error": {"type": type_name, "message": message}}
    else:
        assert shown.out == ""


def test_an_unforeseen_error_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise ZeroDivisionError("first\nsecond")

    monkeypatch.setattr(cli_options, "state_folder", broken)
    assert cli.run(["status"]) == 1
    assert one_line(capsys.readouterr().err, "internal (ZeroDivisionError)") == "first second"


@pytest.mark.parametrize("arguments", [["stop"], ["status"], ["tenants", "list"], ["tenants", "create", "x"]])
def test_without_a_server_the_commands_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    assert cli.run([*arguments, "--state-dir", str(tmp_path)]) == 1
    assert "no server runs from" in one_line(capsys.readouterr().err, "not_running")


def test_a_socket_nobody_answers_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.run(["status", "--admin-socket", str(tmp_path / "none")]) == 1
    assert "no server answers" in one_line(capsys.readouterr().err, "admin_unavailable")


def test_serve_status_tenants_and_stop_work_together(
    capsys: pytest.CaptureFixture[str], server_options: list[str], state_options: list[str]
) -> None:
    with subprocess.Popen(command(["serve", *server_options]), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(4)]
        assert lines[0].startswith("serving http://127.0.0.1:1/v1 ")
        assert lines[1:3] == ["key of acme: ch_acme_secret\n", "key of bravo: ch_bravo_secret\n"]
        assert "copyhold stop" in lines[3]

        assert cli.run(["status", "--json", *state_options]) == 0
        replicas = [{"running": 0, "block_bytes": [8192, 4096]}]
        answer = {"ok": True, "ready": True, "pool": {"free": 3}, "replicas": replicas}
        assert json.loads(capsys.readouterr().out) == answer
        assert cli.run(["status", *state_options]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "ready: True",
            "pool.free: 3",
            "replicas.0.running: 0",
            "replicas.0.block_bytes: [8192, 4096]",
        ]
        assert (
            cli.run(["tenants", "create", "cyan", "--namespace", "a", "--namespace", "b", *state_options])
            == 0
        )
        assert capsys.readouterr().out == "tenant cyan, namespaces a, b\nkey ch_cyan_secret\n"
        assert cli.run(["tenants", "create", "cyan", *state_options]) == 1
        assert one_line(capsys.readouterr().err, "name_taken") == "tenant 'cyan' exists"
        assert cli.run(["tenants", "list", *state_options]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "cyan    a, b"
        assert cli.run(["tenants", "key", "cyan", "--json", *state_options]) == 0
        assert json.loads(capsys.readouterr().out) == {"ok": True, "tenant": "cyan", "key": "ch_3_again"}
        assert cli.run(["certificate", "public-key", *state_options]) == 1
        assert one_line(capsys.readouterr().err, "not_found") == "no such thing"

        second = subprocess.run(
            command(["serve", *server_options]), capture_output=True, text=True, check=False
        )
        assert second.returncode == 1 and second.stdout == ""
        assert f"process {server.pid} already serves" in second.stderr.splitlines()[-1]

        assert cli.run(["stop", "--json", *state_options]) == 0
        assert json.loads(capsys.readouterr().out) == {"ok": True, "pid": server.pid}
        assert server.wait(10) == 0


def heed_interrupts() -> None:
    """As in a terminal: a suite that runs in the background has SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_well_on_a_signal_and_prints_one_document(
    server_options: list[str], number: signal.Signals
) -> None:
    arguments = command(["serve", "--json", *server_options])
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        text = server.stdout.readline()
        while not text.endswith("\n}\n"):
            text += server.stdout.readline()
        server.send_signal(number)
        try:
            rest, progress = server.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            server.terminate()
            raise
    document = json.loads(text)
    assert rest == "" and server.returncode == 0
    assert document["ok"] and document["pid"] == server.pid
    assert [made["tenant"] for made in document["tenants"]] == ["acme", "bravo"]
    assert progress.splitlines() == [
        "stores: starting the authority store",
        "stores: starting the sessions store",
        "ray: starting",
        "gateway",
        "stopping",
    ]


@pytest.mark.parametrize(
    ("behaviour", "line"),
    [
        ("report_error", "copyhold: model_folder_incomplete: config.json is missing"),
        ("die_later", "copyhold: "),
    ],
)
def test_a_failed_server_is_one_line_and_exit_code_1(
    server_options: list[str], behaviour: str, line: str
) -> None:
    arguments = command(["serve", "--json", *server_options], behaviour)
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(line)
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["ok"] is False
    for name in Path("/dev/shm").glob(f"fake-driver*chcli-{os.getpid()}*"):
        pytest.fail(f"left {name}")


def certificate(outcome: str) -> Certificate:
    return Certificate(
        schema_version=1,
        cluster_id="c",
        store_epoch="e",
        namespace="acme",
        generation_from=1,
        generation_to=2,
        nonce="00",
        audit_sequence=1,
        audit_digest="00",
        term=1,
        requested_at=1.0,
        streams_closed_at=2.0,
        issued_at=3.0,
        outcome=outcome,  # pyright: ignore[reportArgumentType]
        members=(),
        outcomes=(),
        gateways=(),
        not_covered=(),
        residual="r",
    )


def test_a_certificate_is_verified_offline_and_a_flipped_byte_is_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = Ed25519PrivateKey.generate()
    document, public_key = tmp_path / "certificate.json", tmp_path / "key.txt"
    document.write_bytes(issue_certificate(key, certificate("complete")))
    public_key.write_text(public_bytes(key).hex() + "\n")
    verify = ["certificate", "verify", str(document), "--public-key", str(public_key)]
    assert cli.run(verify) == 0
    assert capsys.readouterr().out.endswith("verifies, complete\n")
    flipped = bytearray(document.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    document.write_bytes(bytes(flipped))
    assert cli.run([*verify, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and not all(check["ok"] for check in report["checks"])
    public_key.write_text("no key")
    assert cli.run(verify) == 2
    assert "key.txt" in one_line(capsys.readouterr().err, "usage")


def test_one_command_reports_once() -> None:
    output = cli_output.Output(json=True)
    output.emitted = True
    with pytest.raises(AssertionError, match="reports once"):
        output.emit({}, "")
