"""Owns text: encoding, decoding piece by piece, and the chat template in its sandbox. No torch here.

A token is a fixed run of bytes, so text is the UTF-8 decoding of the joined bytes and nothing else: whole
decode and joined deltas are one computation (case B39). Contract: K-lengths count token ids; templates never
see anything but messages and the names of special tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from .errors import ChatTemplateError, ModelFileInvalid, ModelFileMissing, UnsupportedModel
from .manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, read_manifest

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What a template can raise while it renders messages it does not like."""


class ChatTokenizer:
    """Tokenizer and chat template of one converted checkpoint; safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: jinja2.Template | None,
        vocab_size: int,
        eos_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        source: Path,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._pieces = _Pieces(tokenizer, source)

    @classmethod
    def load(cls, folder: Path) -> ChatTokenizer:
        """Read a converted folder.

        Raises: `ModelFileMissing`, `ModelFileInvalid`, `UnsupportedModel`.
        """
        manifest = read_manifest(folder)
        path = folder / TOKENIZER_NAME
        if not path.is_file():
            raise ModelFileMissing(path)
        names = {"bos_token": manifest.bos_token, "eos_token": manifest.eos_token}
        return cls(
            tokenizer=_read_tokenizer(path),
            template=_read_template(folder / CHAT_TEMPLATE_NAME),
            vocab_size=manifest.config.vocab_size,
            eos_ids=frozenset(manifest.config.eos_token_ids),
            special_tokens={name: token for name, token in names.items() if token is not None},
            source=path,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; the tokenizer's own first or last tokens are added unless declined."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of all tokens at once; special tokens and ids without a token are nothing."""
        whole = self.detokenizer()
        return whole.push(tokens) + whole.finish()

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one stream."""
        return Detokenizer(self._pieces)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation, ready for the assistant's turn.

        Raises: `ChatTemplateError`.
        """
        if self._template is None:
            raise ChatTemplateError("this model has no chat template")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateError(f"chat template: {' '.join(str(error).split())}") from error

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation's prompt; the template writes the special tokens itself.

        Raises: `ChatTemplateError`.
        """
        return self.encode(self.render_chat(messages), add_special_tokens=False)


class Detokenizer:
    """Turns a stream of token ids into text that never ends inside a character and is never taken back."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def push(self, tokens: Iterable[int]) -> str:
        """The characters that these tokens complete; bytes of an unfinished one wait."""
        return self._text(b"".join(map(self._pieces.bytes_of, tokens)), final=False)

    def finish(self) -> str:
        """What waits: a replacement mark for a truncated character, else nothing."""
        return self._text(b"", final=True)

    def _text(self, joined: bytes, final: bool) -> str:
        text = self._utf8.decode(joined, final)
        if self._at_start and text:
            self._at_start = False
            if self._pieces.strips_leading_space:
                text = text.removeprefix(" ")
        return text


class _Pieces:
    """The bytes of every token, from a byte-level or a byte-fallback tokenizer.

    Raises: `UnsupportedModel` for a tokenizer whose tokens are not fixed bytes.
    """

    def __init__(self, tokenizer: Tokenizer, source: Path) -> None:
        decoder = _parts((json.loads(tokenizer.to_str())).get("decoder"))
        kinds = {part["type"] for part in decoder}
        byte_level = "ByteLevel" in kinds
        if not byte_level and "ByteFallback" not in kinds:
            raise UnsupportedModel(source, "tokenizer is neither byte-level nor byte-fallback")
        self.strips_leading_space = any(
            part["type"] == "Strip" and part.get("start", 0) > 0 and part.get("content") == " "
            for part in decoder
        )
        added = tokenizer.get_added_tokens_decoder()
        alphabet = _byte_alphabet()
        self._bytes: dict[int, bytes] = {}
        for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
            if index in added and added[index].special:
                self._bytes[index] = b""
            elif byte_level:
                self._bytes[index] = _byte_level(token, alphabet)
            else:
                self._bytes[index] = _byte_fallback(token)

    def bytes_of(self, token: int) -> bytes:
        return self._bytes.get(token, b"")


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    """A token outside the byte alphabet stands for its own text."""
    values = [alphabet.get(character) for character in token]
    if None in values:
        return token.encode()
    return bytes(value for value in values if value is not None)


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ModelFileInvalid(path, str(error)) from error


def _read_template(path: Path) -> jinja2.Template | None:
    """The compiled template, or None where the model has none."""
    if not path.is_file():
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(path.read_text(encoding="utf-8"))
    except (jinja2.TemplateError, UnicodeDecodeError) as error:
        raise ModelFileInvalid(path, str(error)) from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
