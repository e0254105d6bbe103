"""What SIGINT, SIGTERM and SIGHUP mean to a run: while it serves they unwind, while it ends they hurry."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequested(SystemExit):
    """A signal asked the process to end; unwinding stops the run. Exit code 128 plus the signal's number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


@contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``StopRequested`` in the main thread; SIGINT raises KeyboardInterrupt as always."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise StopRequested(number)

    with _handled((signal.SIGTERM, signal.SIGHUP), unwind):
        yield


@contextmanager
def signals_call(hurry: Callable[[], None]) -> Iterator[None]:
    """An ending signal calls ``hurry`` and interrupts nothing; off the main thread signals stay as they are."""

    def call(number: int, frame: FrameType | None) -> None:
        hurry()

    if threading.current_thread() is threading.main_thread():
        with _handled(_ENDING, call):
            yield
    else:
        yield


@contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
