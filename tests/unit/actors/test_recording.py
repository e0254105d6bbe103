"""Recorded logs of a replica: bounded, replayable file by file, and without what was revoked."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copyhold.actors.recorded_files import erase_below, files_of, prune
from copyhold.actors.recording import Recording
from copyhold.actors.recording_settings import RecordingSettings
from copyhold.kvcore.commands import (
    Admit,
    AdvanceGeneration,
    Complete,
    Dispatch,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    RowSpan,
    Scope,
)
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.replay import replay

GENESIS = Genesis(b"w", (GroupSpec("full", 16, 64),), 4, 256, "replica-0-aa")


class Recorded:
    """A ledger whose commands are recorded, with a clock that stands still."""

    def __init__(self, folder: Path, *, limit_bytes: int = 1 << 20, max_age_s: float = 1000.0) -> None:
        self.now_s = 1_000_000.0
        self.folder = folder
        self.ledger = Ledger()
        self.settings = RecordingSettings(str(folder), limit_bytes, max_age_s)
        self.recording = Recording(self.settings, "replica-0", GENESIS.incarnation, lambda: self.now_s)
        self.number = 0
        self.apply(GENESIS)

    def apply(self, command: Any) -> Any:
        receipt = self.ledger.apply(command)
        self.recording.record(command, receipt)
        return receipt

    def request(self, namespace: str = "acme", generation: int = 1, first: int = 1) -> None:
        """One request from its admission to its end, then the moment between two steps."""
        self.number += 1
        tokens = np.arange(first, first + 40, dtype="<i4").tobytes()
        request = self.apply(Admit(self.number, Scope(namespace, generation, b"w"), tokens)).request
        start = self.ledger.request(request).valid_rows
        self.apply(Dispatch(self.number, (RowSpan(request, start, 40 - start),)))
        self.apply(Complete(self.number, ((0, 5),)))
        self.apply(Publish((request,)))
        self.apply(Release(request, "finish"))
        self.recording.between_steps(self.ledger)
        self.recording.flush()

    @property
    def files(self) -> list[Path]:
        return files_of(self.folder, "replica-0")

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.files)


def test_what_is_recorded_replays_to_the_ledger_at_any_time(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "logs")
    for turn in range(3):
        recorded.request(first=turn)
        report = replay(recorded.files[0])
        assert (report.difference, report.machine_digest) == (None, recorded.ledger.machine_digest.hex())
    said = recorded.recording.report()
    assert (said.state, said.records, said.files) == ("on", recorded.ledger.log_index, 1)
    assert said.file == str(recorded.files[0])
    assert stat.S_IMODE(recorded.files[0].stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700


def test_files_stay_within_their_bound_and_each_replays(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, limit_bytes=80_000)
    most = 0
    for turn in range(300):
        recorded.request(first=turn % 7)
        most = max(most, recorded.bytes_on_disk())
    assert most <= 80_000
    assert recorded.recording.report().state == "on" and len(recorded.files) > 1
    assert recorded.recording.report().first_index > 0
    for path in recorded.files:
        assert replay(path).difference is None
    assert replay(recorded.files[-1]).machine_digest == recorded.ledger.machine_digest.hex()


def test_nothing_is_kept_beyond_its_age(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, max_age_s=800.0)
    recorded.request()
    first = recorded.files[0]
    recorded.now_s += 500.0
    recorded.recording.between_steps(recorded.ledger)
    assert len(recorded.files) == 2 and first.exists()
    recorded.now_s += 301.0
    recorded.recording.between_steps(recorded.ledger)
    assert not first.exists()
    for _ in range(9):
        recorded.now_s += 401.0
        recorded.recording.between_steps(recorded.ledger)
    assert recorded.recording.report().state == "on" and len(recorded.files) == 2, "an idle replica goes on"
    assert replay(recorded.files[-1]).machine_digest == recorded.ledger.machine_digest.hex()


def test_after_a_revocation_no_file_holds_the_namespace_and_recording_goes_on(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.request("acme", first=0x5EC2E7)
    recorded.request("bravo", first=0x0B2A70)
    secret, kept = [np.arange(word, word + 8, dtype="<i4").tobytes() for word in (0x5EC2E7, 0x0B2A70)]
    assert secret in recorded.files[0].read_bytes()
    recorded.apply(AdvanceGeneration("acme", 2))
    recorded.recording.leave(recorded.ledger, {"acme": 2})
    assert erase_below(tmp_path, {"acme": 2}) == 1
    recorded.request("bravo")
    (path,) = recorded.files
    assert secret not in path.read_bytes() and kept in path.read_bytes()
    assert replay(path).machine_digest == recorded.ledger.machine_digest.hex()
    recorded.recording.leave(recorded.ledger, {"acme": 2})
    assert erase_below(tmp_path, {"acme": 2}) == 0 and recorded.files == [path]


def test_files_of_ended_incarnations_go_with_a_revocation_too(tmp_path: Path) -> None:
    ended = Recorded(tmp_path)
    ended.request("acme")
    ended.recording.turn(ended.ledger)
    ended.request("bravo")
    held, path = ended.files
    assert erase_below(tmp_path, {"acme": 2}) == 1, "the file being written is its writer's affair"
    assert not held.exists() and path.exists()
    ended.recording.leave(ended.ledger, {"acme": 2})
    assert erase_below(tmp_path, {"acme": 2}) == 1, "its checkpoint held the cached prefix"
    broken = tmp_path / "replica-7-bb.000000.ledger"
    broken.write_bytes(b"copyhold ledger log 1\n\x01")
    assert erase_below(tmp_path, {"acme": 2}) == 1 and not broken.exists()


def test_files_of_other_replicas_are_not_pruned(tmp_path: Path) -> None:
    other = tmp_path / "replica-1-aa.000000.ledger"
    other.write_bytes(bytes(100))
    mine = [tmp_path / f"replica-0-{name}.000000.ledger" for name in "ab"]
    for path in mine:
        path.write_bytes(bytes(100))
    assert prune(tmp_path, "replica-0", 150, 0.0) == 1
    assert other.exists() and sum(path.exists() for path in mine) == 1
    assert prune(tmp_path, "replica-0", 150, 1e18) == 1 and other.exists()


@pytest.mark.parametrize("limit_bytes", [64, 2_000])
def test_what_cannot_be_recorded_stops_the_recording_and_not_the_ledger(
    tmp_path: Path, limit_bytes: int
) -> None:
    recorded = Recorded(tmp_path, limit_bytes=limit_bytes)
    for _ in range(20):
        recorded.request()
    said = recorded.recording.report()
    assert said.state == "stopped" and "log_full" in said.detail
    assert recorded.bytes_on_disk() <= limit_bytes
    assert recorded.ledger.log_index == 101


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    recorded = Recorded(tmp_path / "file")
    recorded.request()
    said = recorded.recording.report()
    assert said.state == "stopped" and "FileExistsError" in said.detail
