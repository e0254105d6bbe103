"""The step channel: whole messages, memory files for long ones, and typed ends when a rank is gone or silent."""

from __future__ import annotations

import array
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from copyhold.actors.errors import TransportClosed
from copyhold.actors.transport import INLINE_BYTES, StepListener, connect, receive_message, send_message

Pair = tuple[socket.socket, socket.socket]
LONG = b"p" * (INLINE_BYTES + 1)


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (left, right):
        sock.settimeout(5.0)
    with left, right:
        yield left, right


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket path short enough for any machine's limit."""
    folder = tempfile.mkdtemp(prefix="ch-")
    yield Path(folder) / "step"
    shutil.rmtree(folder)


@pytest.fixture
def listen(path: Path) -> Iterator[Callable[[int], StepListener]]:
    made: list[StepListener] = []

    def make(ranks: int) -> StepListener:
        made.append(StepListener(path, ranks))
        return made[-1]

    yield make
    for each in made:
        each.close()


def answering(path: Path, rank: int, answer: Callable[[bytes], bytes | None]) -> threading.Thread:
    """A rank in a thread: one message, one answer (none: it hangs up), until its replica is gone."""

    def loop() -> None:
        with connect(path, rank, 5.0) as sock:
            try:
                while (reply := answer(receive_message(sock))) is not None:
                    send_message(sock, reply)
            except TransportClosed:
                return

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("length", [0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 3_000_000])
def test_a_message_of_any_length_arrives_whole(pair: Pair, length: int):
    message = os.urandom(length)
    for each in (message, b"next"):
        send_message(pair[0], each)
        assert receive_message(pair[1]) == each


def test_a_long_message_travels_as_a_memory_file_and_a_short_one_does_not(pair: Pair):
    for message, descriptors in ((LONG, 1), (LONG[:INLINE_BYTES], 0)):
        send_message(pair[0], message)
        packet, rights, _, _ = socket.recv_fds(pair[1], INLINE_BYTES + 1, 1)
        for descriptor in rights:
            os.close(descriptor)
        assert len(rights) == descriptors
        assert len(packet) == (9 if descriptors else INLINE_BYTES + 1)


def test_a_long_message_is_overwritten_in_its_memory_file_once_it_was_read(pair: Pair):
    send_message(pair[0], LONG)
    header, (witness,), _, _ = socket.recv_fds(pair[1], 64, 1)
    assert os.pread(witness, len(LONG), 0) == LONG
    forwarded = array.array("i", [witness])
    pair[0].sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, forwarded)])
    assert receive_message(pair[1]) == LONG
    assert os.pread(witness, len(LONG) + 1, 0) == bytes(len(LONG))
    os.close(witness)


def test_no_descriptor_stays_open_after_long_messages(pair: Pair):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        send_message(pair[0], LONG)
        receive_message(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("message", [b"short", LONG], ids=["inline", "memory file"])
def test_a_closed_peer_ends_sending_and_receiving_with_a_typed_error(pair: Pair, message: bytes):
    pair[1].close()
    with pytest.raises(TransportClosed):
        send_message(pair[0], message)
    with pytest.raises(TransportClosed):
        receive_message(pair[0])


def test_a_memory_file_shorter_than_announced_or_missing_is_refused(pair: Pair):
    pair[0].send(b"\x01" + (50).to_bytes(8, "little"))
    with pytest.raises(TransportClosed, match="without its memory file"):
        receive_message(pair[1])
    descriptor = os.memfd_create("short")
    os.write(descriptor, b"ten bytes.")
    socket.send_fds(pair[0], [b"\x01" + (50).to_bytes(8, "little")], [descriptor])
    os.close(descriptor)
    with pytest.raises(TransportClosed, match="ended at 10 of 50"):
        receive_message(pair[1])


@pytest.mark.parametrize("length", [10, INLINE_BYTES * 2], ids=["inline", "memory file"])
def test_every_rank_gets_the_message_and_answers_come_in_rank_order(path, listen, length):
    listener = listen(3)
    for rank in (2, 0, 1):
        answering(path, rank, lambda message, rank=rank: bytes([rank]) + message)
    listener.accept_all(5.0)
    for round_number in range(3):
        message = bytes([round_number]) * length
        assert listener.execute(message, 5.0) == [bytes([rank]) + message for rank in range(3)]


def test_a_rank_that_hangs_up_ends_the_step(path, listen):
    listener = listen(2)
    answering(path, 0, lambda message: message)
    answering(path, 1, lambda message: message if message == b"first" else None)
    listener.accept_all(5.0)
    assert listener.execute(b"first", 5.0) == [b"first", b"first"]
    with pytest.raises(TransportClosed):
        listener.execute(b"second", 5.0)


def test_a_silent_rank_is_named_within_the_timeout(path, listen):
    listener = listen(2)
    release = threading.Event()

    def silent(message: bytes) -> bytes:
        release.wait(10.0)
        return message

    answering(path, 0, lambda message: message)
    answering(path, 1, silent)
    listener.accept_all(5.0)
    started_s = time.monotonic()
    with pytest.raises(TransportClosed, match=r"ranks \[1\] did not answer"):
        listener.execute(b"plan", 0.2)
    assert 0.15 < time.monotonic() - started_s < 3.0
    release.set()


def test_ranks_that_do_not_come_are_named_at_accept(path, listen):
    listener = listen(3)
    answering(path, 1, lambda message: message)
    with pytest.raises(TransportClosed, match=r"ranks \[0, 2\] did not connect"):
        listener.accept_all(0.3)


def test_a_connection_that_never_says_its_rank_does_not_hold_the_accept_up(path, listen):
    listener = listen(1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.connect(str(path))
        started_s = time.monotonic()
        with pytest.raises(TransportClosed):
            listener.accept_all(0.3)
        assert time.monotonic() - started_s < 3.0


@pytest.mark.parametrize("second_rank", [0, 7], ids=["a rank twice", "a rank that does not exist"])
def test_an_introduction_that_fits_no_free_rank_is_refused_by_name(path, listen, second_rank):
    listener = listen(2)
    with connect(path, 0, 5.0), connect(path, second_rank, 5.0), pytest.raises(TransportClosed, match="rank"):
        listener.accept_all(0.5)


def test_a_replica_that_does_not_listen_is_a_typed_error(path):
    with pytest.raises(TransportClosed, match="rank 3 cannot reach"):
        connect(path, 3, 1.0)


def test_only_the_owner_may_connect_and_closing_twice_leaves_no_path(path, listen):
    listener = listen(1)
    assert path.stat().st_mode & 0o777 == 0o600
    listener.close()
    listener.close()
    assert not path.exists()
