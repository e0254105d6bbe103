"""Opening the authority's store outside a server, to accept a restored backup.

Owns a short run of its own: the state folder's lock, a run folder, the embedded store where there is one. Invariant: no
server of this state folder runs meanwhile, and nothing of the run is left behind, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from copyhold.namespace.clock import SystemClock
from copyhold.namespace.journal import JournalFiles
from copyhold.namespace.recovery import RestoreReceipt, confirm_restore
from copyhold.namespace.secrets import Secrets
from copyhold.namespace.store import Store
from copyhold.namespace.store_target import StoreTarget

from .config import Config
from .errors import ConfigError
from .launch import RUN_MARK
from .run_folder import make_run_folder, remove_run_folder
from .server_record import state_lock
from .store_access import check_outside_stores, store_targets
from .store_monitor import EmbeddedStore, StoreMonitor


def confirm_restored_store(config: Config, report: Callable[[str, str], None]) -> RestoreReceipt:
    """Accept the store as it is, under a new epoch.

    Raises: ConfigError without a state folder, StateInUse while a server runs, what the store raises; nothing changed.
    """
    state_dir = Path(config.state_dir).expanduser().absolute() if config.state_dir else Path()
    if not config.state_dir or not (state_dir / "secrets").is_dir():
        raise ConfigError(
            "state_dir", f"state_dir {config.state_dir!r} holds no secrets of an earlier server"
        )
    with state_lock(state_dir), authority_store(config, state_dir, report) as target:
        secrets = Secrets.load_or_create(state_dir / "secrets")
        store = Store.connect(
            target, secrets.store_mac_key, accept_generation_loss=config.accept_generation_loss
        )
        try:
            files = JournalFiles(
                audit_head=state_dir / "audit-head.json", high_water=state_dir / "high-water.json"
            )
            return confirm_restore(store, secrets, SystemClock(), files)
        finally:
            store.close()


@contextlib.contextmanager
def authority_store(
    config: Config, state_dir: Path, report: Callable[[str, str], None]
) -> Iterator[StoreTarget]:
    """The authority's store, the embedded one started for it and ended again; the caller holds the state's lock."""
    run_dir = make_run_folder(Path(config.run_dir))
    try:
        targets = store_targets(config, run_dir)
        check_outside_stores(config, targets)
        if config.store_address("authority_store") is not None:
            yield targets["authority"]
            return
        report("stores", "starting the authority store")
        logs = state_dir / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        embedded = EmbeddedStore(
            "authority", run_dir / "authority.sock", state_dir / "authority", logs / "authority.log", "always"
        )
        environment = {**os.environ, RUN_MARK: str(run_dir)}
        monitor = StoreMonitor(
            (embedded,), environment, config.start_timeout_s, lambda text: report("stores", text)
        )
        try:
            monitor.start()
            yield targets["authority"]
        finally:
            monitor.stop()
    finally:
        remove_run_folder(run_dir)
