"""Words by which a configuration chooses how kernels work; light enough for every process to import."""

from __future__ import annotations

from typing import Literal

KVDtype = Literal["float32", "bfloat16", "float16"]
"""How K/V rows are kept; sums are float32 in every case."""

KVChoice = Literal["auto", "float32", "bfloat16", "float16"]
"""What an operator may ask for; `kv_dtype_for` says what auto is."""

BackendChoice = Literal["auto", "triton", "cpu", "reference"]
"""What an operator may ask for; auto: the first of `dispatch.BACKENDS` that can serve."""

SharedPrefix = Literal["auto", "off", "hydragen", "chunk"]
"""How a step reads K/V rows that several of its requests share: by the cost model, each for itself, or one way always."""


def kv_dtype_for(choice: KVChoice) -> KVDtype:
    """`auto` keeps K/V in float32: what a hit reads is then what the model computed, bit for bit."""
    return "float32" if choice == "auto" else choice
