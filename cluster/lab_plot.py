"""A plot of hit rate against capacity as one SVG text."""

from __future__ import annotations

from .svg_plot import Curves, Panel, svg_of_panels


def svg_of_curves(curves: Curves, title: str) -> str:
    """One line per policy; capacity in blocks on a log axis, hit rate from 0."""
    return svg_of_panels([Panel(title, "capacity in blocks", curves, rate=True)])
