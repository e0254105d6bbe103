"""Step channels between a replica and its ranks on one host: unix SOCK_SEQPACKET, memfd for what does not fit.

Owns the sockets of the token path. A message of at most ``INLINE_BYTES`` is one packet; a longer one travels as an
anonymous memory file whose descriptor is passed along, is read once and then overwritten with zeros by the reader
(docs/isolation: long prompts leave no copy behind). Messages are never split and never reordered.

Invariant: ``execute`` sends one plan to every rank and returns one answer from every rank, or raises and the channel is
of no further use.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import time
from pathlib import Path

from .errors import TransportClosed

INLINE_BYTES = 96 * 1024
_INLINE, _MEMFD = b"\x00", b"\x01"


def send_message(sock: socket.socket, message: bytes) -> None:
    """Send one message whole. Raises ``TransportClosed`` when the peer is gone."""
    try:
        if len(message) <= INLINE_BYTES:
            sock.sendall(_INLINE + message)
            return
        descriptor = os.memfd_create("copyhold-step", os.MFD_CLOEXEC)
        try:
            _write_all(descriptor, message)
            rights = array.array("i", [descriptor])
            header = _MEMFD + len(message).to_bytes(8, "little")
            sock.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        finally:
            os.close(descriptor)
    except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError, TimeoutError) as error:
        reason = "does not read" if isinstance(error, TimeoutError) else "closed the step channel"
        raise TransportClosed(f"a peer {reason} while {len(message)} bytes were sent") from error


def receive_message(sock: socket.socket) -> bytes:
    """Receive one whole message. Raises ``TransportClosed`` at end of file or reset, ``TimeoutError`` in time."""
    try:
        packet, ancillary, _flags, _address = sock.recvmsg(INLINE_BYTES + 1, socket.CMSG_SPACE(4))
    except ConnectionResetError as error:
        raise TransportClosed("step channel reset by its peer") from error
    if not packet:
        raise TransportClosed("step channel closed by its peer")
    if packet[:1] == _INLINE:
        return packet[1:]
    descriptor = _descriptor_of(ancillary)
    try:
        return _read_and_wipe(descriptor, int.from_bytes(packet[1:9], "little"))
    finally:
        os.close(descriptor)


class StepListener:
    """The replica's end: accepts exactly ``ranks`` workers on ``path`` and drives them in lock step."""

    def __init__(self, path: Path, ranks: int) -> None:
        self._path = path
        self._ranks = ranks
        self._sockets: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(ranks)

    def accept_all(self, timeout_s: float) -> None:
        """Wait for every rank; each introduces itself with its rank number.

        Raises: ``TransportClosed`` when one is missing or mute after ``timeout_s``, or names a rank that is taken or
        does not exist; the listener is then of no further use.
        """
        deadline = time.monotonic() + timeout_s
        by_rank: dict[int, socket.socket] = {}
        while len(by_rank) < self._ranks:
            missing = sorted(set(range(self._ranks)) - set(by_rank))
            self._listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                sock.settimeout(max(0.01, deadline - time.monotonic()))
                rank = int.from_bytes(receive_message(sock), "little")
            except TimeoutError as error:
                raise TransportClosed(f"ranks {missing} did not connect within {timeout_s:g} s") from error
            if rank not in missing:
                raise TransportClosed(f"rank {rank} introduced itself, missing are {missing}")
            sock.settimeout(timeout_s)
            by_rank[rank] = sock
        self._sockets = [by_rank[rank] for rank in range(self._ranks)]

    def execute(self, message: bytes, timeout_s: float) -> list[bytes]:
        """One message to every rank, one answer from every rank, in rank order.

        Raises: ``TransportClosed`` when a rank is gone or does not answer within ``timeout_s``.
        """
        for sock in self._sockets:
            send_message(sock, message)
        answers: dict[int, bytes] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, sock in enumerate(self._sockets):
                selector.register(sock, selectors.EVENT_READ, rank)
            while len(answers) < self._ranks:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = sorted(set(range(self._ranks)) - set(answers))
                    raise TransportClosed(f"ranks {silent} did not answer within {timeout_s:g} s")
                for key, _ in ready:
                    answers[key.data] = receive_message(self._sockets[key.data])
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(self._ranks)]

    def close(self) -> None:
        """Close every socket and remove the path; safe to call twice."""
        for sock in (*self._sockets, self._listener):
            sock.close()
        self._sockets = []
        self._path.unlink(missing_ok=True)


def connect(path: Path, rank: int, timeout_s: float) -> socket.socket:
    """A rank's end of the channel, introduced by its rank number; blocking afterwards."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise TransportClosed(f"rank {rank} cannot reach its replica: {error.strerror}") from error
    send_message(sock, rank.to_bytes(4, "little"))
    sock.settimeout(None)
    return sock


def _write_all(descriptor: int, message: bytes) -> None:
    view = memoryview(message)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)


def _descriptor_of(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return array.array("i", payload[:4])[0]
    raise TransportClosed("a long message arrived without its memory file")


def _read_and_wipe(descriptor: int, length: int) -> bytes:
    """Read the memory file from its start (each receiver has its own copy), then overwrite it."""
    parts: list[bytes] = []
    offset = 0
    while offset < length:
        part = os.pread(descriptor, length - offset, offset)
        if not part:
            raise TransportClosed(f"memory file ended at {offset} of {length} bytes")
        parts.append(part)
        offset += len(part)
    os.pwrite(descriptor, bytes(length), 0)
    return b"".join(parts)
