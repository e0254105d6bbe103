"""What an operator chooses of recording, and what a replica says of it.

Apart from recording.py, which loads the ledger: whoever only starts replicas does without it.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RecordingSettings(msgspec.Struct, frozen=True):
    """Where a replica records; ``limit_bytes`` bounds all its files together, ``max_age_s`` what is in them."""

    folder: str
    limit_bytes: int
    max_age_s: float


class RecordingReport(msgspec.Struct, frozen=True):
    """``state`` is off, on, or stopped for the reason in ``detail``.

    ``first_index``, ``records`` and ``file_bytes`` are those of the file being written.
    """

    state: Literal["off", "on", "stopped"] = "off"
    file: str = ""
    first_index: int = 0
    records: int = 0
    file_bytes: int = 0
    files: int = 0
    erased_files: int = 0
    detail: str = ""
