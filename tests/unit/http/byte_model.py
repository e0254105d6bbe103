"""A byte-level toy tokenizer: token id = byte value, 256 ends a turn; ids up to 31,999 exist but have no text."""

from __future__ import annotations

from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from copyhold.cluster.http_schema import ServedModelInfo
from copyhold.models.tokenizer import ChatTokenizer

MODEL = ServedModelInfo(name="toy", max_model_len=256, vocab_size=32000, created=1_700_000_000)
END_OF_TURN = 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[assistant]"
)


def byte_tokenizer() -> ChatTokenizer:
    """Every byte is one token, so a character of n bytes takes n tokens."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    environment = ImmutableSandboxedEnvironment()
    environment.globals["raise_exception"] = _refuse
    return ChatTokenizer(
        tokenizer=tokenizer,
        template=environment.from_string(TEMPLATE),
        vocab_size=MODEL.vocab_size,
        eos_ids=frozenset({END_OF_TURN}),
        special_tokens={"eos_token": "<|end|>"},
        source=Path("toy"),
    )


def _refuse(message: str) -> None:
    raise ValueError(message)
