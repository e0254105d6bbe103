"""Copyhold: exact, authorized reuse of KV-cache state on Ray.

The package's folders are ``kvcore``, ``kernels``, ``models``, ``namespace``, ``actors`` and ``cluster``; see
docs/architecture.md. ``Client`` is imported on first use so that ``import copyhold`` stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from copyhold.cluster.sdk import Client

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Client":
        from copyhold.cluster.sdk import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
