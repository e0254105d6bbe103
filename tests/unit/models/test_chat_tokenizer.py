"""Text in and out: streamed text equals whole text, templates stay in their sandbox, refusals have types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoint import byte_level_tokenizer, make_tiny_checkpoint
from tokenizers import Tokenizer, decoders, models

from copyhold.models.convert import convert
from copyhold.models.errors import ChatTemplateError, ModelFileInvalid, ModelFileMissing, UnsupportedModel
from copyhold.models.tokenizer import ChatTokenizer

MARK = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("tokenizer")
    return convert(make_tiny_checkpoint(base / "hf"), base / "cache", 1).path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(folder)


def one_byte_tokens(data: bytes) -> list[int]:
    """The ids of the toy's single-byte tokens, whatever the merges would prefer."""
    raw = byte_level_tokenizer()
    ids = [raw.token_to_id(raw_character) for raw_character in _characters(data)]
    assert None not in ids
    return [index for index in ids if index is not None]


def _characters(data: bytes) -> list[str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in plain}
    table |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in table)}
    return [table[byte] for byte in data]


def streamed(tokenizer: ChatTokenizer, ids: list[int], step: int = 1) -> list[str]:
    stream = tokenizer.detokenizer()
    deltas = [stream.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    return [*deltas, stream.finish()]


B39 = b"A \xe4\xb8\x96a\xed\x95\x9c\xf0\x9f\x98\x80e\xcc\x81 end"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (B39, "A 世a한😀e\u0301 end"),
        (B39[:4], "A " + MARK),
        (B39[:5] + b"\xff" + B39[5:], "A 世" + MARK + "a한😀e\u0301 end"),
    ],
    ids=["whole", "truncated", "invalid"],
)
def test_streamed_text_is_whole_text(tokenizer: ChatTokenizer, data: bytes, text: str) -> None:
    ids = one_byte_tokens(data)
    for step in (1, 2, 3, 7, len(ids)):
        deltas = streamed(tokenizer, ids, step)
        assert "".join(deltas) == text == tokenizer.decode(ids)


def test_a_truncated_character_is_marked_once_and_only_at_the_end(tokenizer: ChatTokenizer) -> None:
    deltas = streamed(tokenizer, one_byte_tokens(B39[:4]))
    assert deltas == ["A", " ", "", "", MARK]


@given(data=st.binary(max_size=40), step=st.integers(1, 5))
def test_any_bytes_stream_to_what_the_library_decodes(
    tokenizer: ChatTokenizer, data: bytes, step: int
) -> None:
    ids = one_byte_tokens(data)
    assert "".join(streamed(tokenizer, ids, step)) == byte_level_tokenizer().decode(ids)


@given(text=st.text(max_size=60))
def test_text_survives_encoding(tokenizer: ChatTokenizer, text: str) -> None:
    if any(token in text for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        return
    text = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text)
    assert ids == byte_level_tokenizer().encode(text).ids
    assert tokenizer.decode(ids) == text == "".join(streamed(tokenizer, ids))


def test_special_and_unknown_ids_are_silent_within_a_character(tokenizer: ChatTokenizer) -> None:
    first, second, third = one_byte_tokens("世".encode())
    assert streamed(tokenizer, [first, 2, second, 10**6, third]) == ["", "", "", "", "世", ""]


def test_vocabulary_and_end_tokens_come_from_the_checkpoint(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.vocab_size == 300 and tokenizer.eos_ids == {2}


def test_chat_template_renders_and_encodes_special_tokens(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "and the?"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nand the?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    ids = tokenizer.apply_chat_template(messages)
    assert ids == byte_level_tokenizer().encode(text).ids and ids.count(1) == 3 and ids.count(2) == 2


def test_a_template_refusal_is_a_typed_one_line_error(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="unknown role pirate"):
        tokenizer.apply_chat_template([{"role": "pirate", "content": "x"}])
    with pytest.raises(ChatTemplateError):
        tokenizer.apply_chat_template([{"role": "user", "content": None}])
    with pytest.raises(ChatTemplateError):
        tokenizer.apply_chat_template([{}])


def with_template(folder: Path, target: Path, template: str | None) -> Path:
    target.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    if template is not None:
        (target / "chat_template.jinja").write_text(template)
    return target


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ ''.__class__.__base__ }}{{ raise_exception.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(folder: Path, tmp_path: Path, template: str) -> None:
    hostile = ChatTokenizer.load(with_template(folder, tmp_path / "m", template))
    with pytest.raises(ChatTemplateError):
        hostile.apply_chat_template([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_says_so(folder: Path, tmp_path: Path) -> None:
    plain = ChatTokenizer.load(with_template(folder, tmp_path / "m", None))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        plain.apply_chat_template([{"role": "user", "content": "x"}])


def test_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    broken = with_template(folder, tmp_path / "m", "{% for %}")
    with pytest.raises(ModelFileInvalid, match=r"chat_template\.jinja"):
        ChatTokenizer.load(broken)
    (broken / "chat_template.jinja").unlink()
    (broken / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ModelFileInvalid, match=r"tokenizer\.json"):
        ChatTokenizer.load(broken)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(ModelFileMissing, match=r"tokenizer\.json"):
        ChatTokenizer.load(broken)


def test_byte_fallback_tokenizers_strip_one_leading_space_and_join_bytes(
    folder: Path, tmp_path: Path
) -> None:
    vocab = {"<unk>": 0, "<0xE4>": 1, "<0xB8>": 2, "<0x96>": 3, "\u2581a": 4, "b": 5}
    toy = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    toy.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    target = with_template(folder, tmp_path / "m", None)
    toy.save(str(target / "tokenizer.json"))
    loaded = ChatTokenizer.load(target)
    ids = [4, 1, 2, 3, 4, 5]
    assert loaded.decode(ids) == "a世 ab" == toy.decode(ids) == "".join(streamed(loaded, ids))


def test_a_tokenizer_whose_tokens_are_not_bytes_is_refused(folder: Path, tmp_path: Path) -> None:
    target = with_template(folder, tmp_path / "m", None)
    raw = json.loads((target / "tokenizer.json").read_text())
    raw["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (target / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModel, match="neither byte-level nor byte-fallback"):
        ChatTokenizer.load(target)
