"""A restored store is accepted on the operator's word alone, and an exported trail shows every change made to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from copyhold.cluster.cli import run
from copyhold.cluster.config import Config
from copyhold.cluster.restore import authority_store
from copyhold.cluster.server_record import make_state_folder, state_lock
from copyhold.namespace.audit_trail import encode_head
from copyhold.namespace.authority import Authority
from copyhold.namespace.clock import SystemClock
from copyhold.namespace.errors import StoreBehindHighWater
from copyhold.namespace.journal import JournalFiles
from copyhold.namespace.secrets import Secrets
from copyhold.namespace.store import Store
from copyhold.namespace.store_target import StoreTarget


@pytest.fixture
def config(run_folders: Path, tmp_path: Path) -> Config:
    state = tmp_path / "state"
    make_state_folder(state)
    Secrets.load_or_create(state / "secrets")
    return Config(state_dir=str(state), run_dir=str(run_folders))


@pytest.fixture
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short, because unix socket names have 107 bytes."""
    import tempfile

    return Path(tempfile.mkdtemp(prefix="chs-", dir="/tmp"))


def _open(target: StoreTarget, state: Path) -> Authority:
    secrets = Secrets.load_or_create(state / "secrets")
    files = JournalFiles(audit_head=state / "audit-head.json", high_water=state / "high-water.json")
    store = Store.connect(target, secrets.store_mac_key)
    return Authority.open(store, secrets, SystemClock(), files, lease_s=10.0)


def _with_tenant(config: Config, name: str) -> str:
    """A new tenant's key id, made by an authority that ends again."""
    state = Path(config.state_dir)
    with authority_store(config, state, lambda *_: None) as target:
        authority = _open(target, state)
        authority.create_tenant(name)
        authority.create_key(name)
        authority.close()
    return name


def _arguments(config: Config) -> list[str]:
    return ["--state-dir", config.state_dir, "--run-dir", config.run_dir]


def test_a_restored_backup_is_refused_until_the_operator_accepts_it(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = Path(config.state_dir)
    _with_tenant(config, "acme")
    shutil.copytree(state / "authority", tmp_path / "backup")
    _with_tenant(config, "bravo")
    shutil.rmtree(state / "authority")
    shutil.copytree(tmp_path / "backup", state / "authority")
    with authority_store(config, state, lambda *_: None) as target, pytest.raises(StoreBehindHighWater):
        _open(target, state)

    assert run(["store", "confirm-restore", *_arguments(config)]) == 2, "without --yes nothing happens"
    with state_lock(state):
        assert run(["store", "confirm-restore", "--yes", *_arguments(config)]) == 1, "a server runs"
    capsys.readouterr()
    assert run(["store", "confirm-restore", "--yes", "--json", *_arguments(config)]) == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["generations_added"] >= 1 and len(receipt["suspended_keys"]) == 1

    with authority_store(config, state, lambda *_: None) as target:
        authority = _open(target, state)
        assert [tenant.name for tenant in authority.list_tenants()] == ["acme"]
        assert "restore_confirmed" in [record.action for record in authority.audit_records()]
        authority.close()
    assert list(Path(config.run_dir).iterdir()) == []


def test_a_state_folder_without_secrets_is_refused(tmp_path: Path) -> None:
    assert run(["store", "confirm-restore", "--yes", "--state-dir", str(tmp_path / "none")]) == 2


def test_an_exported_trail_shows_an_edit_a_cut_and_a_rewrite(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = Path(config.state_dir)
    with authority_store(config, state, lambda *_: None) as target:
        authority = _open(target, state)
        authority.create_tenant("acme")
        early = encode_head(authority.journal.write_head())
        authority.create_tenant("bravo")
        head = encode_head(authority.journal.write_head())
        records = [msgspec.json.encode(record) for record in authority.audit_records()]
        authority.close()
    files = {"early": early, "head": head}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    trail, key = tmp_path / "trail", state / "secrets" / "certificate.pub"

    def verify(lines: list[bytes], against: str) -> tuple[int, dict[str, object]]:
        trail.write_bytes(b"\n".join(lines))
        arguments = ["--head", str(tmp_path / against), "--public-key", str(key), "--json"]
        capsys.readouterr()
        code = run(["audit-trail", "verify", str(trail), *arguments])
        return code, json.loads(capsys.readouterr().out)

    assert verify(records, "head") == (0, {"ok": True, "records": len(records), "head": len(records)})
    assert verify(records, "early")[0] == 0, "a head of earlier is contained"
    assert verify(records[:-1], "head") == (
        1,
        {
            "ok": False,
            "sequence": len(records),
            "detail": f"the trail ends here, the signed head knows {len(records)} records",
        },
    )
    at = next(index for index, record in enumerate(records) if b'"acme"' in record)
    edited = [*records[:at], records[at].replace(b'"acme"', b'"acmf"'), *records[at + 1 :]]
    assert verify(edited, "head")[1]["sequence"] == at + 1
    unreadable = [*records[:1], b"{", *records[2:]]
    assert verify(unreadable, "head")[1]["sequence"] == 2
    (tmp_path / "forged").write_bytes(head.replace(b'"sequence":', b'"sequence":1', 1))
    assert verify(records, "forged")[0] == 1
