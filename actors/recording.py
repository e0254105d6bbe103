"""Recording: the log files of one replica, bounded in size and age.

Owns the file being written and when the next one begins. Invariants: recording never stops serving (what cannot be
written ends the recording, and the report says why); together the files of a replica stay within their bound and none
holds anything older than its age; every file replays by itself, from Genesis or from a checkpoint.
Source: LEDGER "Recording". What happens to files that nobody writes any more: recorded_files.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from copyhold.kvcore.checkpoint import take_checkpoint
from copyhold.kvcore.commands import Admit, Command
from copyhold.kvcore.errors import LedgerRefusal
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.log import Recorder
from copyhold.kvcore.receipts import Receipt

from .recorded_files import SUFFIX, files_of, prune
from .recording_settings import RecordingReport, RecordingSettings

_TIDY_EVERY_S = 60.0


class Recording:
    """Writes the log of one incarnation's ledger, on the scheduler's thread.

    Half of the bound is for the file being written, half for those before it.
    """

    def __init__(
        self,
        settings: RecordingSettings,
        replica: str,
        incarnation: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock``: Unix seconds."""
        self._settings = settings
        self._folder = Path(settings.folder)
        self._replica = replica
        self._incarnation = incarnation
        self._clock = clock
        self._recorder: Recorder | None = None
        self._path = Path()
        self._number = 0
        self._first_index = 0
        self._began_at_s = 0.0
        self._turn_bytes = 0
        self._tidied_at_s = 0.0
        self._held: set[tuple[str, int]] = set()
        self._stopped = ""
        self._erased = 0

    def record(self, command: Command, receipt: Receipt) -> None:
        """Append one applied command; Genesis begins the first file. What fails stops the recording."""
        if self._stopped:
            return
        try:
            recorder = self._recorder or self._begin(None)
            recorder.record(command, receipt)
        except (OSError, LedgerRefusal) as error:
            self._stop(error)
            return
        if isinstance(command, Admit):
            self._held.add((command.scope.namespace, command.scope.generation))

    def between_steps(self, ledger: Ledger) -> None:
        """Tidy up, and begin a new file if this one is long or old enough; no step is in flight."""
        now_s = self._clock()
        every_s = min(_TIDY_EVERY_S, self._settings.max_age_s / 8)
        if now_s - self._tidied_at_s >= every_s:
            self._tidy(now_s + every_s)
        recorder = self._recorder
        if recorder is None:
            return
        aged = now_s - self._began_at_s >= self._settings.max_age_s / 2
        if aged or recorder.written_bytes >= self._turn_bytes:
            self.turn(ledger)

    def flush(self) -> None:
        """Hand what was recorded to the system, so that it outlives this process."""
        if self._recorder is not None:
            try:
                self._recorder.flush()
            except OSError as error:
                self._stop(error)

    def turn(self, ledger: Ledger) -> None:
        """Go on in a new file that begins with a checkpoint of the ledger; no step is in flight."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        try:
            recorder.close()
            self._begin(ledger)
        except (OSError, LedgerRefusal) as error:
            self._stop(error)

    def leave(self, ledger: Ledger, floors: Mapping[str, int]) -> None:
        """Go on in a new file if this one holds tokens below ``floors``, of which no request may run any more."""
        if any(generation < floors.get(namespace, 0) for namespace, generation in self._held):
            self.turn(ledger)

    def note_erased(self, files: int) -> None:
        """So many recorded files were deleted because of what they held."""
        self._erased += files

    def report(self) -> RecordingReport:
        """For the operator."""
        recorder = self._recorder
        return RecordingReport(
            "stopped" if self._stopped else "on",
            str(self._path),
            self._first_index,
            0 if recorder is None else recorder.records,
            0 if recorder is None else recorder.written_bytes,
            len(files_of(self._folder, self._replica)),
            self._erased,
            self._stopped,
        )

    def _begin(self, ledger: Ledger | None) -> Recorder:
        """A new file, from a checkpoint of ``ledger`` on or, without one, from Genesis on."""
        now_s, half = self._clock(), self._settings.limit_bytes // 2
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tidy(now_s)
        checkpoint = None if ledger is None else take_checkpoint(ledger)
        self._first_index = 0 if checkpoint is None else checkpoint.index
        self._path = self._folder / f"{self._incarnation}.{self._number:06d}{SUFFIX}"
        self._number += 1
        recorder = self._recorder = Recorder(self._path, half, int(now_s), checkpoint)
        self._began_at_s = now_s
        self._turn_bytes = (recorder.written_bytes + half) // 2
        held = () if checkpoint is None else checkpoint.held
        self._held = {(scope.namespace, scope.generation) for scope in held}
        return recorder

    def _tidy(self, now_s: float) -> None:
        settings = self._settings
        self._tidied_at_s = now_s
        half = settings.limit_bytes - settings.limit_bytes // 2
        prune(self._folder, self._replica, half, now_s - settings.max_age_s)

    def _stop(self, error: Exception) -> None:
        self._stopped = f"{type(error).__name__}: {error}"
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            # What is still buffered cannot be written; why is known, and a reader refuses the record it breaks off in.
            with contextlib.suppress(OSError):
                recorder.close()
