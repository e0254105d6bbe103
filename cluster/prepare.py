"""Everything slow that happens once, in a short process of its own: checkpoint conversion and kernel compilation.

Owns ``prepared.json`` in the run folder. A process of its own, because dequantizing takes memory that no serving process
should keep, and because the compiled kernels must lie in the package's cache before the first rank starts. Progress is
one JSON line per stage on standard output.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from copyhold.kernels.choices import KVDtype

from .launch import Failed, Stage, read_launch_spec


class PreparedModel(msgspec.Struct, frozen=True):
    """A converted checkpoint, ready for every rank to map. ``digest`` is hex SHA-256."""

    path: str
    digest: str


def prepared_path(run_dir: str | Path) -> Path:
    """Where ``PreparedModel`` of a run lies."""
    return Path(run_dir) / "prepared.json"


def prepared_model(run_dir: str | Path) -> PreparedModel:
    """What a run was prepared with."""
    return msgspec.json.decode(prepared_path(run_dir).read_bytes(), type=PreparedModel)


def compile_kernels(kv_dtype: KVDtype = "float32") -> None:
    """Fill the package's own caches: attention, sums over ranks, the loops of ledger and policy. Seconds once, then nothing."""
    from copyhold.actors import cost_policy
    from copyhold.kernels import cpu, exchange
    from copyhold.kvcore import warm_up as ledger

    cpu.warm_up(kv_dtype)
    exchange.warm_up()
    ledger.warm_up()
    cost_policy.warm_up()


def main(argv: list[str]) -> int:
    """``prepare LAUNCH_FILE``: convert and compile; exit code 1 with a ``Failed`` line when it cannot be done."""
    from copyhold.models.convert import convert
    from copyhold.models.errors import ModelError
    from copyhold.models.layout import Dtype

    spec = read_launch_spec(argv[0])
    source = Path(spec.config.model) if spec.config.model else None
    _say(Stage("model", "checking the converted checkpoint"))
    last_s = time.monotonic()

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last_s
        if done == total or time.monotonic() - last_s > 0.5:
            last_s = time.monotonic()
            _say(Stage("model", f"{stage} {done}/{total}"))

    try:
        dtype = msgspec.convert(spec.config.dtype, Dtype)
        checkpoint = convert(source, Path(spec.cache_dir), spec.config.tp, progress, dtype)
    except ModelError as error:
        _say(Failed(type(error).__name__, str(error)))
        return 1
    _say(Stage("kernels", "compiling"))
    compile_kernels(spec.config.kv_storage)
    prepared = PreparedModel(str(checkpoint.path), checkpoint.digest)
    prepared_path(spec.run_dir).write_bytes(msgspec.json.encode(prepared))
    return 0


def _say(report: Stage | Failed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
