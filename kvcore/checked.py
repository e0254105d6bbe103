"""Checks of plain numbers and arrays at kvcore's borders.

Owns the rule for what counts as an exact integer: Python and NumPy integers are, booleans and floats are not.
Invariant: a value that passes is a Python int or an int64 array within the stated range; nothing is rounded or
wrapped. Source: contracts K035, K244.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from .contract_errors import IdOutOfRange, LengthMismatch, NegativeCount, SlotIdOverflow, WrongDtype

Array = np.ndarray[Any, np.dtype[Any]]

SLOT_ID_LIMIT = 2**31
"""Slot ids and block ids are kept in int32 tables."""


def checked_int(name: str, value: object, least: int = 0, limit: int | None = None) -> int:
    """`value` as a Python int in `[least, limit)`. Raises: WrongDtype, NegativeCount, IdOutOfRange."""
    if isinstance(value, (bool, np.bool_)):
        raise WrongDtype(name, type(value).__name__)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise WrongDtype(name, type(value).__name__) from error
    if number < least:
        raise NegativeCount(name, number, least)
    if limit is not None and number >= limit:
        raise IdOutOfRange(name, number, limit)
    return number


def checked_array(name: str, values: Sequence[int] | Array, least: int = 0, limit: int = 2**62) -> Array:
    """`values` as an int64 vector of numbers in `[least, limit)`; an empty one may have any dtype.

    Raises: WrongDtype, LengthMismatch (not a vector), NegativeCount, IdOutOfRange.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise LengthMismatch(name, 1, 2) from error
    if array.ndim != 1:
        raise LengthMismatch(name, 1, array.ndim)
    if isinstance(values, (list, tuple)) and any(isinstance(value, (bool, np.bool_)) for value in values):
        raise WrongDtype(name, "bool")  # NumPy would turn it into a number beside other numbers
    if not len(array):
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        return _checked_objects(name, array, least, limit)
    lowest, highest = int(array.min()), int(array.max())
    if lowest < least:
        raise NegativeCount(name, lowest, least)
    if highest >= limit:
        raise IdOutOfRange(name, highest, limit)
    return array.astype(np.int64)


def checked_slots(num_blocks: object, block_size: object) -> int:
    """Slots of a pool, `num_blocks * block_size`. Raises: SlotIdOverflow where slot ids would not fit."""
    blocks = checked_int("num_blocks", num_blocks)
    rows = checked_int("block_size", block_size, least=1)
    if blocks * rows > SLOT_ID_LIMIT:
        raise SlotIdOverflow(blocks, rows, SLOT_ID_LIMIT)
    return blocks * rows


def _checked_objects(name: str, array: Array, least: int, limit: int) -> Array:
    """Integers beyond 64 bits arrive as objects: they are out of range, anything else is a wrong dtype."""
    if array.dtype.kind == "O":
        for value in array.tolist():
            checked_int(name, value, least, limit)
    raise WrongDtype(name, str(array.dtype))


def same_length(name: str, expected: int, values: Sequence[Any] | Array) -> None:
    """Raises: LengthMismatch."""
    if len(values) != expected:
        raise LengthMismatch(name, expected, len(values))
