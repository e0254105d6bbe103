"""Where a store is and how it is entered: an address without its password, and the files that hold the rest.

Owns the grammar of store addresses. Invariant: a ``StoreTarget`` carries no secret, so that it may pass through constructor
arguments, launch files and logs; the password is read from a file of mode 0600 by the process that connects. Source:
docs/isolation.md and "Credentials, grants, keys".
"""

from __future__ import annotations

import os
import stat
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

import msgspec

from .errors import SecretFileDamaged, SecretFileExposed, StoreAddressRefused

SCHEMES = ("redis", "rediss", "unix")
_PASSWORD_BYTES_MAX = 4096


class StoreTarget(msgspec.Struct, frozen=True):
    """One store. ``url`` may name a user, never a password; an empty file name means there is none."""

    url: str
    password_file: str = ""
    ca_file: str = ""

    def client_options(self) -> dict[str, Any]:
        """What a client needs beside the URL; reads the password. Raises: SecretFileExposed, SecretFileDamaged."""
        options: dict[str, Any] = {}
        if self.password_file:
            options["password"] = read_password(self.password_file)
        if self.url.startswith("rediss:"):
            options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True}
            if self.ca_file:
                options["ssl_ca_certs"] = self.ca_file
        return options


class StoreAddress(msgspec.Struct, frozen=True):
    """A checked address: ``url`` has no password; ``server`` is equal for addresses that name one server alike."""

    url: str
    password: str | None
    server: str
    encrypted: bool


def parse_store_address(text: str) -> StoreAddress:
    """Check and take apart a ``redis://``, ``rediss://`` or ``unix://`` URL.

    Raises: StoreAddressRefused, whose text holds nothing of the address but its scheme.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise StoreAddressRefused("it is no URL, or its port is no number from 0 to 65535") from None
    if parts.scheme not in SCHEMES:
        raise StoreAddressRefused("it must begin with redis://, rediss:// (TLS) or unix://")
    if parts.fragment or (parts.query and parts.scheme != "unix"):
        raise StoreAddressRefused("options after ? or # are not read; settings are configuration keys")
    if parts.scheme == "unix":
        server = _unix_server(parts)
    else:
        if not parts.hostname:
            raise StoreAddressRefused("it names no host")
        if parts.path.strip("/") and not parts.path[1:].isdecimal():
            raise StoreAddressRefused("after the host only a database number may follow, as in /0")
        server = f"{parts.hostname}:{port or 6379}"
    password = None if parts.password is None else unquote(parts.password)
    plain = _spelled(parts, _netloc(parts, keep_user=True))
    return StoreAddress(plain, password, server, parts.scheme == "rediss")


def shown_address(text: str) -> str:
    """The address for people: without user and password. Anything that does not parse is not shown at all."""
    if text.startswith("/"):
        return text
    try:
        parts = urlsplit(parse_store_address(text).url)
    except StoreAddressRefused:
        return "(not a store address)"
    return _spelled(parts, _netloc(parts, keep_user=False))


def read_password(path: str) -> str:
    """The password in ``path``, less one line end. Raises: SecretFileExposed, SecretFileDamaged; nothing is kept."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise SecretFileExposed(path, f"it cannot be opened ({error.strerror})") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SecretFileExposed(path, "it is not a regular file")
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            raise SecretFileExposed(path, f"its mode is {mode}; it must be 0600 and yours")
        content = os.read(descriptor, _PASSWORD_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    try:
        password = content.decode().removesuffix("\n")
    except UnicodeDecodeError:
        password = ""
    if not password or "\n" in password or len(content) > _PASSWORD_BYTES_MAX:
        raise SecretFileDamaged(path, "it must hold one line, the password")
    return password


def _unix_server(parts: SplitResult) -> str:
    if parts.hostname or not parts.path.startswith("/") or len(parts.path) < 2:
        raise StoreAddressRefused("it must be unix:///path/of/the/socket")
    name, _, number = parts.query.partition("=")
    if parts.query and not (name == "db" and number.isdecimal()):
        raise StoreAddressRefused("after ? only db=NUMBER may follow")
    return f"unix:{os.path.realpath(parts.path)}"


def _spelled(parts: SplitResult, netloc: str) -> str:
    """``urlunsplit`` would drop the slashes of an empty host, which clients look for."""
    return f"{parts.scheme}://{netloc}{parts.path}" + (f"?{parts.query}" if parts.query else "")


def _netloc(parts: SplitResult, keep_user: bool) -> str:
    host = parts.netloc.rpartition("@")[2]
    if not keep_user or not parts.username:
        return host
    return f"{quote(unquote(parts.username), safe='')}@{host}"
