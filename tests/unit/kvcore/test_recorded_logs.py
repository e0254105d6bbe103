"""Recorded logs: they replay to the same digests, and damage is refused at the record where it is."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from copyhold.kvcore.commands import (
    Admit,
    Complete,
    Dispatch,
    Fork,
    Genesis,
    GroupSpec,
    Publish,
    Release,
    RowSpan,
    Scope,
)
from copyhold.kvcore.errors import LogCorrupt, LogTruncated
from copyhold.kvcore.ledger import Ledger
from copyhold.kvcore.log import LogHeader, Recorder, read_header, read_log
from copyhold.kvcore.replay import compare_logs, receipt_values, replay


def _write(path: Path, tokens: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Ledger:
    ledger, recorder = Ledger(), Recorder(path)

    def apply(command: Any) -> Any:
        receipt = ledger.apply(command)
        recorder.record(command, receipt)
        return receipt

    apply(Genesis(b"w", (GroupSpec("full", 4, 16),), 4, 64, "pool"))
    content = np.array(tokens, dtype="<i4").tobytes()
    request = apply(Admit(1, Scope("a", 1, b"w"), content)).request
    apply(Dispatch(1, (RowSpan(request, 0, len(tokens)),)))
    apply(Complete(1, ((0, 9),)))
    apply(Publish((request,)))
    apply(Fork(request, 2))
    apply(Release(request, "finish"))
    recorder.close()
    return ledger


def test_a_log_replays_to_the_same_digests(tmp_path: Path) -> None:
    ledger = _write(tmp_path / "log")
    seen: list[dict[str, Any]] = []
    report = replay(tmp_path / "log", lambda index, receipt: seen.append(receipt_values(receipt)))
    assert report.difference is None and report.records == 7 == len(seen)
    assert report.machine_digest == ledger.machine_digest.hex()
    assert report.commands["Fork"] == 1
    assert seen[1]["new_blocks"][0] == {"pool": "pool", "group": 0, "block": 0, "generation": 0}
    assert seen[6]["machine_after"] == ledger.machine_digest.hex()


def test_a_log_is_for_its_owner_alone_and_is_never_overwritten(tmp_path: Path) -> None:
    _write(tmp_path / "log")
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    assert read_header(tmp_path / "log") == LogHeader(b"w", "pool")
    with pytest.raises(FileExistsError):
        Recorder(tmp_path / "log")


def _offsets(content: bytes) -> list[int]:
    """Where each frame starts, and the end."""
    found, at = [], content.index(b"\n") + 1
    while at < len(content):
        found.append(at)
        at += 4 + int.from_bytes(content[at : at + 4], "little") + 16
    return [*found, at]


def test_every_cut_is_refused_at_its_record(tmp_path: Path) -> None:
    _write(tmp_path / "log")
    content = (tmp_path / "log").read_bytes()
    offsets = _offsets(content)
    for cut in range(offsets[1], len(content)):
        (tmp_path / "cut").write_bytes(content[:cut])
        whole = sum(end <= cut for end in offsets[2:])
        if cut in offsets:
            assert len(list(read_log(tmp_path / "cut"))) == whole
            continue
        records = []
        with pytest.raises(LogTruncated) as caught:
            for record in read_log(tmp_path / "cut"):
                records.append(record)
        assert (len(records), caught.value.record) == (whole, whole)


def test_every_changed_byte_is_refused_before_its_record_is_used(tmp_path: Path) -> None:
    _write(tmp_path / "log")
    content = (tmp_path / "log").read_bytes()
    offsets = _offsets(content)
    for at in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[at] ^= 0x40
        (tmp_path / "damaged").write_bytes(bytes(damaged))
        before = max(sum(end <= at for end in offsets[2:]), 0)
        records = []
        with pytest.raises((LogCorrupt, LogTruncated)) as caught:
            for record in read_log(tmp_path / "damaged"):
                records.append(record)
        assert len(records) == before and caught.value.record == before


def test_a_record_cannot_be_moved_or_left_out(tmp_path: Path) -> None:
    _write(tmp_path / "log")
    content = (tmp_path / "log").read_bytes()
    at = _offsets(content)
    for damaged in (content[: at[3]] + content[at[4] :], content[: at[3]] + content[at[2] :]):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(LogCorrupt) as caught:
            list(read_log(tmp_path / "damaged"))
        assert caught.value.record == 2


def test_the_first_difference_of_two_logs_is_named(tmp_path: Path) -> None:
    _write(tmp_path / "one")
    _write(tmp_path / "two", (1, 2, 3, 4, 6))
    assert compare_logs(tmp_path / "one", tmp_path / "one") is None
    found = compare_logs(tmp_path / "one", tmp_path / "two")
    assert found is not None and (found.index, found.what) == (1, "command")
    content = (tmp_path / "one").read_bytes()
    (tmp_path / "short").write_bytes(content[: _offsets(content)[-2]])
    ended = compare_logs(tmp_path / "short", tmp_path / "one")
    assert ended is not None and (ended.index, ended.what, ended.found) == (6, "length", "the log ends")
