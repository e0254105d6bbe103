"""A plot of hit rate against capacity as one SVG text: no plotting library, the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, log2

WIDTH, HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 180, 40, 50
_COLOURS = (
    "#0b6e4f", "#c1121f", "#1d3557", "#f4a261", "#6a4c93", "#2a9d8f", "#8d99ae", "#bc6c25", "#e63946", "#457b9d",
    "#a7c957", "#333333",
)  # fmt: skip


def svg_of_curves(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """One line per policy; capacity in blocks on a log axis, hit rate from 0."""
    capacities = sorted({capacity for points in curves.values() for capacity, _ in points})
    top = max((rate for points in curves.values() for _, rate in points), default=0.0)
    top = max(0.05, ceil(top * 20) / 20)
    low, high = log2(capacities[0]), log2(capacities[-1])
    span = max(high - low, 1.0)

    def x(capacity: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (log2(capacity) - low) / span

    def y(rate: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * rate / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for step in range(6):
        rate = top * step / 5
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.3f}</text>'
        )
    for capacity in capacities:
        parts.append(
            f'<text x="{x(capacity):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{capacity}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">capacity in blocks</text>')
    for number, (name, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x(capacity):.1f},{y(rate):.1f}" for capacity, rate in points)
        legend = _TOP + 18 * number
        parts += [
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<line x1="{WIDTH - _RIGHT + 14}" x2="{WIDTH - _RIGHT + 38}" y1="{legend}" y2="{legend}" '
            f'stroke="{colour}" stroke-width="2"/>',
            f'<text x="{WIDTH - _RIGHT + 44}" y="{legend + 4}">{escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])
