"""Refusals of kvcore's pure functions: a base class, and the reasons for input that means nothing.

Owns `ContractRefusal`, the base of manifest, byte and address refusals. Invariant: what raises one of these
computed nothing and changed nothing; the fields are the offending values and the text begins with the reason.
Each is also a ValueError, so that decoding a manifest reports it as an invalid value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar


class ContractRefusal(ValueError):
    """A value contradicts a contract; nothing was computed or changed."""

    reason: ClassVar[str] = ""

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), tuple(self._fields().values())

    def __str__(self) -> str:
        return f"{self.reason}: " + ", ".join(f"{name}={value!r}" for name, value in self._fields().items())

    def _fields(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@dataclass(eq=False)
class WrongDtype(ContractRefusal):
    """A quantity is not an integer, or an array does not hold integers. Nothing is converted."""

    name: str
    dtype: str
    reason: ClassVar[str] = "wrong_dtype"


@dataclass(eq=False)
class NegativeCount(ContractRefusal):
    """A count, a length or an id is below the least value it can have."""

    name: str
    value: int
    least: int
    reason: ClassVar[str] = "negative_count"


@dataclass(eq=False)
class EmptyInput(ContractRefusal):
    """Something that has no meaning without an element has none (K244)."""

    name: str
    reason: ClassVar[str] = "empty_input"


@dataclass(eq=False)
class LengthMismatch(ContractRefusal):
    """Two sequences that describe the same things differ in length, or an array has another rank."""

    name: str
    expected: int
    found: int
    reason: ClassVar[str] = "length_mismatch"


@dataclass(eq=False)
class IdOutOfRange(ContractRefusal):
    """An id or count is at or above its limit."""

    name: str
    value: int
    limit: int
    reason: ClassVar[str] = "id_out_of_range"


@dataclass(eq=False)
class LossyEvictionInExactMode(ContractRefusal):
    """What was asked for drops positions of a sequence, which changes outputs: no eviction under exact reuse (K200)."""

    asked: str
    reason: ClassVar[str] = "lossy_eviction_in_exact_mode"


@dataclass(eq=False)
class SlotIdOverflow(ContractRefusal):
    """Blocks times rows leave the range of slot ids, which tables and kernels keep in 31 bits."""

    num_blocks: int
    block_size: int
    limit: int
    reason: ClassVar[str] = "slot_id_overflow"
