"""Words by which a configuration chooses how kernels work; light enough for every process to import."""

from __future__ import annotations

from typing import Literal

SharedPrefix = Literal["auto", "off", "hydragen", "chunk"]
"""How a step reads K/V rows that several of its requests share: by the cost model, each for itself, or one way always."""
