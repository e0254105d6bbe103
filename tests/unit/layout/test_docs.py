"""Documents name only what exists: links, commands, options, tests, dependencies; and nothing of one machine."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer.main
from packaging.requirements import Requirement

from copyhold.cluster.cli import app

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*DOCUMENTS, *sorted((ROOT / "docs").rglob("*.svg"))]
COMMAND = typer.main.get_command(app)

_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
_CALL = re.compile(r"(?:`|^\$ |^)copyhold ((?:[a-z][a-z-]*|--[a-z][a-z-]*)[^`\n]*)", re.MULTILINE)
_TARGET = re.compile(r"(?:`|^\$ |^)make ([a-z-]+)", re.MULTILINE)
_TEST_PATH = re.compile(r"\btests/[A-Za-z0-9_./-]*[A-Za-z0-9_/]")
_SETTING = re.compile(r"`(--[a-z][a-z-]*)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_FORBIDDEN = {
    "a path of one machine": re.compile(r"/(?:work|home|root|Users)/|[A-Za-z]:\\\\"),
    "a package index": re.compile(r"pypi|simple/|files\.pythonhosted|download\.pytorch", re.IGNORECASE),
    "an unfinished note": re.compile(r"\b(?:TODO|FIXME|TBD|XXX)\b"),
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def every(pattern: re.Pattern[str], paths: list[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        for match in pattern.finditer(path.read_text("utf-8")):
            yield path, match[match.lastindex or 0]


def anchors(path: Path) -> set[str]:
    """The fragments of a document's headings, as GitHub spells them."""
    headings = _HEADING.findall(path.read_text("utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_documents_are_there() -> None:
    expected = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/isolation.md"}
    assert expected | {"docs/dependencies.md", "docs/adr/0001-layout.md"} <= set(map(name, DOCUMENTS))


def test_every_relative_link_resolves() -> None:
    broken: list[str] = []
    for path, link in every(_LINK, DOCUMENTS):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, fragment = link.partition("#")
        found = (path.parent / unquote(target)).resolve() if target else path
        inside = found.is_relative_to(ROOT)
        if not inside or not found.exists() or (fragment and fragment not in anchors(found)):
            broken.append(f"{name(path)}: {link}")
    assert broken == []


def unknown_part(call: str) -> str | None:
    """The first word of a call that the command line does not know, ``None`` when it knows all."""
    command: Any = COMMAND
    known = {"--help"}
    for word in call.split():
        subcommands = getattr(command, "commands", None)
        options = {option for parameter in command.params for option in parameter.opts} | known
        if word.startswith("--"):
            if word.split("=")[0] not in options:
                return word
        elif subcommands is not None:
            alternatives = word.split("|")
            unknown = [part for part in alternatives if part not in subcommands]
            if unknown:
                return unknown[0]
            command = subcommands[alternatives[0]]
    return None


@pytest.mark.parametrize("call", ["certificates verify x", "serve --prot 1", "tenants remove acme"])
def test_a_command_that_does_not_exist_is_noticed(call: str) -> None:
    assert unknown_part(call) is not None


def test_every_command_and_option_exists() -> None:
    calls = list(every(_CALL, DOCUMENTS))
    assert {path.name for path, _ in calls} >= {"README.md", "0005-supervisor.md"}
    wrong = [f"{name(path)}: copyhold {call}: {part}" for path, call in calls if (part := unknown_part(call))]
    assert wrong == []


def test_every_option_named_alone_is_a_setting_of_some_command() -> None:
    def options(command: object) -> Iterator[str]:
        for parameter in getattr(command, "params", ()):
            yield from [*parameter.opts, *parameter.secondary_opts]
        for child in getattr(command, "commands", {}).values():
            yield from options(child)

    known = set(options(COMMAND))
    assert [
        f"{name(path)}: {found}" for path, found in every(_SETTING, DOCUMENTS) if found not in known
    ] == []


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert [
        f"{name(path)}: make {found}" for path, found in every(_TARGET, DOCUMENTS) if found not in targets
    ] == []


def test_every_test_path_exists() -> None:
    named = list(every(_TEST_PATH, DOCUMENTS))
    assert len(named) > 20
    missing = [f"{name(path)}: {found}" for path, found in named if not (ROOT / found).exists()]
    assert [line for line in missing if "tests/unit/<room>" not in line] == []


def test_nothing_of_one_machine_is_named() -> None:
    wrong: list[str] = []
    for path in TEXTS:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            wrong += [
                f"{name(path)}:{number}: {what}" for what, found in _FORBIDDEN.items() if found.search(line)
            ]
    assert wrong == []


def test_the_dependency_page_has_every_dependency_with_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = {
        requirement.name.lower(): requirement.specifier
        for requirement in map(Requirement, [*project["dependencies"], *optional])
    }
    page = (ROOT / "docs" / "dependencies.md").read_text("utf-8")
    rows = re.findall(r"^\| ([a-z0-9-]+) \| `([^`]+)` \|", page, re.MULTILINE)
    listed = {package: Requirement(f"{package}{range_}").specifier for package, range_ in rows}
    assert listed == wanted
