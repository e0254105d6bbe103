"""The Triton kernels compile ahead of time for sm_80, sm_90 and sm_100 and fit their shared memory; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
from triton_compiled import IMPOSSIBLE, JOBS
from triton_process import needs_triton, results_of

from copyhold.kernels.triton_config import SHARED_BYTES

pytestmark = needs_triton


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    return results_of("triton_compiled.py", interpret=False)


@pytest.mark.parametrize("name", JOBS)
def test_a_kernel_compiles_and_fits(compiled: dict[str, Any], name: str) -> None:
    found = compiled[name]
    assert found["error"] == ""
    assert found["cubin_bytes"] > 1000
    assert found["shared_bytes"] <= SHARED_BYTES[found["sm"]]


def test_shapes_are_those_asked_for(compiled: dict[str, Any]) -> None:
    wide = compiled["sm_90 bfloat16 wide rows of dim 80, window and cap"]["constants"]
    assert (wide["DIM"], wide["DIM_PAD"], wide["WINDOWED"], wide["CAPPED"], wide["PARTIAL"]) == (
        80,
        128,
        True,
        True,
        False,
    )
    narrow = compiled["sm_90 bfloat16 narrow states of dim 128"]["constants"]
    assert narrow["QUERY_ROWS"] < wide["QUERY_ROWS"] and narrow["PARTIAL"]


def test_what_does_not_fit_is_said(compiled: dict[str, Any]) -> None:
    assert "shared memory" in compiled[IMPOSSIBLE]["error"]
