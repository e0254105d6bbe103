"""Which OpenAI parameters this server honours, ignores, or refuses by name.

Owns the table of parameters that are not part of a request's own values. Invariant: a parameter that would
change the answer is never ignored silently; it is accepted only at the value that means what the server
does anyway (no bias, one choice, plain text), and refused by name otherwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .http_errors import ApiError, invalid

Check = Callable[[str, Any], None]

_NAMES = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def wrong_type(param: str, value: Any, wanted: str) -> ApiError:
    found = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
    return invalid(param, f"{param} must be {wanted}, not {found}.", "invalid_type")


def is_number(value: Any) -> bool:
    """True for JSON numbers only; a boolean is none."""
    return type(value) in (int, float)


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 40 else text[:37] + "..."


def _only(*accepted: Any, because: str, code: str = "unsupported_value") -> Check:
    """Accept null and the given JSON values (1 equals 1.0, never true); refuse everything else by name."""

    def check(param: str, value: Any) -> None:
        if value is None or any(_same(value, other) for other in accepted):
            return
        raise invalid(param, f"{param} = {_shown(value)} is not served: {because}.", code)

    return check


def _same(value: Any, other: Any) -> bool:
    return (type(value) is type(other) or (is_number(value) and is_number(other))) and value == other


def _number_only(*accepted: float, because: str) -> Check:
    served = _only(*accepted, because=because)

    def check(param: str, value: Any) -> None:
        if value is not None and not is_number(value):
            raise wrong_type(param, value, "a number")
        served(param, value)

    return check


def _typed(kind: type, wanted: str) -> Check:
    """A harmless field: its type is checked, its value has no effect on the answer."""

    def check(param: str, value: Any) -> None:
        if value is not None and type(value) is not kind:
            raise wrong_type(param, value, wanted)

    return check


_NO_BIAS = "logits are not biased today"
_NO_PENALTY = "penalties are not served today"
_ONE = "one choice per prompt is served today"
_NO_TOOLS = "tools are not served today"
_TEXT = "only plain text is served today"
_UNSUPPORTED = "unsupported_parameter"

_LOSSY = _only(
    because="it drops positions of a sequence, and reuse is exact here", code="lossy_eviction_in_exact_mode"
)

_COMMON: dict[str, Check] = {
    "cache_implementation": _LOSSY,
    "kv_compression": _LOSSY,
    "max_attention_window": _LOSSY,
    "sink_token_length": _LOSSY,
    "n": _number_only(1, because=_ONE),
    "logit_bias": _only({}, because=_NO_BIAS, code=_UNSUPPORTED),
    "frequency_penalty": _number_only(0, because=_NO_PENALTY),
    "presence_penalty": _number_only(0, because=_NO_PENALTY),
    "user": _typed(str, "a string"),
    "metadata": _typed(dict, "an object"),
    "store": _only(False, because="nothing is stored for later retrieval", code=_UNSUPPORTED),
    "safety_identifier": _typed(str, "a string"),
    "prompt_cache_key": _typed(str, "a string"),
    "service_tier": _only("auto", "default", because="there is one service tier"),
}

_CHAT: dict[str, Check] = {
    "logprobs": _only(False, because="log probabilities are not served today", code=_UNSUPPORTED),
    "top_logprobs": _only(0, because="log probabilities are not served today", code=_UNSUPPORTED),
    "tools": _only([], because=_NO_TOOLS, code=_UNSUPPORTED),
    "tool_choice": _only("none", "auto", because=_NO_TOOLS, code=_UNSUPPORTED),
    "parallel_tool_calls": _typed(bool, "a boolean"),
    "functions": _only([], because=_NO_TOOLS, code=_UNSUPPORTED),
    "function_call": _only("none", "auto", because=_NO_TOOLS, code=_UNSUPPORTED),
    "response_format": _only({"type": "text"}, because=_TEXT, code=_UNSUPPORTED),
    "modalities": _only(["text"], because=_TEXT, code=_UNSUPPORTED),
    "audio": _only(because=_TEXT, code=_UNSUPPORTED),
    "reasoning_effort": _only("none", because="the served model has no reasoning mode", code=_UNSUPPORTED),
    "verbosity": _only("medium", because="the served model has no verbosity setting", code=_UNSUPPORTED),
    "web_search_options": _only(because=_NO_TOOLS, code=_UNSUPPORTED),
    "prediction": _typed(dict, "an object"),
}

_COMPLETION: dict[str, Check] = {
    "logprobs": _only(because="log probabilities are not served today", code=_UNSUPPORTED),
    "echo": _only(False, because="the prompt is not repeated in the answer today", code=_UNSUPPORTED),
    "best_of": _number_only(1, because=_ONE),
    "suffix": _only("", because="insertion is not served today", code=_UNSUPPORTED),
}

CHAT_CHECKS: Mapping[str, Check] = {**_COMMON, **_CHAT}
COMPLETION_CHECKS: Mapping[str, Check] = {**_COMMON, **_COMPLETION}


def check_parameters(body: Mapping[str, Any], checks: Mapping[str, Check], own: frozenset[str]) -> None:
    """Refuse unknown names, then values that would be ignored. ``own`` are the names parsed elsewhere."""
    for name in body:
        if name not in own and name not in checks:
            raise unknown_name(name, [*own, *checks])
    for name, check in checks.items():
        if name in body:
            check(name, body[name])


def unknown_name(name: str, known: list[str]) -> ApiError:
    shown = name[:64]
    nearest = difflib.get_close_matches(shown, sorted(known), n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return invalid(shown, f"Unknown parameter: {shown!r}.{hint}", "unknown_parameter")
