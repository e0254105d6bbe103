"""A cancel reaches its request whenever it comes."""

from __future__ import annotations

from concurrent.futures import Future

from dry_replica import DryReplica

from copyhold.actors.cache_settings import DEFAULT_CACHE
from copyhold.actors.open_requests import OpenRequests, cancelled_unheard
from copyhold.actors.submission import Entry


def _entry() -> Entry:
    entry = DryReplica(DEFAULT_CACHE).submit([1, 2, 3]).entry
    assert entry is not None
    return entry


def test_a_cancel_before_the_engine_has_the_request_is_told_when_it_has() -> None:
    requests, entry = OpenRequests(), _entry()
    requests.opening("a", b"key")
    assert requests.cancel("a") is None
    assert requests.opened("a", entry)


def test_a_cancel_after_that_finds_the_entry() -> None:
    requests, entry = OpenRequests(), _entry()
    requests.opening("a", b"key")
    assert not requests.opened("a", entry)
    assert requests.cancel("a") is entry and requests.entry("a") is entry


def test_a_request_that_ended_leaves_nothing_behind_for_the_next_of_its_name() -> None:
    requests = OpenRequests()
    requests.opening("a", b"key")
    requests.cancel("a")
    requests.closed("a")
    assert requests.cancel("a") is None
    requests.opening("a", b"key")
    assert not requests.opened("a", _entry())


def test_a_secret_lives_as_long_as_its_request() -> None:
    requests = OpenRequests()
    assert requests.secret("a") is None
    requests.opening("a", b"key")
    assert requests.secret("a") == b"key"
    requests.closed("a")
    assert requests.secret("a") is None


def test_a_cancel_of_a_stranger_is_left_alone() -> None:
    requests = OpenRequests()
    assert requests.cancel("a") is None
    requests.opening("a", b"key")
    assert not requests.opened("a", _entry())


def test_a_submission_whose_caller_has_gone_is_cancelled_when_it_is_through() -> None:
    heard: list[Entry] = []
    through, refused, gone = Future[Entry](), Future[Entry](), Future[Entry]()
    for submitted in (through, refused, gone):
        submitted.add_done_callback(cancelled_unheard(heard.append))
    entry = _entry()
    through.set_result(entry)
    refused.set_exception(RuntimeError("no room"))
    gone.cancel()
    assert heard == [entry]
