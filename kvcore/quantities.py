"""Exact quantities that do not mix: bytes by the question they answer, counts, addresses.

Owns one small class a kind. Invariant: a quantity is a non-negative exact number of its own kind; adding,
subtracting or ordering two kinds raises the contract's reason for that pair instead of giving a number. `value`
leaves the kind behind and is for printing and for identities that span kinds on purpose.
Source: contracts K021, K023, K025 to K029, K035, K056.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar, Self

from .address_errors import SlotIdUsedAsAddress
from .byte_errors import (
    CapacityReportedAsTraffic,
    ExpectationReportedAsObservation,
    ExternalRatioAddedToSlack,
    MetadataMixedWithPayload,
    QuantitiesMixed,
    RatioWithoutFreeBytes,
    ReferencesCountedAsBlocks,
    ReservedReportedAsLive,
    SavingsLedgersConflated,
)
from .checked import checked_int
from .contract_errors import NegativeCount


class Quantity:
    """A non-negative exact integer of one kind. Raises: WrongDtype, NegativeCount."""

    __slots__ = ("value",)
    unit: ClassVar[str] = ""
    value: Any

    def __init__(self, value: int) -> None:
        object.__setattr__(self, "value", checked_int(type(self).__name__, value))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return type(self), (self.value,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.value == self.value  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.value))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.value + self._same_kind(other))

    def __radd__(self, other: object) -> Self:
        if type(other) is int and other == 0:  # the start of sum()
            return self
        raise mixing(self, other)

    def __sub__(self, other: Self) -> Self:
        return type(self)(self.value - self._same_kind(other))

    def __rsub__(self, other: object) -> Self:
        raise mixing(self, other)

    def __lt__(self, other: Self) -> bool:
        return self.value < self._same_kind(other)

    def __le__(self, other: Self) -> bool:
        return self.value <= self._same_kind(other)

    def __gt__(self, other: Self) -> bool:
        return self.value > self._same_kind(other)

    def __ge__(self, other: Self) -> bool:
        return self.value >= self._same_kind(other)

    def _same_kind(self, other: object) -> Any:
        if type(other) is not type(self):
            raise mixing(self, other)
        return other.value  # type: ignore[attr-defined]


class RowBytes(Quantity):
    """Bytes of one token's K and V; rows of several groups add up."""

    unit = "bytes/row"


class RequestBytes(Quantity):
    """Bytes as requests see them: a shared row counts once a request."""

    unit = "bytes"


class PhysicalBytes(Quantity):
    """Bytes of K/V storage: a row counts once, however many requests read it."""

    unit = "bytes"


class SavedPayloadBytes(Quantity):
    """Rows that sharing kept from being stored again."""

    unit = "bytes"


class AvoidedCapacityBytes(Quantity):
    """Whole blocks that sharing kept from being taken."""

    unit = "bytes"


class MetadataBytes(Quantity):
    """Bytes of tables, descriptors, hashes and queues."""

    unit = "bytes"


class HeldBytes(Quantity):
    """Bytes a process holds for its whole pool, in use or idle."""

    unit = "bytes"


class PaddingBytes(Quantity):
    """Bytes between the end of a page's rows and the end of the page."""

    unit = "bytes"


class CapacityBytes(Quantity):
    """Capacity of the blocks that a copy is written to."""

    unit = "bytes"


class TrafficBytes(Quantity):
    """Bytes that a copy and the append after it read and write."""

    unit = "bytes"


class BlockReferences(Quantity):
    """Entries of block tables."""

    unit = "references"


class UniqueBlocks(Quantity):
    """Distinct physical blocks."""

    unit = "blocks"


class SlotId(Quantity):
    """Row number within a group's pool: physical slot x block size + token offset."""

    unit = "slot"


class ElementOffset(Quantity):
    """Scalars from a tensor's first scalar."""

    unit = "elements"


class ByteOffset(Quantity):
    """Bytes from a tensor's first byte."""

    unit = "bytes"


class ByteAddress(Quantity):
    """Absolute address of a scalar's first byte."""

    unit = "bytes"


class ExpectedSlots(Quantity):
    """Mean number of unused slots under a stated distribution: a model's value, not a count."""

    unit = "slots (model)"

    def __init__(self, value: Fraction | int) -> None:
        if value < 0:
            raise NegativeCount(type(self).__name__, int(value), 0)
        object.__setattr__(self, "value", Fraction(value))


class ExpectedBytes(ExpectedSlots):
    """Mean number of unused bytes under a stated distribution: a model's value, not a measurement."""

    unit = "bytes (model)"


class ExternalRatio(Quantity):
    """1 - largest free extent / free bytes; without free bytes it has no value (K028)."""

    __slots__ = ("free_bytes",)
    unit = "ratio"
    free_bytes: int

    def __init__(self, value: Fraction | None, free_bytes: int) -> None:
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "free_bytes", checked_int("free_bytes", free_bytes))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.value, self.free_bytes)

    def __str__(self) -> str:
        return "not_applicable" if self.value is None else str(self.value)

    def __add__(self, other: object) -> Self:
        raise mixing(self, other)

    def __sub__(self, other: object) -> Self:
        raise mixing(self, other)

    @property
    def fraction(self) -> Fraction:
        """The ratio. Raises: RatioWithoutFreeBytes."""
        if self.value is None:
            raise RatioWithoutFreeBytes(self.free_bytes)
        return self.value


_TRANSLATED = (ElementOffset, ByteOffset, ByteAddress)
_RULES: tuple[tuple[tuple[type, ...], tuple[type, ...], Any], ...] = (
    ((ExternalRatio,), (object,), ExternalRatioAddedToSlack),
    ((ExpectedSlots,), (object,), ExpectationReportedAsObservation),
    ((SlotId,), _TRANSLATED, SlotIdUsedAsAddress),
    ((MetadataBytes,), (Quantity,), MetadataMixedWithPayload),
    ((HeldBytes,), (PhysicalBytes, RequestBytes), ReservedReportedAsLive),
    ((SavedPayloadBytes,), (AvoidedCapacityBytes,), SavingsLedgersConflated),
    ((BlockReferences,), (UniqueBlocks,), ReferencesCountedAsBlocks),
    ((CapacityBytes,), (TrafficBytes,), CapacityReportedAsTraffic),
)
"""Which reason names a pair; the first rule that fits decides, in either order."""


def mixing(left: object, right: object) -> Exception:
    """The refusal of combining these two."""
    for one, other, refusal in _RULES:
        if (isinstance(left, one) and isinstance(right, other)) or (
            isinstance(left, other) and isinstance(right, one)
        ):
            return refusal(repr(left), repr(right))
    return QuantitiesMixed(repr(left), repr(right))


def plain(value: Any) -> Any:
    """Quantities, structs, mappings and sequences as JSON's own types; fractions as text."""
    if isinstance(value, ExternalRatio):
        return str(value)
    if isinstance(value, Quantity):
        return plain(value.value)
    if isinstance(value, Fraction):
        return str(value)
    if hasattr(value, "__struct_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value
