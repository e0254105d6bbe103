"""Launches Triton kernels: the one place where a kernel meets its grid, so that nothing else sees Triton's call syntax.

Contracts: K140.
"""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, int], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `kernel` once for every cell of `grid`; an empty grid runs nothing. Constants and `num_stages` go by name."""
    if grid[0] and grid[1]:
        kernel[grid](*arguments, num_warps=num_warps, **constants)
