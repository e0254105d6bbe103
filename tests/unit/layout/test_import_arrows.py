"""Rooms import in one direction, each other by full name and themselves by dots, and only what they may."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

ARROWS: dict[str, set[str]] = {
    "kvcore": set(),
    "kernels": {"kvcore"},
    "models": {"kernels", "kvcore"},
    "namespace": {"kvcore"},
    "actors": {"models", "kernels", "namespace", "kvcore"},
    "cluster": {"actors", "models", "kernels", "namespace", "kvcore"},
}
FOREIGN = {
    "kvcore": {"ray", "torch", "redis", "cryptography", "starlette", "httpx"},
    "kernels": {"ray", "redis", "cryptography", "starlette", "httpx"},
    "models": {"ray", "redis", "cryptography", "starlette", "httpx"},
    "namespace": {"ray", "torch", "numba", "starlette", "httpx"},
    "actors": {"starlette", "httpx"},
    "cluster": {"numba"},
}
KVCORE_ALLOWED = {"numpy", "msgspec", "numba"}
KVCORE_REFUSED = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "queue",
    "random",
    "secrets",
    "socket",
    "threading",
    "time",
}
"""Clocks, chance, threads and sockets come to kvcore as arguments, if at all."""


def modules() -> list[Path]:
    return sorted(path for room in ARROWS for path in (ROOT / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """(line, dotted name, level) of every import in a file, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or "", node.level


def test_there_is_something_to_check() -> None:
    assert len(modules()) > 20
    assert {path.relative_to(ROOT).parts[0] for path in modules()} == set(ARROWS)


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_along_the_arrows_only(room: str) -> None:
    wrong: list[str] = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for line, name, level in imports(path):
            where = f"{path.relative_to(ROOT)}:{line} imports {'.' * level}{name}"
            first, _, rest = name.partition(".")
            if level > 1:
                wrong.append(f"{where}: another room is named in full")
            elif level == 0 and first == "copyhold":
                target = rest.partition(".")[0]
                if target == room:
                    wrong.append(f"{where}: the own room is named by a dot")
                elif target and target not in ARROWS[room]:
                    wrong.append(f"{where}: against the arrows")
            elif level == 0 and first in ARROWS:
                wrong.append(f"{where}: rooms are imported from copyhold")
            elif level == 0 and first in FOREIGN[room]:
                wrong.append(f"{where}: not in this room")
            elif level == 0 and room == "kvcore" and first in KVCORE_REFUSED:
                wrong.append(f"{where}: kvcore has no clock, chance, thread or socket of its own")
            elif level == 0 and room == "kvcore" and first not in sys.stdlib_module_names | KVCORE_ALLOWED:
                wrong.append(f"{where}: kvcore uses the standard library, numpy, msgspec and numba")
    assert wrong == []


def test_importing_the_client_loads_neither_torch_nor_ray_nor_numba() -> None:
    code = (
        "import sys, copyhold; before = {'msgspec', 'httpx'} & set(sys.modules); assert not before, before; "
        "from copyhold import Client; heavy = {'torch', 'ray', 'numba', 'redis', 'starlette'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_supervisor_does_not_load_ray() -> None:
    code = (
        "import sys, copyhold.cluster.supervisor; heavy = {'torch', 'ray', 'numba'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
