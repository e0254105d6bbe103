"""What every test may use: the support folder on the path, and one thread a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "support"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--soak-rounds N`` repeats what kills processes; ``make soak`` asks for twenty."""
    parser.addoption("--soak-rounds", type=int, default=1, help="rounds of the kill matrix")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take ``soak_round`` run once a round."""
    if "soak_round" in metafunc.fixturenames:
        metafunc.parametrize("soak_round", range(int(metafunc.config.getoption("--soak-rounds") or 1)))
