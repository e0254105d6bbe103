"""`config show` and `config check`: effective values with sources, and every bound of every key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from copyhold.cluster import cli
from copyhold.cluster.config import FIELDS, Config, FieldSpec, load_config
from copyhold.cluster.config_report import toml_value
from copyhold.cluster.errors import ConfigError

NUMBERS = [spec for spec in FIELDS.values() if spec.least is not None]
ROOMY: dict[str, Any] = {
    "pool_tokens": 1 << 20,
    "max_model_len": 32,
    "max_requests": 1,
    "step_budget_tokens": 1024,
}
"""Values under which each other key may stand at either of its bounds."""


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert cli.run(["config", "show", "--json", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]
    return {entry["key"]: entry for entry in document["settings"]}


def test_every_value_is_shown_with_unit_bounds_and_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("tp = 1\nport = 9000\naccept_shared_store = true\n")
    shown = show(capsys, "--config", str(file), "--port", "9001")
    assert list(shown) == list(FIELDS)
    assert {key: shown[key]["source"] for key in ("tp", "port", "host", "accept_shared_store")} == {
        "tp": "file",
        "port": "command line",
        "host": "default",
        "accept_shared_store": "file",
    }
    assert (shown["port"]["value"], shown["tp"]["value"], shown["accept_shared_store"]["value"]) == (
        9001,
        1,
        True,
    )
    for key, spec in FIELDS.items():
        entry = shown[key]
        assert (entry["unit"], entry["least"], entry["most"], entry["default"]) == (
            spec.unit,
            spec.least,
            spec.most,
            spec.default,
        )


def test_the_store_option_sets_both_and_gives_way_to_each(capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(capsys, "--store", "redis://h", "--accept-shared-store")
    assert shown["authority_store"]["value"] == shown["sessions_store"]["value"] == "redis://h"
    shown = show(capsys, "--store", "redis://h", "--sessions-store", "redis://other")
    assert (shown["authority_store"]["value"], shown["sessions_store"]["value"]) == (
        "redis://h",
        "redis://other",
    )


def test_the_text_is_a_table_of_what_a_file_would_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["config", "show", "--lease-s", "3"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["KEY", "VALUE", "UNIT", "BOUNDS", "SOURCE"]
    assert len(rows) == len(FIELDS)
    pairs = dict(row.split(maxsplit=2)[:2] for row in rows)
    assert pairs["lease_s"] == "3.0"
    file = tmp_path / "shown.toml"
    file.write_text("\n".join(f"{key} = {value}" for key, value in pairs.items()))
    assert load_config(file) == Config(lease_s=3.0)


def test_check_accepts_a_right_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text("tp = 3\n")
    assert cli.run(["config", "check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file} is valid\n"
    assert cli.run(["config", "check", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "file": str(file)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pool_tokns = 1", "unknown key 'pool_tokns'; did you mean 'pool_tokens'?"),
        ("authority_stor = 'x'", "did you mean 'authority_store'?"),
        ("qqqq = 1", "`copyhold config show` lists all keys"),
        ("tp = 9", "tp = 9 is out of range: 1 to 8 ranks"),
        ("tp = ", "is not valid TOML"),
        ("sessions_store = 'http://h'", "sessions_store is refused"),
        ("accept_generation_loss = 'yes'", "must be true or false"),
    ],
)
def test_check_refuses_a_wrong_file_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    assert cli.run(["config", "check", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("copyhold: config: ") and captured.err.count("\n") == 1
    assert says in captured.err and captured.out == ""
    assert cli.run(["config", "check", str(file), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "config"


def test_check_refuses_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["config", "check", str(tmp_path / "absent.toml")]) == 2
    assert "cannot read configuration file" in capsys.readouterr().err


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_both_bounds_are_allowed_and_the_next_values_are_not(spec: FieldSpec, tmp_path: Path) -> None:
    assert spec.least is not None and spec.most is not None
    for bound in (spec.least, spec.most):
        settings = dict(ROOMY)
        if spec.name == "pool_tokens":
            settings["max_model_len"] = 32
        if spec.name == "max_requests":
            settings["step_budget_tokens"] = 16384
        if spec.name == "step_budget_tokens":
            settings["max_requests"] = 1
        assert getattr(Config(**{**settings, spec.name: bound}), spec.name) == bound
    if spec.kind is float:
        outside = [
            math.nextafter(spec.least, -math.inf),
            math.nextafter(spec.most, math.inf),
            math.nan,
            math.inf,
        ]
    else:
        outside = [spec.least - 1, spec.most + 1]
    for value in outside:
        with pytest.raises(ConfigError, match="out of range") as refused:
            Config(**{**ROOMY, spec.name: value})
        assert refused.value.key == spec.name
        assert spec.bounds in refused.value.message


@pytest.mark.parametrize("spec", FIELDS.values(), ids=lambda spec: spec.name)
def test_every_key_refuses_other_types(spec: FieldSpec) -> None:
    values: list[Any] = [None, [], {}, b"x", 1.5, "1", 1, True]
    for value in values:
        if type(value) is spec.kind:
            continue
        with pytest.raises(ConfigError) as refused:
            Config(**{spec.name: value})
        assert refused.value.key == spec.name


@pytest.mark.parametrize("spec", FIELDS.values(), ids=lambda spec: spec.name)
def test_every_default_is_spelled_as_a_file_reads_it(spec: FieldSpec, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"{spec.name} = {toml_value(spec.default)}\n")
    assert load_config(file) == Config()
