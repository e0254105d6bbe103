"""Processes that a benchmark asks: where peers are looked for, and that every end leaves its last line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from copyhold.cluster.bench_attention import _VLLM
from copyhold.cluster.bench_prefix_peers import _PEERS
from copyhold.cluster.bench_process import PEERS_VARIABLE, Peer, PeerNote, PeerProcess, run_child, run_peer
from copyhold.cluster.bench_vllm import _VLLM as LEDGER
from copyhold.cluster.bench_vllm_serve import VLLM
from copyhold.cluster.errors import BenchInvalid

LOUD = "import sys\nprint('x' * (1 << 18), file=sys.stderr)\n"
"""More than a pipe holds."""


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A peer whose environment is named by the variable; its script is still to write."""
    peer = Peer("a peer", "asked.py", tmp_path)
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path / "elsewhere"))
    for path in (peer.path, peer.python):
        path.parent.mkdir(parents=True)
    peer.python.symlink_to(sys.executable)
    return peer


def test_every_peer_is_looked_for_where_the_variable_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers = [_VLLM, LEDGER, VLLM, *_PEERS]
    monkeypatch.delenv(PEERS_VARIABLE, raising=False)
    assert {peer.python for peer in peers} == {VLLM.root / ".venv-peers" / "bin" / "python"}
    assert all(peer.path.exists() for peer in peers), "the scripts are the repository's"
    monkeypatch.setenv(PEERS_VARIABLE, str(tmp_path))
    assert {peer.python for peer in peers} == {tmp_path / "bin" / "python"}


def test_a_document_is_the_last_line_and_a_failure_a_note(peer: Peer) -> None:
    assert run_peer(peer) == peer.not_installed()
    peer.path.write_text("import sys\nprint('noise')\nprint('{\"asked\": \"' + sys.argv[1] + '\"}')\n")
    assert run_peer(peer, "this") == {"asked": "this"}
    peer.path.write_text(LOUD + "raise SystemExit('no such wheel')\n")
    assert run_peer(peer) == PeerNote("a peer was not measured: no such wheel")
    peer.path.write_text("raise SystemExit(7)\n")
    assert run_peer(peer) == PeerNote("a peer was not measured: exit code 7")


def test_a_process_answers_until_it_ends_however_much_it_complains(peer: Peer) -> None:
    peer.path.write_text(
        LOUD + "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    print('x' * (1 << 18), file=sys.stderr)\n"
        "    if line == 'end\\n':\n        sys.exit('as it was told')\n"
        "    print(line.upper(), end='', flush=True)\n"
    )
    with PeerProcess(peer) as process:
        assert [process.ask("one"), process.ask("two")] == ["ONE\n", "TWO\n"]
        for _ in range(2):
            with pytest.raises(BenchInvalid, match=r"^a peer ended: as it was told$"):
                process.ask("end")
    process.close()


def test_a_process_that_never_begins_tells_why(peer: Peer) -> None:
    peer.path.write_text("raise SystemExit('no such kernel')\n")
    with pytest.raises(BenchInvalid, match=r"^no such kernel$"):
        PeerProcess(peer)
    peer.python.unlink()
    peer.python.write_text("not a program")
    with pytest.raises(BenchInvalid, match="Permission denied"):
        PeerProcess(peer)
    assert isinstance(run_peer(peer), PeerNote)


def test_a_child_that_fails_is_not_valid_and_tells_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("print('found')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BenchInvalid, match=r"^memory failed: .*No module named planted$"):
        run_child("memory", "planted")
    with pytest.raises(BenchInvalid, match=r"^memory failed: it took longer than 0.01 s$"):
        run_child("memory", "planted", timeout_s=0.01)
    assert run_child("memory", "json.tool", "--help").strip()
