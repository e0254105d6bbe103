"""Install torch 2.13.0: the small CPU build where the index has it, else the plain one, size told first.

Usage: ``install_torch.py [--index URL]``. Uses pip with the machine's own configuration. Runs before
anything else is installed, so the standard library is all it imports.
"""

from __future__ import annotations

import argparse
import json
import ssl
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

VERSION = "2.13.0"
CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def main() -> int:
    """Install and return pip's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--index", help="package index to take torch from")
    index: str | None = parser.parse_args().index
    source = ["--index-url", index] if index else []
    installed = installed_version()
    if installed is not None and installed.split("+")[0] == VERSION:
        say(f"torch {installed} is installed")
        return 0
    cpu = planned([f"torch=={VERSION}+cpu", "--no-deps", *source])
    if cpu is not None:
        say(f"torch {VERSION}+cpu, {size_text(cpu)}")
        return pip("install", f"torch=={VERSION}+cpu", "--no-deps", *source)
    say(f"the package index has no torch {VERSION}+cpu; looking up the size of plain torch {VERSION}")
    plain = planned([f"torch=={VERSION}", "-c", str(CONSTRAINTS), *source])
    if plain is None:
        say(f"the package index has no torch {VERSION} for this Python; name another with TORCH_INDEX=URL")
        return 1
    say(f"torch {VERSION} with the CUDA libraries it requires, {size_text(plain)}")
    say("an index with CPU builds saves most of it: make TORCH_INDEX=URL")
    return pip("install", f"torch=={VERSION}", "-c", str(CONSTRAINTS), *source)


def installed_version() -> str | None:
    """Version of torch in this environment."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def planned(arguments: list[str]) -> list[dict[str, Any]] | None:
    """What pip would install, ``None`` when it finds no such version."""
    command = [
        *pip_command("install"),
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        "-",
        *arguments,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        return None
    return json.loads(result.stdout)["install"]


def size_text(items: list[dict[str, Any]]) -> str:
    """Total size of the files, as far as their servers tell it."""
    sizes = [size_bytes(item["download_info"]["url"]) for item in items]
    known = sum(size for size in sizes if size is not None)
    unknown = sum(1 for size in sizes if size is None)
    text = f"{known / 1e6:,.0f} MB in {len(sizes)} file{'s' if len(sizes) != 1 else ''}"
    return text + (f" (and {unknown} of unknown size)" if unknown else "")


def size_bytes(url: str) -> int | None:
    """Size of one file, ``None`` when it is not told."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=20, context=tls_context()) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError):
        return None


def tls_context() -> ssl.SSLContext:
    """Trust what pip is configured to trust."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.cert"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return ssl.create_default_context(cafile=result.stdout.strip() or None)


def pip(*arguments: str) -> int:
    """Run pip with its progress visible."""
    return subprocess.run([*pip_command(arguments[0]), *arguments[1:]], check=False).returncode


def pip_command(command: str) -> list[str]:
    return [sys.executable, "-m", "pip", command, "--disable-pip-version-check", "--no-input"]


def say(text: str) -> None:
    print(f"    {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
