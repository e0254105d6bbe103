"""Time as an argument: what this room knows of clocks.

Invariant: no other module of the room reads a clock. ``now_s`` is wall time (seconds since the epoch, for
grants and certificates); ``monotonic_s`` never goes back (for leases).
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall and monotonic time in seconds."""

    def now_s(self) -> float: ...

    def monotonic_s(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()
