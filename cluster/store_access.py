"""The two stores of a run: which are embedded, which are other people's servers, and how each is entered.

Owns the way from configuration to ``StoreTarget``. Invariant: a password goes from a file into a file of mode 0600 in the run
folder or stays where it is, and nowhere else; a store that is not there, does not let us in or could forget a generation is
refused by name before anything else starts, and its address is told without credentials.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from copyhold.namespace.errors import NamespaceError, StoreNotDurable
from copyhold.namespace.store_target import StoreTarget, read_password, shown_address

from .config import SHARED_STORE, Config
from .errors import ConfigError, StoreRefused

STORES = ("authority", "sessions")


def store_targets(config: Config, run_dir: Path) -> dict[str, StoreTarget]:
    """Both stores' targets; the embedded one's is its socket in ``run_dir``.

    Raises: ConfigError, nothing was connected to.
    """
    return {name: _target(config, run_dir, name) for name in STORES}


def check_outside_stores(config: Config, targets: Mapping[str, StoreTarget]) -> None:
    """Ask each store that is not embedded whether it answers and is fit for its use.

    Raises: StoreRefused, ConfigError when both turn out to be one server; nothing was written.
    """
    servers = {
        name: _probe(name, target, config.accept_generation_loss)
        for name, target in targets.items()
        if config.store_address(f"{name}_store") is not None
    }
    if len(servers) == 2 and len(set(servers.values())) == 1 and not config.accept_shared_store:
        raise ConfigError("sessions_store", SHARED_STORE)


def without_passwords(config: Config) -> Config:
    """The same configuration with store addresses that hold no password: fit for files and messages."""
    import msgspec

    plain: dict[str, str] = {}
    for name in STORES:
        address = config.store_address(f"{name}_store")
        plain[f"{name}_store"] = "" if address is None else address.url
    return msgspec.structs.replace(config, **plain)


def _target(config: Config, run_dir: Path, name: str) -> StoreTarget:
    address = config.store_address(f"{name}_store")
    if address is None:
        return StoreTarget(str(run_dir / f"{name}.sock"))
    password_file = _existing("store_password_file", config.store_password_file)
    if password_file:
        try:
            read_password(password_file)
        except NamespaceError as error:
            raise ConfigError("store_password_file", str(error)) from error
    if address.password is not None:
        password_file = str(run_dir / f"{name}.password")
        descriptor = os.open(password_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(address.password)
    ca_file = _existing("store_ca_file", config.store_ca_file) if address.encrypted else ""
    return StoreTarget(address.url, password_file, ca_file)


def _existing(key: str, text: str) -> str:
    if not text:
        return ""
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise ConfigError(key, f"{key} {path} is no file")
    return str(path)


def _probe(name: str, target: StoreTarget, accept_generation_loss: bool) -> str:
    """The server's own id. Imports the client late: most commands need none."""
    import redis

    from copyhold.namespace.store import Store, open_client

    where = f"the {name} store {shown_address(target.url)}"
    client = open_client(target)
    try:
        facts = dict(client.info("server"))  # pyright: ignore[reportArgumentType, reportCallIssue]
        if name == "authority":
            Store(client, b"").check_durability(accept_generation_loss=accept_generation_loss)
    except StoreNotDurable as error:
        hint = "accept_generation_loss = true accepts that, and certificates say so"
        raise StoreRefused(
            "store_not_durable", f"{where} could forget a generation: {error.detail}; {hint}"
        ) from None
    except (redis.AuthenticationError, redis.ResponseError) as error:
        raise StoreRefused("store_refused", f"{where} does not let us in: {error}") from None
    except (redis.RedisError, NamespaceError, OSError) as error:
        raise StoreRefused("store_unavailable", f"{where} does not answer: {error}") from None
    finally:
        client.close()
    return str(facts.get("run_id", target.url))
