"""Line plots as one SVG text: no plotting library, the same input gives the same bytes.

Owns panels: curves over a base-2 log axis, values on a linear axis from 0 or on a base-10 log axis. Invariant: a document
is a pure function of its panels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, floor, log2, log10

import msgspec

WIDTH, HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 180, 40, 50
_COLOURS = (
    "#0b6e4f", "#c1121f", "#1d3557", "#f4a261", "#6a4c93", "#2a9d8f", "#8d99ae", "#bc6c25", "#e63946", "#457b9d",
    "#a7c957", "#333333",
)  # fmt: skip
Curves = Mapping[str, Sequence[tuple[int, float]]]


class Panel(msgspec.Struct, frozen=True):
    """One plot: points (x, y) by curve name. `rate`: y is a share from 0; otherwise y > 0 is on a log axis."""

    title: str
    x_label: str
    curves: Curves
    rate: bool = False


def svg_of_panels(panels: Sequence[Panel]) -> str:
    """The panels one below another."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(panels)}" '
        'font-family="sans-serif" font-size="12">'
    )
    parts = [head, f'<rect width="{WIDTH}" height="{HEIGHT * len(panels)}" fill="white"/>']
    for at, panel in enumerate(panels):
        parts += [f'<g transform="translate(0 {HEIGHT * at})">', *_drawn(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _drawn(panel: Panel) -> list[str]:
    places = sorted({x for points in panel.curves.values() for x, _ in points})
    low, high = log2(places[0]), log2(places[-1])
    span = max(high - low, 1.0)
    y, ticks = _rate_axis(panel.curves) if panel.rate else _log_axis(panel.curves)

    def x(value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (log2(value) - low) / span

    parts = [f'<text x="{_LEFT}" y="22" font-size="15">{escape(panel.title)}</text>']
    for value, label in ticks:
        parts.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for place in places:
        parts.append(
            f'<text x="{x(place):.1f}" y="{HEIGHT - _BOTTOM + 18}" text-anchor="middle">{place}</text>'
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(panel.x_label)}</text>')
    for number, (name, points) in enumerate(panel.curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x(place):.1f},{y(value):.1f}" for place, value in points)
        legend = _TOP + 18 * number
        parts += [
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<line x1="{WIDTH - _RIGHT + 14}" x2="{WIDTH - _RIGHT + 38}" y1="{legend}" y2="{legend}" '
            f'stroke="{colour}" stroke-width="2"/>',
            f'<text x="{WIDTH - _RIGHT + 44}" y="{legend + 4}">{escape(name)}</text>',
        ]
    return parts


_Axis = tuple[Callable[[float], float], list[tuple[float, str]]]


def _rate_axis(curves: Curves) -> _Axis:
    """From 0 to the next twentieth above the highest value; six lines."""
    top = max((value for points in curves.values() for _, value in points), default=0.0)
    top = max(0.05, ceil(top * 20) / 20)
    ticks = [(top * step / 5, f"{top * step / 5:.3f}") for step in range(6)]
    return (lambda value: HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top), ticks


def _log_axis(curves: Curves) -> _Axis:
    """Whole decades around the values."""
    values = [value for points in curves.values() for _, value in points]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    span = max(high - low, 1)
    ticks = [(10.0**decade, f"{10.0**decade:g}") for decade in range(low, low + span + 1)]
    return (lambda value: HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * (log10(value) - low) / span), ticks
