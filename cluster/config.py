"""Configuration: one frozen struct, read from TOML and overridden by the command line.

Owns every setting with its unit and bounds. Invariant: a ``Config`` that exists is valid, however it was
made. An unknown key, a wrong type or a value out of range is refused by name and nothing is started. No
environment variable changes behaviour, and the default needs no file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from copyhold.actors.recording_settings import RecordingSettings
from copyhold.kernels.choices import BackendChoice, KVChoice, KVDtype, SharedPrefix, kv_dtype_for
from copyhold.models.layout import CollectiveChoice, Dtype
from copyhold.namespace.errors import StoreAddressRefused
from copyhold.namespace.store_target import StoreAddress, parse_store_address

from .cache_config import check_cache
from .errors import ConfigError

_HOST_PORT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")


def _bounded(unit: str, doc: str, least: float | None = None, most: float | None = None) -> msgspec.Meta:
    return msgspec.Meta(ge=least, le=most, description=doc, extra={"unit": unit})


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one server. Paths may start with ``~``; an empty one means its told default."""

    host: Annotated[str, _bounded("", "Address the tenant port listens on.")] = "127.0.0.1"
    port: Annotated[int, _bounded("", "Tenant port; 0 takes any free one.", 0, 65535)] = 8000
    tp: Annotated[int, _bounded("ranks", "Tensor-parallel ranks.", 1, 8)] = 2
    replicas: Annotated[
        int, _bounded("replicas", "Replicas, each with ranks and pools of its own.", 1, 64)
    ] = 1
    model: Annotated[
        str,
        _bounded(
            "path", "A .gguf file or a Hugging Face folder; empty: the installed SmolLM2-135M-Instruct."
        ),
    ] = ""
    served_model_name: Annotated[str, _bounded("", "Name in the API; empty: the checkpoint's own.")] = ""
    cache_dir: Annotated[str, _bounded("path", "Converted checkpoints; safe to delete.")] = (
        "~/.cache/copyhold"
    )
    state_dir: Annotated[
        str,
        _bounded(
            "path", "Secrets and stores that outlive a server; empty: inside the run folder, gone on exit."
        ),
    ] = "~/.local/state/copyhold"
    run_dir: Annotated[
        str, _bounded("path", "Where the private run folder of a server is made; short, for socket paths.")
    ] = "/tmp"
    address: Annotated[
        str,
        _bounded(
            "host:port",
            "Ray cluster to join, which has a node on this machine; auto: the one Ray knows; "
            "empty: a private one.",
        ),
    ] = ""
    admin_socket: Annotated[
        str, _bounded("path", "Admin unix socket; empty: admin.sock in the run folder.")
    ] = ""
    dtype: Annotated[
        str, _bounded("", "Weights and linears: float32 or bfloat16, about twice as fast; see kv_dtype.")
    ] = "float32"
    kv_dtype: Annotated[
        str,
        _bounded(
            "",
            "K/V rows: float32, bfloat16, float16, or auto: float32, exact. 16 bits hold twice the tokens.",
        ),
    ] = "auto"
    kernel_backend: Annotated[
        str,
        _bounded(
            "",
            "Kernels: triton (refused until models run on GPUs), cpu, reference (slow), or auto: the first that can.",
        ),
    ] = "auto"
    block_size: Annotated[int, _bounded("tokens", "Token rows per K/V block; a multiple of 16.", 16, 256)] = (
        16
    )
    pool_tokens: Annotated[int, _bounded("tokens", "K/V pool of each rank.", 256, 1 << 24)] = 8192
    pool_mb: Annotated[
        int,
        _bounded("MB", "K/V memory of each rank, instead of pool_tokens; 0: pool_tokens holds.", 0, 1 << 20),
    ] = 0
    max_model_len: Annotated[
        int, _bounded("tokens", "Longest prompt plus reply; prompts stay under 100 kB.", 32, 24576)
    ] = 4096
    max_requests: Annotated[int, _bounded("requests", "Requests that run at once.", 1, 1024)] = 16
    prefill_chunk_tokens: Annotated[
        int, _bounded("tokens", "Most prompt tokens of one request per step.", 16, 8192)
    ] = 256
    step_budget_tokens: Annotated[
        int, _bounded("tokens", "Most tokens of all requests per step; at least max_requests.", 16, 16384)
    ] = 512
    max_tokens_default: Annotated[
        int, _bounded("tokens", "Reply limit where a request names none.", 1, 1 << 20)
    ] = 256
    threads_per_rank: Annotated[int, _bounded("threads", "Compute threads of each rank.", 1, 64)] = 1
    lease_s: Annotated[float, _bounded("seconds", "Serving lease of a replica.", 1.0, 300.0)] = 10.0
    revocation_deadline_s: Annotated[
        float, _bounded("seconds", "Time a revoked namespace's running requests get to end.", 0.0, 600.0)
    ] = 1.0
    eviction_policy: Annotated[
        str, _bounded("", "Which cached prefixes go first: cost, lru, lfu, fifo, slru or priority.")
    ] = "cost"
    cache_recency: Annotated[
        str,
        _bounded(
            "",
            "What a hit uses: path, all of it, or edge, its last edge, so that a shared root ages (not with cost).",
        ),
    ] = "path"
    cache_tails: Annotated[
        bool,
        _bounded(
            "",
            "Keep the partial block at a request's end, so that hits need not end with a block (one cache group, elastic).",
        ),
    ] = False
    isolation: Annotated[
        str,
        _bounded(
            "",
            "strict: every namespace has blocks of its own, and no other namespace changes what it keeps; "
            "elastic: they share the pool.",
        ),
    ] = "elastic"
    tenant_share_blocks: Annotated[
        int,
        _bounded(
            "blocks",
            "Strict share of a namespace that tenant_blocks does not list; 0: half the pool.",
            0,
            1 << 20,
        ),
    ] = 0
    tenant_blocks: Annotated[
        str,
        _bounded("list", "Shares by namespace: NAME=BLOCKS or, elastic, NAME=FLOOR-CEILING, with commas."),
    ] = ""
    cache_priority_max: Annotated[
        int, _bounded("levels", "Highest cache_priority that a request may ask for.", 0, 9)
    ] = 3
    cache_ttl_max_s: Annotated[
        float, _bounded("seconds", "Longest cache_ttl_s that a request may ask for.", 1.0, 365 * 86400.0)
    ] = 86400.0
    pin_blocks: Annotated[
        int, _bounded("blocks", "Blocks of one namespace kept with a cache_priority above 0.", 0, 1 << 20)
    ] = 64
    record_dir: Annotated[
        str,
        _bounded("path", "Where replicas record their ledgers, tenants' token ids included; empty: nowhere."),
    ] = ""
    record_max_mb: Annotated[
        int, _bounded("MB", "Most that the recorded logs of a replica take.", 1, 1 << 20)
    ] = 64
    record_max_age_s: Annotated[
        float, _bounded("seconds", "Age at which recorded commands are deleted.", 60.0, 365 * 86400.0)
    ] = 86400.0
    receipt_ttl_s: Annotated[int, _bounded("seconds", "How long receipts are kept.", 60, 365 * 86400)] = 86400
    request_lifetime_s: Annotated[
        float,
        _bounded("seconds", "Longest life of one request; it is ended by name afterwards.", 1.0, 86400.0),
    ] = 1800.0
    collective_timeout_s: Annotated[
        float, _bounded("seconds", "A rank that does not enter a collective by then is lost.", 1.0, 600.0)
    ] = 20.0
    collective: Annotated[
        str,
        _bounded(
            "", "How ranks add: shm (shared memory, x86-64), gloo (sockets), or auto: shm where all can."
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        _bounded(
            "", "A request's logits have the same bits whatever runs beside it and whatever was cached."
        ),
    ] = False
    shared_prefix: Annotated[
        str,
        _bounded(
            "",
            "How requests read K/V rows they share: auto (by the cost model), off, hydragen or chunk.",
        ),
    ] = "auto"
    start_timeout_s: Annotated[
        float, _bounded("seconds", "Longest wait between two signs of progress at start-up.", 1.0, 3600.0)
    ] = 180.0
    stop_grace_s: Annotated[
        float, _bounded("seconds", "Time the driver gets to end by itself.", 0.0, 300.0)
    ] = 10.0
    authority_store: Annotated[
        str,
        _bounded("URL", "Tenants, keys and generations: redis://, rediss:// or unix://; empty: embedded."),
    ] = ""
    sessions_store: Annotated[
        str, _bounded("URL", "Receipts and sessions: redis://, rediss:// or unix://; empty: embedded.")
    ] = ""
    store_ca_file: Annotated[
        str, _bounded("path", "Certificate authority of rediss:// stores; empty: the system's.")
    ] = ""
    store_password_file: Annotated[
        str, _bounded("path", "File of mode 0600 with the stores' password; empty: none.")
    ] = ""
    accept_shared_store: Annotated[
        bool,
        _bounded("", "Both stores may be one server, where a flood of sessions can hold up a revocation."),
    ] = False
    accept_generation_loss: Annotated[
        bool, _bounded("", "The authority's store may forget a generation; certificates then say so.")
    ] = False

    def __post_init__(self) -> None:
        for spec in FIELDS.values():
            _check(spec, getattr(self, spec.name))
        self._check_address()
        self._check_sizes()
        self._check_stores()
        check_cache(self)

    def _check_address(self) -> None:
        if self.address not in ("", "auto") and not _HOST_PORT.fullmatch(self.address):
            raise ConfigError(
                "address",
                f"address = {self.address!r} is neither auto nor HOST:PORT of a Ray cluster "
                "(the port of its head, not of its dashboard or client server)",
            )

    def _check_sizes(self) -> None:
        if self.collective not in get_args(CollectiveChoice):
            raise ConfigError(
                "collective",
                f"collective = {self.collective!r} is not one of {', '.join(get_args(CollectiveChoice))}",
            )
        if self.shared_prefix not in get_args(SharedPrefix):
            raise ConfigError(
                "shared_prefix",
                f"shared_prefix = {self.shared_prefix!r} is not one of {', '.join(get_args(SharedPrefix))}",
            )
        if self.dtype not in get_args(Dtype):
            raise ConfigError("dtype", f"dtype = {self.dtype!r} is not one of {', '.join(get_args(Dtype))}")
        for key, known in (("kv_dtype", get_args(KVChoice)), ("kernel_backend", get_args(BackendChoice))):
            if getattr(self, key) not in known:
                raise ConfigError(key, f"{key} = {getattr(self, key)!r} is not one of {', '.join(known)}")
        if self.block_size % 16:
            raise ConfigError("block_size", f"block_size = {self.block_size} is not a multiple of 16 tokens")
        if self.pool_tokens % self.block_size and not self.pool_mb:
            raise ConfigError(
                "pool_tokens",
                f"pool_tokens = {self.pool_tokens} is not a multiple of block_size ({self.block_size})",
            )
        if self.max_model_len > self.pool_tokens and not self.pool_mb:
            raise ConfigError(
                "max_model_len",
                f"max_model_len = {self.max_model_len} exceeds the pool (pool_tokens = {self.pool_tokens})",
            )
        if self.step_budget_tokens < self.max_requests:
            raise ConfigError(
                "step_budget_tokens",
                f"step_budget_tokens = {self.step_budget_tokens} is below max_requests ({self.max_requests})",
            )

    def _check_stores(self) -> None:
        authority, sessions = self.store_address("authority_store"), self.store_address("sessions_store")
        given = [address for address in (authority, sessions) if address is not None]
        if authority and sessions and authority.server == sessions.server and not self.accept_shared_store:
            raise ConfigError("sessions_store", SHARED_STORE)
        if self.store_ca_file and not any(address.encrypted for address in given):
            raise ConfigError("store_ca_file", "store_ca_file is given, but no store is a rediss:// URL")
        if self.store_password_file and not given:
            raise ConfigError("store_password_file", "store_password_file is given, but no store is a URL")
        if self.store_password_file and any(address.password is not None for address in given):
            raise ConfigError(
                "store_password_file", "store_password_file is given, and a store's URL holds a password too"
            )

    def store_address(self, key: str) -> StoreAddress | None:
        """The checked address under ``authority_store`` or ``sessions_store``, ``None`` for the embedded one.

        Raises: ConfigError without the address, which may hold a password.
        """
        text: str = getattr(self, key)
        try:
            return parse_store_address(text) if text else None
        except StoreAddressRefused as error:
            raise ConfigError(key, f"{key} is refused: {error.detail}") from None

    @property
    def num_blocks(self) -> int:
        """Blocks of each rank's pool; where ``pool_mb`` sizes it, of the settings that the driver makes of it."""
        return self.pool_tokens // self.block_size

    @property
    def kv_storage(self) -> KVDtype:
        """How K/V rows are kept."""
        return kv_dtype_for(msgspec.convert(self.kv_dtype, KVChoice))

    @property
    def recording(self) -> RecordingSettings | None:
        """Where and how much each replica records, none where it does not."""
        if not self.record_dir:
            return None
        folder = str(Path(self.record_dir).expanduser().absolute())
        return RecordingSettings(folder, self.record_max_mb * 10**6, self.record_max_age_s)

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser()


class FieldSpec(msgspec.Struct, frozen=True):
    """One row of the table of settings: what a field may hold and what it means."""

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    default: bool | int | float | str
    least: int | float | None
    most: int | float | None
    unit: str
    doc: str

    @property
    def bounds(self) -> str:
        """Readable bounds with the unit, empty for text."""
        if self.least is None or self.most is None:
            return ""
        numbers = f"{self.least:g} to {self.most:g}" if self.kind is float else f"{self.least} to {self.most}"
        return f"{numbers} {self.unit}".strip()


def _field_table() -> dict[str, FieldSpec]:
    hints = get_type_hints(Config, include_extras=True)
    table: dict[str, FieldSpec] = {}
    for field in msgspec.structs.fields(Config):
        annotation = hints[field.name]
        assert get_origin(annotation) is Annotated, field.name
        kind, meta = get_args(annotation)
        table[field.name] = FieldSpec(
            field.name,
            kind,
            field.default,
            meta.ge,
            meta.le,
            (meta.extra or {})["unit"],
            meta.description or "",
        )
    return table


FIELDS: Mapping[str, FieldSpec] = _field_table()


STORE_KEYS = ("authority_store", "sessions_store")
_PASSWORD_SEEN = (
    "process arguments are readable by others; name a file of mode 0600 with store_password_file "
    "(--store-password-file)"
)
SHARED_STORE = (
    "authority_store and sessions_store are one server: a flood of sessions could then hold up a revocation; "
    "accept_shared_store = true (--accept-shared-store) accepts that"
)


class Settings(msgspec.Struct, frozen=True):
    """A configuration and, per key, where its value came from: default, file or command line."""

    config: Config
    sources: Mapping[str, str]


def load_config(
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """``defaults``, then ``file`` (TOML, flat keys), then ``overrides`` (``None`` values mean not given).

    Raises:
        ConfigError: names the key; nothing was started.
    """
    return load_settings(file, overrides, defaults).config


def load_settings(
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Settings:
    """As ``load_config``, with the source of every value."""
    from_file = {} if file is None else _read_toml(file)
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    values = {**(defaults or {}), **from_file, **given}
    for key in values:
        if key not in FIELDS:
            raise ConfigError(key, f"unknown key {key!r}{_suggestion(key)}")
    _refuse_open_passwords(file, from_file, given)
    config = Config(**{key: _widen(FIELDS[key], value) for key, value in values.items()})
    sources = {
        key: "command line" if key in given else "file" if key in from_file else "default" for key in FIELDS
    }
    return Settings(config, sources)


def _refuse_open_passwords(file: Path | None, from_file: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A password that others can read is refused before anything else is said about its key."""
    for key in STORE_KEYS:
        if _holds_password(given.get(key)):
            raise ConfigError(key, f"{key} holds a password: {_PASSWORD_SEEN}")
        if file is not None and _holds_password(from_file.get(key)) and file.stat().st_mode & 0o077:
            raise ConfigError(key, f"{key} in {file} holds a password: the file's mode must be 0600")


def _holds_password(address: Any) -> bool:
    try:
        return isinstance(address, str) and parse_store_address(address).password is not None
    except StoreAddressRefused:
        return False


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"cannot read configuration file {file}: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", f"{file} is not valid TOML: {error}") from error


def _suggestion(key: str) -> str:
    near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "; `copyhold config show` lists all keys"


def _widen(spec: FieldSpec, value: Any) -> Any:
    """A whole number is fine where a number of seconds is asked for; a truth value is a number nowhere."""
    if spec.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _check(spec: FieldSpec, value: Any) -> None:
    if isinstance(value, bool) != (spec.kind is bool) or not isinstance(value, spec.kind):
        names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        shown = "something else" if spec.unit == "URL" else repr(value)
        raise ConfigError(
            spec.name, f"{spec.name} must be {names[spec.kind]} ({spec.bounds or 'no bounds'}), not {shown}"
        )
    if isinstance(value, (int, float)):
        if spec.least is not None and spec.most is not None and not spec.least <= value <= spec.most:
            raise ConfigError(spec.name, f"{spec.name} = {value} is out of range: {spec.bounds}")
    elif "\0" in value or "\n" in value:
        raise ConfigError(spec.name, f"{spec.name} holds a control character")
