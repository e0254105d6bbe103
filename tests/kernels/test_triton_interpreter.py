"""The Triton kernels, run by Triton's interpreter, against float64: every length, feature and poison that paging can bring.

What it does not prove: races (programs run one after another), speed, and how a GPU rounds. Cases: `triton_interpreted`.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton_interpreted import NAMES
from triton_process import needs_interpreter, needs_triton, results_of

pytestmark = [needs_triton, needs_interpreter]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return results_of("triton_interpreted.py", interpret=True)


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernels_agree_with_float64(results: dict[str, Any], name: str) -> None:
    assert results[name] is None, results[name]


def test_every_case_ran(results: dict[str, Any]) -> None:
    assert set(results) == set(NAMES) and len(NAMES) > 100
