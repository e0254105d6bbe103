"""The driver: the one process that talks to Ray for a server's whole life.

Owns the process: its arguments, its signals, its report pipe. Invariant: ``Ready`` is sent only after every rank's pool is
mapped, a warm-up step has run on all ranks and both listeners answer. SIGTERM ends everything in the reverse order.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from .errors import ClusterError
from .launch import Failed, LaunchSpec, ReadyPipe, Stage, decode_report, read_launch_spec
from .prepare import PreparedModel, prepared_model
from .ray_session import enter_environment

if TYPE_CHECKING:
    from copyhold.models.manifest import ConvertedCheckpoint

    from .keeper import Keeper

_WATCH_EVERY_S = 1.0
_SMALLEST_POOL_BLOCKS = 4
_QUANTIZATION = re.compile(r"[.-](?:Q\d\w*|[BF]F?16|F32)$", re.IGNORECASE)


class EndRequested(BaseException):
    """The first SIGTERM or SIGINT: unwinds whatever the driver waits for, a start or a repair."""


class StartFailed(Exception):
    """Start-up cannot go on; ``name`` is stable, the message one line. The supervisor cleans up."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def main(argv: list[str] | None = None) -> int:
    """``driver --launch FILE --ready-fd N``; returns 0 after SIGTERM, 1 when start-up failed."""
    parser = argparse.ArgumentParser(prog="copyhold-driver")
    parser.add_argument("--launch", required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    pipe = ReadyPipe(arguments.ready_fd)
    spec = read_launch_spec(arguments.launch)
    stopped = _end_on_signals()
    try:
        keeper = _start(spec, pipe)
    except EndRequested:
        return 0
    except StartFailed as error:
        pipe.failed(error.name, str(error))
        return 1
    except ClusterError as error:
        pipe.failed(type(error).__name__, error.message)
        return 1
    except Exception as error:
        pipe.failed(type(error).__name__, str(error) or type(error).__name__)
        raise
    with contextlib.suppress(EndRequested):
        while not stopped.wait(_WATCH_EVERY_S):
            keeper.tick()
    keeper.stop()
    return 0


def _end_on_signals() -> threading.Event:
    """The event is set too, because an exception that meets a destructor goes no further."""
    stopped = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        if not stopped.is_set():
            stopped.set()
            raise EndRequested

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stopped


def _start(spec: LaunchSpec, pipe: ReadyPipe) -> Keeper:
    """Everything up to ``Ready``. Raises what went wrong."""
    _check_pool(spec)
    prepared = _prepare(spec, pipe)
    enter_environment(spec)
    from copyhold.models.manifest import load_checkpoint

    from .keeper import Keeper

    checkpoint = load_checkpoint(Path(prepared.path))
    keeper = Keeper(_sized(spec, checkpoint), checkpoint, model_name(spec, prepared))
    keeper.start(pipe)
    return keeper


def _sized(spec: LaunchSpec, checkpoint: ConvertedCheckpoint) -> LaunchSpec:
    """The launch with its pools as they will be. Raises: PoolRefused, ConfigError."""
    from .pool_size import pool_figures, require_free, sized_config

    figures = pool_figures(spec.config, checkpoint)
    if spec.config.pool_mb:
        require_free(figures, spec.config.replicas)
    return msgspec.structs.replace(spec, config=sized_config(spec.config, figures), pool=figures)


def model_name(spec: LaunchSpec, prepared: PreparedModel) -> str:
    """The configured name, or the checkpoint file's own without its format and quantization."""
    from copyhold.models.manifest import read_manifest

    if spec.config.served_model_name:
        return spec.config.served_model_name
    return _QUANTIZATION.sub("", read_manifest(Path(prepared.path)).source_name.removesuffix(".gguf"))


def _check_pool(spec: LaunchSpec) -> None:
    blocks = spec.config.num_blocks
    if not spec.config.pool_mb and blocks < _SMALLEST_POOL_BLOCKS:
        raise StartFailed("PoolTooSmall", f"pool_tokens {spec.config.pool_tokens} gives {blocks} blocks")


def _prepare(spec: LaunchSpec, pipe: ReadyPipe) -> PreparedModel:
    """Convert and compile in a process of its own; relay its progress."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "copyhold.cluster.prepare",
        str(Path(spec.run_dir) / "launch.json"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            report = decode_report(line)
            if isinstance(report, Failed):
                raise StartFailed(report.error, report.message)
            assert isinstance(report, Stage)
            pipe.stage(report.stage, report.detail)
    if process.returncode != 0:
        raise StartFailed("PrepareFailed", f"model preparation ended with status {process.returncode}")
    return prepared_model(spec.run_dir)


if __name__ == "__main__":
    sys.exit(main())
