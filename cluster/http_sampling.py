"""How a body asks for its tokens to be chosen, and which strings end its text.

Owns ``temperature``, ``top_p``, ``top_k``, ``seed``, ``stop`` and ``include_stop_str_in_output``. An absent
temperature is 0, not OpenAI's 1: exact, repeatable answers are what this server is for, so randomness has to be asked
for. Invariant: a seed that the caller did not give is drawn for one prompt, travels with it and is written nowhere.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from copyhold.models.sampling import GREEDY, MAX_SEED, MAX_TEMPERATURE, MIN_SEED, SamplingParams

from .http_errors import invalid
from .http_rules import is_number, wrong_type

SAMPLING_NAMES = frozenset({"temperature", "top_p", "top_k", "seed"})
STOP_NAMES = frozenset({"stop", "include_stop_str_in_output"})


class SamplingChoice(msgspec.Struct, frozen=True):
    """What the caller asked for; ``seed`` None: any, another one for each prompt."""

    temperature: float
    top_p: float
    top_k: int
    seed: int | None

    def params(self) -> SamplingParams:
        """The engine's parameters of one prompt; the same seed gives each prompt what it would get alone."""
        if self.temperature == 0.0:
            return GREEDY
        seed = self.seed if self.seed is not None else secrets.randbits(64) + MIN_SEED
        return SamplingParams(self.temperature, self.top_p, self.top_k, seed)


class StopChoice(msgspec.Struct, frozen=True):
    """Strings that end the text; ``included``: the one that did so stays in it."""

    strings: tuple[str, ...]
    included: bool


def parse_sampling(body: Mapping[str, Any], vocab_size: int) -> SamplingChoice:
    """Check the sampling fields. Raises: ApiError 400 that names the field."""
    temperature = _number(body, "temperature", 0.0)
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise invalid(
            "temperature",
            f"temperature is {temperature:g}; it must be from 0 (the likeliest token, also the default) "
            f"to {MAX_TEMPERATURE:g}.",
        )
    top_p = _number(body, "top_p", 1.0)
    if not 0.0 < top_p <= 1.0:
        raise invalid("top_p", f"top_p is {top_p:g}; it must be above 0 and at most 1.")
    top_k = _integer(body, "top_k")
    if top_k is not None and top_k < 0:
        raise invalid("top_k", f"top_k is {top_k}; it must be at least 0 (0 keeps every token).")
    seed = _integer(body, "seed")
    if seed is not None and not MIN_SEED <= seed <= MAX_SEED:
        raise invalid("seed", "seed must be an integer of 64 bits, from -2^63 to 2^63 - 1.")
    return SamplingChoice(temperature, top_p, 0 if not top_k or top_k >= vocab_size else top_k, seed)


def parse_stop(body: Mapping[str, Any], max_strings: int, max_chars: int) -> StopChoice:
    """Check the stop fields. Raises: ApiError 400 that names the field."""
    included = body.get("include_stop_str_in_output")
    if included is not None and type(included) is not bool:
        raise wrong_type("include_stop_str_in_output", included, "a boolean")
    value = body.get("stop")
    if value is None:
        return StopChoice((), included is True)
    listed = type(value) is list
    if not listed and type(value) is not str:
        raise wrong_type("stop", value, f"a string or a list of at most {max_strings} strings")
    strings: list[Any] = value if listed else [value]
    if len(strings) > max_strings:
        raise invalid("stop", f"stop has {len(strings)} strings; at most {max_strings} are served.")
    for index, string in enumerate(strings):
        param = f"stop[{index}]" if listed else "stop"
        if type(string) is not str:
            raise wrong_type(param, string, "a string")
        if not string:
            raise invalid(param, f"{param} is empty; a stop string has at least one character.")
        if len(string) > max_chars:
            raise invalid(param, f"{param} has {len(string)} characters; at most {max_chars} are served.")
    return StopChoice(tuple(dict.fromkeys(strings)), included is True)


def _number(body: Mapping[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if not is_number(value):
        raise wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError:
        raise invalid(name, f"{name} is out of range.") from None


def _integer(body: Mapping[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise wrong_type(name, value, "an integer")
    return value
