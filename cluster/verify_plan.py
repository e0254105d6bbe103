"""What ``copyhold verify`` runs: which cuts of the model, which block sizes, which prompts, which bounds.

Owns the bounds (docs/verify.md says where they come from) and the texts. Prompts are slices of one text, so that any
tokenizer will do: all begin alike, end apart, and no length is a multiple of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from copyhold.kernels.choices import KVDtype
from copyhold.models.config import ModelConfig
from copyhold.models.layout import Dtype
from copyhold.models.tokenizer import ChatTokenizer

BOUNDS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest difference of a logit from the cold run's, as a share of that run's largest logit."""

ROW_BOUND_SHARES: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 5e-2}
"""The same for stored K/V rows, as a share of the largest value stored."""

_TEXT = (
    "The harbour keeps a book of every ship that has called here since the first pier was built. A clerk writes the name "
    "of the vessel, the day, what she carried and who paid the dues. Nobody may tear out a page, and nobody reads the pages "
    "of another house without its leave. When a house closes its account, its pages are cut out, counted twice and burned, "
    "and the clerk signs for every leaf. Old captains say that the book is the only honest thing in the port. On winter "
    "evenings the harbour master reads from it aloud, beginning with the storms, for storms are what sailors believe in."
)
_OWN_WORDS = (
    " Tonight he begins with the year of the great ice,",
    " A child asks why the ink of some years is brown and of others blue. He answers",
    " The lamp goes out.",
    " Two brothers, who have not spoken since spring, sit on the same bench and listen, because the third ship on the page",
)


class VerifyCase(msgspec.Struct, frozen=True):
    """One cut of the model in one memory geometry."""

    tp: int
    block_size: int
    dtype: Dtype
    deterministic: bool = False
    kv_dtype: KVDtype = "float32"
    whole: bool = False
    """All prompts and longer replies; else two prompts"""
    other_block_sizes: tuple[int, ...] = ()
    """Of further cache groups, which the layers are divided among"""

    @property
    def label(self) -> str:
        kept = "" if self.kv_dtype == "float32" else f", K/V {self.kv_dtype}"
        mode = " deterministic" if self.deterministic else ""
        sizes = "+".join(str(size) for size in (self.block_size, *self.other_block_sizes))
        blocks = "blocks" if self.other_block_sizes else "block"
        return f"tp {self.tp}, {blocks} {sizes}, {self.dtype}{kept}{mode}"

    @property
    def bound_dtype(self) -> Dtype:
        """The coarser of the two types, which says how equal things can be."""
        return "float32" if self.dtype == self.kv_dtype == "float32" else "bfloat16"


class VerifyPrompts(msgspec.Struct, frozen=True):
    """Token ids that begin alike; ``new_tokens`` are generated after each."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int

    @property
    def longest(self) -> int:
        return max(len(prompt) for prompt in self.prompts) + self.new_tokens


def verify_cases(config: ModelConfig, quick: bool) -> list[VerifyCase]:
    """Every degree of tensor parallelism up to three that the model allows, both block sizes, both dtypes, and layers in
    two cache groups of either size."""
    degrees = range(1, min(3, config.num_kv_heads) + 1)
    cases = [VerifyCase(1, 16, "float32", whole=not quick)]
    if not quick:
        cases.append(VerifyCase(1, 32, "float32"))
    cases += [VerifyCase(tp, 16, "float32") for tp in degrees[1:] if not quick or tp == degrees[-1]]
    several = config.num_layers > 1
    if several:
        cases.append(VerifyCase(1, 16, "float32", other_block_sizes=(32,)))
    if several and not quick:
        widest = degrees[-1]
        cases.append(VerifyCase(widest, 32, "float32", deterministic=True, other_block_sizes=(16,)))
    if not quick:
        cases.append(VerifyCase(1, 16, "bfloat16"))
        cases.append(VerifyCase(1, 16, "float32", kv_dtype="bfloat16"))
        cases.append(VerifyCase(1, 16, "float32", deterministic=True))
        if len(degrees) > 1:
            cases.append(VerifyCase(2, 16, "bfloat16", deterministic=True, kv_dtype="bfloat16"))
    return cases


def verify_prompts(folder: Path, whole: bool) -> VerifyPrompts:
    """Prompts of a converted checkpoint. Raises: what ``ChatTokenizer.load`` raises."""
    tokenizer = ChatTokenizer.load(folder)

    def ids(text: str, most: int) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)[:most]

    shared = ids(_TEXT, 70)
    own = [ids(text, most) for text, most in zip(_OWN_WORDS, (11, 21, 5, 27), strict=True)]
    prompts = tuple((*shared, *tail) for tail in (own if whole else own[:2]))
    return VerifyPrompts(prompts, 6 if whole else 4)
