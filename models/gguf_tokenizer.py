"""Owns the building of a `tokenizer.json` from the vocabulary, merges and flags inside a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .errors import ModelFileInvalid, UnsupportedModel
from .source import TokenizerSpec

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


class GgufFields:
    """Metadata of a GGUF file by name; a call without a default refuses a file that lacks the field."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path = path
        self._fields = fields

    def __call__(self, name: str, *default: Any) -> Any:
        """Raises: `ModelFileInvalid`."""
        field = self._fields.get(name)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ModelFileInvalid(self.path, f"no field {name}")


def build_tokenizer(field: GgufFields) -> TokenizerSpec:
    """The byte-level BPE of the file, with its template and named tokens.

    Raises: `UnsupportedModel`, `ModelFileInvalid`; `ValueError` and its like for inconsistent lists.
    """
    kind, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UnsupportedModel(field.path, f"tokenizer model {kind!r}, only byte-level BPE 'gpt2' is read")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    bos, eos = field("tokenizer.ggml.bos_token_id", None), field("tokenizer.ggml.eos_token_id", None)
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    built.pre_tokenizer = _pre_tokenizer(pre, field.path)
    built.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, field("tokenizer.ggml.token_type"), strict=True))
    built.add_special_tokens([AddedToken(token, special=True) for token, k in kinds if k == _CONTROL])
    built.add_tokens([AddedToken(token, special=False) for token, k in kinds if k == _USER_DEFINED])
    if bos is not None and field("tokenizer.ggml.add_bos_token", False):
        built.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return TokenizerSpec(
        built.to_str(),
        field("tokenizer.chat_template", None),
        None if bos is None else tokens[bos],
        None if eos is None else tokens[eos],
    )


def _pre_tokenizer(pre: str, path: Path) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre == "gpt-2":
        return byte_level
    if pre == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, whole])
    raise UnsupportedModel(path, f"pre-tokenizer {pre!r}")
