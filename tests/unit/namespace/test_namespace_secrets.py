"""Secret files: made once, private, refused by name when exposed; keys derived from them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from copyhold.namespace.errors import (
    PublicKeyRefused,
    SecretFileDamaged,
    SecretFileExposed,
    SecretsIncomplete,
)
from copyhold.namespace.keys import credential_digest, new_credential, parse_credential, spell_credential
from copyhold.namespace.secrets import Secrets, derive_key
from copyhold.namespace.signing import read_public_key

SECRET_FILES = ("root.key", "pepper-1.key", "grant-signing.key", "certificate-signing.key", "store-mac.key")


def test_secrets_are_created_private_and_read_again(tmp_path: Path) -> None:
    first = Secrets.load_or_create(tmp_path / "secrets")
    again = Secrets.load_or_create(tmp_path / "secrets")
    for name in SECRET_FILES:
        assert stat.S_IMODE((tmp_path / "secrets" / name).stat().st_mode) == 0o600
    assert first.grant_public_key == again.grant_public_key
    assert first.store_mac_key == again.store_mac_key
    assert first.namespace_secret("c", "e", "n", 1) == again.namespace_secret("c", "e", "n", 1)


@pytest.mark.parametrize("name", SECRET_FILES)
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_open_to_others_is_refused_by_name(tmp_path: Path, name: str, mode: int) -> None:
    Secrets.load_or_create(tmp_path)
    (tmp_path / name).chmod(mode)
    with pytest.raises(SecretFileExposed) as caught:
        Secrets.load_or_create(tmp_path)
    assert caught.value.path == str(tmp_path / name)
    assert name in str(caught.value)


def test_a_link_in_place_of_a_secret_is_refused(tmp_path: Path) -> None:
    Secrets.load_or_create(tmp_path / "real")
    Secrets.load_or_create(tmp_path / "linked")
    (tmp_path / "linked" / "root.key").unlink()
    (tmp_path / "linked" / "root.key").symlink_to(tmp_path / "real" / "root.key")
    with pytest.raises(SecretFileExposed):
        Secrets.load_or_create(tmp_path / "linked")


@pytest.mark.parametrize("content", [b"", b"short", bytes(33)])
def test_a_secret_of_the_wrong_length_is_refused(tmp_path: Path, content: bytes) -> None:
    Secrets.load_or_create(tmp_path)
    (tmp_path / "root.key").write_bytes(content)
    with pytest.raises(SecretFileDamaged):
        Secrets.load_or_create(tmp_path)


def test_a_missing_secret_is_never_made_anew_once_records_exist(tmp_path: Path) -> None:
    Secrets.load_or_create(tmp_path)
    (tmp_path / "root.key").unlink()
    with pytest.raises(SecretsIncomplete) as caught:
        Secrets.load_or_create(tmp_path)
    assert caught.value.path.endswith("root.key")
    assert not (tmp_path / "root.key").exists()


def test_a_creation_that_was_interrupted_is_completed(tmp_path: Path) -> None:
    Secrets.load_or_create(tmp_path)
    root = (tmp_path / "root.key").read_bytes()
    (tmp_path / "store-mac.key").unlink()
    (tmp_path / "certificate-signing.key").unlink()
    Secrets.load_or_create(tmp_path)
    assert (tmp_path / "root.key").read_bytes() == root


def test_public_keys_are_exported_and_read_back(tmp_path: Path) -> None:
    secrets = Secrets.load_or_create(tmp_path)
    assert read_public_key(tmp_path / "certificate.pub") == secrets.certificate_public_key
    assert read_public_key(tmp_path / "grant.pub") == secrets.grant_public_key
    (tmp_path / "grant.pub").write_text("not a key")
    with pytest.raises(PublicKeyRefused):
        read_public_key(tmp_path / "grant.pub")
    with pytest.raises(PublicKeyRefused):
        read_public_key(tmp_path / "absent.pub")


def test_the_namespace_secret_changes_with_every_input(tmp_path: Path) -> None:
    secrets = Secrets.load_or_create(tmp_path)
    base = ("cluster", "epoch", "name", 1)
    variants = [
        base,
        ("other", *base[1:]),
        ("cluster", "x", "name", 1),
        ("cluster", "epoch", "n", 1),
        (*base[:3], 2),
    ]
    derived = {secrets.namespace_secret(*variant) for variant in variants}
    assert len(derived) == len(variants)
    assert all(len(secret) == 32 for secret in derived)
    assert derive_key(bytes(32), "a") != derive_key(bytes(32), "b")


def test_secrets_do_not_show_themselves(tmp_path: Path) -> None:
    secrets = Secrets.load_or_create(tmp_path)
    assert repr(secrets) == "Secrets(...)"
    credential = new_credential(os.urandom)
    assert credential.secret.hex() not in repr(credential)


def test_a_pepper_can_be_rotated_and_old_digests_keep_theirs(tmp_path: Path) -> None:
    secrets = Secrets.load_or_create(tmp_path)
    credential = new_credential(os.urandom)
    old = credential_digest(secrets.pepper(1), credential)
    assert secrets.rotate_pepper(tmp_path) == 2
    again = Secrets.load_or_create(tmp_path)
    assert again.pepper_version == 2
    assert credential_digest(again.pepper(1), credential) == old
    assert credential_digest(again.pepper(2), credential) != old


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "0",
        lambda text: text.upper(),
        lambda text: text.replace("ch_", "sk_"),
        lambda text: text + "\n",
        lambda text: "ch_" + "9" * 100_000,
        lambda text: text.replace("_", "-"),
    ],
)
def test_a_malformed_credential_becomes_a_dummy(spoil: Callable[[str], str]) -> None:
    credential = new_credential(lambda num_bytes: bytes([0xAB]) * num_bytes)
    text = spell_credential(credential)
    assert parse_credential(text) == credential
    assert not parse_credential(spoil(text)).well_formed
