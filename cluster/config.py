"""Configuration: one frozen struct, read from TOML and overridden by the command line.

Owns every setting with its unit and bounds. Invariant: a ``Config`` that exists is valid, however it was
made. An unknown key, a wrong type or a value out of range is refused by name and nothing is started. No
environment variable changes behaviour, and the default needs no file.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from .errors import ConfigError


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
    admin_socket: Annotated[
        str, _bounded("path", "Admin unix socket; empty: admin.sock in the run folder.")
    ] = ""
    block_size: Annotated[int, _bounded("tokens", "Token rows per K/V block; a multiple of 16.", 16, 256)] = (
        16
    )
    pool_tokens: Annotated[int, _bounded("tokens", "K/V pool of each rank.", 256, 1 << 24)] = 8192
    max_model_len: Annotated[int, _bounded("tokens", "Longest prompt plus reply.", 32, 1 << 20)] = 4096
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
    receipt_ttl_s: Annotated[int, _bounded("seconds", "How long receipts are kept.", 60, 365 * 86400)] = 86400
    collective_timeout_s: Annotated[
        float, _bounded("seconds", "A rank that does not enter a collective by then is lost.", 1.0, 600.0)
    ] = 20.0
    start_timeout_s: Annotated[
        float, _bounded("seconds", "Longest wait between two signs of progress at start-up.", 1.0, 3600.0)
    ] = 180.0
    stop_grace_s: Annotated[
        float, _bounded("seconds", "Time the driver gets to end by itself.", 0.0, 300.0)
    ] = 10.0

    def __post_init__(self) -> None:
        for spec in FIELDS.values():
            _check(spec, getattr(self, spec.name))
        if self.block_size % 16:
            raise ConfigError("block_size", f"block_size = {self.block_size} is not a multiple of 16 tokens")
        if self.pool_tokens % self.block_size:
            raise ConfigError(
                "pool_tokens",
                f"pool_tokens = {self.pool_tokens} is not a multiple of block_size ({self.block_size})",
            )
        if self.max_model_len > self.pool_tokens:
            raise ConfigError(
                "max_model_len",
                f"max_model_len = {self.max_model_len} exceeds the pool (pool_tokens = {self.pool_tokens})",
            )
        if self.step_budget_tokens < self.max_requests:
            raise ConfigError(
                "step_budget_tokens",
                f"step_budget_tokens = {self.step_budget_tokens} is below max_requests ({self.max_requests})",
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of each rank's pool."""
        return self.pool_tokens // self.block_size

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir).expanduser()


class FieldSpec(msgspec.Struct, frozen=True):
    """One row of the table of settings: what a field may hold and what it means."""

    name: str
    kind: type[int] | type[float] | type[str]
    default: int | float | str
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


def load_config(
    file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """``defaults``, then ``file`` (TOML, flat keys), then ``overrides`` (``None`` values mean not given).

    Raises:
        ConfigError: names the key; nothing was started.
    """
    values: dict[str, Any] = dict(defaults or {})
    if file is not None:
        values.update(_read_toml(file))
    values.update({key: value for key, value in (overrides or {}).items() if value is not None})
    for key in values:
        if key not in FIELDS:
            raise ConfigError(key, f"unknown key {key!r}{_suggestion(key)}")
    return Config(**{key: _widen(FIELDS[key], value) for key, value in values.items()})


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
    return f"; did you mean {near[0]!r}?" if near else "; `copyhold serve --help` lists all keys"


def _widen(spec: FieldSpec, value: Any) -> Any:
    """A whole number is fine where a number of seconds is asked for; a truth value is a number nowhere."""
    if spec.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _check(spec: FieldSpec, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, spec.kind):
        names = {int: "a whole number", float: "a number", str: "text"}
        raise ConfigError(
            spec.name, f"{spec.name} must be {names[spec.kind]} ({spec.bounds or 'free text'}), not {value!r}"
        )
    if isinstance(value, (int, float)):
        if spec.least is not None and spec.most is not None and not spec.least <= value <= spec.most:
            raise ConfigError(spec.name, f"{spec.name} = {value} is out of range: {spec.bounds}")
    elif "\0" in value or "\n" in value:
        raise ConfigError(spec.name, f"{spec.name} holds a control character")
