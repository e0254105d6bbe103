"""From a request body to values the engine may see, or a refusal that names the field.

Owns parsing and validation of ``/v1/chat/completions`` and ``/v1/completions``. Invariant: what it returns
holds only token ids inside the vocabulary and lengths that fit the context (K095), and every item of a
batch is checked before any is returned. JSON's types are kept apart: true is not 1, 1.0 is not 1, "7" is
text. Absent fields mean what OpenAI's do, but for ``temperature``: absent is 0, greedy and repeatable
(see ``http_sampling``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from copyhold.actors.retention import DEFAULT_RETENTION, Retention

from .http_errors import ApiError, invalid, model_not_found
from .http_retention import RETENTION_NAMES, parse_retention
from .http_rules import CHAT_CHECKS, COMPLETION_CHECKS, check_parameters, wrong_type
from .http_sampling import (
    SAMPLING_NAMES,
    STOP_NAMES,
    SamplingChoice,
    StopChoice,
    parse_sampling,
    parse_stop,
)


class ServedModelInfo(msgspec.Struct, frozen=True):
    """What the gateway knows of the model it fronts; lengths in tokens, ``created`` in Unix seconds."""

    name: str
    max_model_len: int
    vocab_size: int
    created: int = 0
    owned_by: str = "copyhold"


class GatewaySettings(msgspec.Struct, frozen=True):
    """Bounds of the tenant port."""

    max_tokens_default: int = 1024
    max_body_bytes: int = 8 * 2**20
    max_prompts: int = 64
    max_stop_token_ids: int = 64
    max_stop_strings: int = 4
    max_stop_chars: int = 256
    auth_failure_burst: int = 20
    auth_failures_per_s: float = 1.0
    auth_sources: int = 4096


class Options(msgspec.Struct, frozen=True):
    """What a request asks of each of its generations; ``max_tokens_param`` is the name the caller used."""

    max_tokens: int | None
    max_tokens_param: str
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool
    sampling: SamplingChoice
    stop: StopChoice
    retention: Retention = DEFAULT_RETENTION


class ChatRequest(msgspec.Struct, frozen=True):
    """A checked chat body; its messages go through the chat template next."""

    messages: tuple[dict[str, str], ...]
    options: Options


class CompletionRequest(msgspec.Struct, frozen=True):
    """A checked completion body: texts, or token ids inside the vocabulary, one entry per choice.

    ``listed``: the caller sent a list of prompts, of any length.
    """

    prompts: tuple[str | list[int], ...]
    listed: bool
    options: Options

    def param(self, index: int) -> str:
        """The caller's name of one prompt."""
        return f"prompt[{index}]" if self.listed else "prompt"


_OPTION_NAMES = frozenset(
    {"model", "max_tokens", "stream", "stream_options", "stop_token_ids", "ignore_eos", "return_token_ids"}
    | SAMPLING_NAMES
    | STOP_NAMES
    | RETENTION_NAMES
)
_CHAT_NAMES = _OPTION_NAMES | {"messages", "max_completion_tokens"}
_COMPLETION_NAMES = _OPTION_NAMES | {"prompt"}
# "developer" is OpenAI's newer name of the system role.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_MESSAGE_NAMES = frozenset({"role", "content", "name", "refusal"})


def decode_body(body: bytes) -> dict[str, Any]:
    """Decode a JSON object. Raises: ApiError 400 for anything else."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(None, f"The body is not valid JSON: {reason}.", "invalid_json") from None
    if type(value) is not dict:
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    return value


def parse_chat(body: Mapping[str, Any], model: ServedModelInfo, settings: GatewaySettings) -> ChatRequest:
    """Check a chat body. Raises: ApiError 400 or 404."""
    _check_model(body, model)
    check_parameters(body, CHAT_CHECKS, _CHAT_NAMES)
    return ChatRequest(_messages(body.get("messages")), _options(body, model, settings))


def parse_completion(
    body: Mapping[str, Any], model: ServedModelInfo, settings: GatewaySettings
) -> CompletionRequest:
    """Check a completion body, every prompt of it. Raises: ApiError 400 or 404."""
    _check_model(body, model)
    check_parameters(body, COMPLETION_CHECKS, _COMPLETION_NAMES)
    prompts, listed = _prompts(body.get("prompt"), model, settings)
    return CompletionRequest(prompts, listed, _options(body, model, settings))


def new_token_budget(
    prompt_tokens: int, param: str, options: Options, model: ServedModelInfo, settings: GatewaySettings
) -> int:
    """How many tokens the request may produce. Raises: ApiError 400 if they exceed the context."""
    if prompt_tokens == 0:
        raise invalid(param, f"{param} has no token.", "empty_prompt")
    room = model.max_model_len - prompt_tokens
    context = f"The model's context is {model.max_model_len} tokens"
    if room < 1:
        message = f"{context}; {param} has {prompt_tokens} and leaves no room for an answer."
        raise invalid(param, message, "context_length_exceeded")
    if options.max_tokens is None:
        return min(settings.max_tokens_default, room)
    if options.max_tokens > room:
        asked = f"{param} has {prompt_tokens} and {options.max_tokens_param} asks for {options.max_tokens}"
        raise invalid(options.max_tokens_param, f"{context}; {asked}.", "context_length_exceeded")
    return options.max_tokens


def _check_model(body: Mapping[str, Any], model: ServedModelInfo) -> None:
    name = body.get("model")
    if type(name) is not str:
        raise wrong_type("model", name, "a string")
    if name != model.name:
        raise model_not_found(name[:200])


def _options(body: Mapping[str, Any], model: ServedModelInfo, settings: GatewaySettings) -> Options:
    max_tokens, param = _max_tokens(body)
    stream = _flag(body, "stream")
    return Options(
        max_tokens,
        param,
        _stop_token_ids(body.get("stop_token_ids"), model, settings),
        _flag(body, "ignore_eos"),
        _flag(body, "return_token_ids"),
        stream,
        _include_usage(body.get("stream_options"), stream),
        parse_sampling(body, model.vocab_size),
        parse_stop(body, settings.max_stop_strings, settings.max_stop_chars),
        parse_retention(body),
    )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise wrong_type(name, value, "a boolean")
    return value is True


def _max_tokens(body: Mapping[str, Any]) -> tuple[int | None, str]:
    found: tuple[int | None, str] = (None, "max_tokens")
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int:
            raise wrong_type(name, value, "an integer")
        if value < 1:
            raise invalid(name, f"{name} is {value}; it must be at least 1.")
        if found[0] is not None and found[0] != value:
            raise invalid(name, f"{name} is {value} but {found[1]} is {found[0]}; give one of them.")
        found = (value, name)
    return found


def _include_usage(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if type(value) is not dict:
        raise wrong_type("stream_options", value, "an object")
    if not stream:
        raise invalid("stream_options", "stream_options is allowed only when stream is true.")
    for name, flag in value.items():
        param = f"stream_options.{name[:64]}"
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid(param, f"Unknown parameter: {param!r}.", "unknown_parameter")
        if flag is not None and type(flag) is not bool:
            raise wrong_type(param, flag, "a boolean")
    return value.get("include_usage") is True


def _stop_token_ids(value: Any, model: ServedModelInfo, settings: GatewaySettings) -> tuple[int, ...]:
    if value is None:
        return ()
    if type(value) is not list:
        raise wrong_type("stop_token_ids", value, "a list of token ids")
    if len(value) > settings.max_stop_token_ids:
        raise invalid("stop_token_ids", f"stop_token_ids has more than {settings.max_stop_token_ids} ids.")
    _check_ids("stop_token_ids", value, model)
    return tuple(dict.fromkeys(value))


def _check_ids(param: str, ids: Sequence[Any], model: ServedModelInfo) -> None:
    """Refuse the first id that is no integer or lies outside the vocabulary; two C passes if all is well."""
    if all(kind is int for kind in set(map(type, ids))) and (
        not ids or (min(ids) >= 0 and max(ids) < model.vocab_size)
    ):
        return
    for index, token in enumerate(ids):
        where = f"{param}[{index}]"
        if type(token) is not int:
            raise wrong_type(where, token, "a token id (an integer)")
        if not 0 <= token < model.vocab_size:
            message = f"{where} is {token}; token ids of this model are 0 to {model.vocab_size - 1}."
            raise invalid(where, message, "token_id_out_of_range")


def _prompts(
    value: Any, model: ServedModelInfo, settings: GatewaySettings
) -> tuple[tuple[str | list[int], ...], bool]:
    """Text, a list of texts, a list of token ids, or a list of such lists; never mixed, never empty."""
    if type(value) is str:
        if not value:
            raise _empty("prompt")
        return (value,), False
    if type(value) is not list:
        raise wrong_type("prompt", value, "a string, a list of strings, or token ids")
    if not value:
        raise _empty("prompt")
    kind = type(value[0])
    if kind not in (str, list):
        _check_ids("prompt", value, model)
        return (value,), False
    if len(value) > settings.max_prompts:
        raise invalid(
            "prompt", f"prompt has {len(value)} entries; at most {settings.max_prompts} are served."
        )
    for index, item in enumerate(value):
        param = f"prompt[{index}]"
        if type(item) is not kind:
            raise wrong_type(param, item, "a string" if kind is str else "a list of token ids")
        if not item:
            raise _empty(param)
        if kind is list:
            _check_ids(param, item, model)
    return tuple(value), True


def _empty(param: str) -> ApiError:
    return invalid(param, f"{param} is empty; it needs at least one token.", "empty_prompt")


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if type(value) is not list:
        raise wrong_type("messages", value, "a list of messages")
    if not value:
        raise invalid("messages", "messages is empty; it needs at least one message.", "empty_prompt")
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(value))


def _message(param: str, value: Any) -> dict[str, str]:
    if type(value) is not dict:
        raise wrong_type(param, value, "an object")
    for name, content in value.items():
        if name not in _MESSAGE_NAMES and content not in (None, []):
            where = f"{param}.{name[:64]}"
            raise invalid(where, f"{where} is not served today.", "unsupported_parameter")
    role = value.get("role")
    if type(role) is not str:
        raise wrong_type(f"{param}.role", role, "a string")
    if role not in _ROLES:
        message = f"{param}.role = {role[:40]!r} is not served; roles are {', '.join(_ROLES)}."
        raise invalid(f"{param}.role", message, "unsupported_value")
    checked = {"role": _ROLES[role], "content": _content(f"{param}.content", value.get("content"))}
    name = value.get("name")
    if name is not None:
        if type(name) is not str:
            raise wrong_type(f"{param}.name", name, "a string")
        checked["name"] = name
    return checked


def _content(param: str, value: Any) -> str:
    """Text, or a list of text parts, joined."""
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(param, value, "a string or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        where = f"{param}[{index}]"
        if type(part) is not dict:
            raise wrong_type(where, part, "an object")
        if part.get("type") != "text":
            raise invalid(f"{where}.type", f"{where}: only text parts are served today.", "unsupported_value")
        if type(part.get("text")) is not str:
            raise wrong_type(f"{where}.text", part.get("text"), "a string")
        texts.append(part["text"])
    return "".join(texts)
