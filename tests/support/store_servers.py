"""Store servers that are not the run's own: Valkey on TCP with users, TLS in front of it, and their absence."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from copyhold.cluster.processes import die_with_parent
from copyhold.cluster.valkey_process import find_server_binary

DURABLE = ("--appendonly", "yes", "--maxmemory-policy", "noeviction")


class OutsideStore:
    """A server on a free TCP port, which may be stopped and started again on its files."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(find_server_binary()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.folder), "--save", "", "--loglevel", "warning", *self._options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent())
        while True:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as probe:
                probe.sendall(b"PING\r\n")
                if probe.recv(64):
                    return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def add_user(self, name: str, password: str, *rules: str) -> None:
        """Only ``name`` may come in from now on, with all rights unless ``rules`` say otherwise."""
        client = redis.Redis(port=self.port)
        rights = rules or ("~*", "&*", "+@all")
        client.execute_command("ACL", "SETUSER", name, "on", f">{password}", *rights)
        client.execute_command("ACL", "SETUSER", "default", "off")
        client.close()


@contextlib.contextmanager
def outside_store(*options: str) -> Iterator[OutsideStore]:
    folder = Path(tempfile.mkdtemp(prefix="chstore-", dir="/tmp"))
    store = OutsideStore(folder, *(options or DURABLE))
    store.start()
    try:
        yield store
    finally:
        store.stop()
        shutil.rmtree(folder)


@contextlib.contextmanager
def tls_in_front(port: int, certificate: Path, key: Path) -> Iterator[int]:
    """A TLS listener that passes everything on to ``port``; yields its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                threading.Thread(target=_relay, args=(plain, port, context), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def make_authority(folder: Path, name: str = "stores") -> tuple[Path, Path, Path]:
    """A certificate authority and a certificate of 127.0.0.1: (CA file, certificate, key)."""
    authority_key, server_key = (
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} authority")])
    authority = _certificate(issuer, issuer, authority_key, authority_key, x509.BasicConstraints(True, None))
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = _certificate(subject, issuer, server_key, authority_key, address)
    private = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths = (folder / f"{name}-ca.pem", folder / f"{name}.pem", folder / f"{name}-key.pem")
    for path, content in zip(paths, (_pem(authority), _pem(certificate), private), strict=True):
        path.write_bytes(content)
    return paths


def secret_file(path: Path, text: str, mode: int = 0o600) -> Path:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, mode), "w") as file:
        file.write(text)
    path.chmod(mode)
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(hours=1))
    return builder.add_extension(extension, critical=True).sign(signer, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _relay(plain: socket.socket, port: int, context: ssl.SSLContext) -> None:
    """Both directions of one connection; ends with either side."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        client = stack.enter_context(context.wrap_socket(plain, server_side=True))
        server = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        back = threading.Thread(target=_pump, args=(server, client), daemon=True)
        back.start()
        _pump(client, server)
        back.join(5.0)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
