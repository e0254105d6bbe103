"""Settings for people and scripts: the effective value of each key with its unit, bounds and source.

Owns the shape of ``copyhold config show`` and the table of docs/operations.md. Invariant: a password in a store's address is
never part of a report.
"""

from __future__ import annotations

from typing import Any

from .config import FIELDS, FieldSpec, Settings
from .store_access import without_passwords


def settings_report(settings: Settings) -> list[dict[str, Any]]:
    """One entry per key, in the order of ``Config``; JSON-ready."""
    shown = without_passwords(settings.config)
    return [
        {
            "key": spec.name,
            "value": getattr(shown, spec.name),
            "unit": spec.unit,
            "least": spec.least,
            "most": spec.most,
            "source": settings.sources[spec.name],
            "default": spec.default,
        }
        for spec in FIELDS.values()
    ]


def settings_rows(settings: Settings) -> list[tuple[str, ...]]:
    """The same for a text table: key, value, unit, bounds, source."""
    return [
        (
            entry["key"],
            toml_value(entry["value"]),
            entry["unit"],
            bounds(FIELDS[entry["key"]]),
            entry["source"],
        )
        for entry in settings_report(settings)
    ]


def markdown_table() -> str:
    """The table of all keys for the documentation."""
    lines = ["| Key | Default | Unit | Bounds | Meaning |", "| --- | --- | --- | --- | --- |"]
    lines += [
        f"| `{spec.name}` | `{toml_value(spec.default)}` | {spec.unit} | {bounds(spec)} | {spec.doc} |"
        for spec in FIELDS.values()
    ]
    return "\n".join(lines)


def toml_value(value: bool | float | str) -> str:
    """The value as a TOML file spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else f"{value}"


def bounds(spec: FieldSpec) -> str:
    """The bounds without the unit, empty for text and truth values."""
    if spec.least is None or spec.most is None:
        return ""
    return f"{spec.least:g} to {spec.most:g}" if spec.kind is float else f"{spec.least} to {spec.most}"
