"""The Ray session of a server: local, private, authenticated.

Owns the environment Ray starts under (it is read at import, so it is set before) and the session's folder inside the run
folder. Every process of the session inherits the token; whoever has not the token cannot join or submit (FACTS: Ray's
ports listen on all interfaces, whatever address it is told).
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any

from copyhold.actors.names import RAY_NAMESPACE

_OBJECT_STORE_BYTES = 80 << 20


def enter_environment(run_dir: Path, threads_per_rank: int) -> None:
    """Set what Ray and the numeric libraries read when they are imported; call before anything imports Ray."""
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported before its environment was set")
    token_path = run_dir / "ray-token"
    descriptor = os.open(token_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token_path),
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="0",
        OMP_NUM_THREADS=str(threads_per_rank),
        MKL_NUM_THREADS=str(threads_per_rank),
    )


def open_session(ray_dir: Path, num_cpus: int) -> Any:
    """Start a local cluster under the environment entered before; returns the ``ray`` module, connected."""
    import ray

    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        namespace=RAY_NAMESPACE,
        _temp_dir=str(ray_dir),
        _node_ip_address="127.0.0.1",
    )
    return ray
