"""How ``copyhold`` reaches the workers of a joined cluster: it is there already, or it is shipped.

Owns that decision. A node whose workers find the very sources that this process runs gets nothing; any other gets this
process's package as a ``py_modules`` entry, its compiled kernels included, so that no rank compiles. Sources are compared,
not version numbers: two checkouts of one version may differ, and then specs would not decode alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import copyhold

if TYPE_CHECKING:
    from .ray_session import RaySession

_PROBE_TIMEOUT_S = 60.0


def package_folder() -> Path:
    """The folder that this process imports ``copyhold`` from."""
    (folder,) = copyhold.__path__
    return Path(folder)


def shipped_package(session: RaySession) -> Path | None:
    """The folder to ship, ``None`` when a worker of the session's node imports equal sources by itself."""
    probe = _probe()
    options = session.service_options() | {"max_retries": 0}
    there = session.ray.get(session.ray.remote(probe).options(**options).remote(), timeout=_PROBE_TIMEOUT_S)
    return None if there == probe() else package_folder()


def _probe() -> Callable[[], str]:
    """A function that crosses to a worker by value (it is local to another), since the worker may not know us."""

    def sources_digest() -> str:
        """Hex SHA-256 over names and contents of the package's sources, empty where there is no such package."""
        import hashlib
        import importlib.util
        from pathlib import Path

        spec = importlib.util.find_spec("copyhold")
        if spec is None or not spec.submodule_search_locations:
            return ""
        root = Path(next(iter(spec.submodule_search_locations)))
        digest = hashlib.sha256()
        for room in ["", *sorted(entry.name for entry in root.iterdir() if entry.is_dir())]:
            for path in sorted((root / room).glob("*.py")):
                content = path.read_bytes()
                digest.update(f"{room}/{path.name} {len(content)}\n".encode() + content)
        return digest.hexdigest()

    return sources_digest
