"""Plots as inline SVG: lines over time, stacked areas, and points. Colours are the page's variables, so they suit its light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 760
HEIGHT: Final = 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 40
COLOURS: Final = 8
"""Variables --c0 to --c7."""
TICKS: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points from left to right. `dashed`: a bound, not a measurement. `colour` picks a variable of the page."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is on them, with units. `x_most` and `y_most` fix where they end, from 0 on; `logarithmic`: both are."""

    x: str
    y: str
    x_most: float | None = None
    y_most: float | None = None
    logarithmic: bool = False


def lines(axes: Axes, series: Sequence[Series]) -> str:
    """One line each."""
    scale = _scale(axes, [point for each in series for point in each.points])
    marks = []
    for each in series:
        if not each.points:
            continue
        path = "M" + " L".join(f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in each.points)
        dash = ' stroke-dasharray="6 4"' if each.dashed else ""
        marks.append(f'<path d="{path}" class="line c{each.colour % COLOURS}"{dash}/>')
    return _figure(axes, scale, marks, series)


def areas(axes: Axes, series: Sequence[Series]) -> str:
    """Stacked, the first at the bottom. All have the same places on the x axis."""
    below = [0.0] * max((len(each.points) for each in series), default=0)
    stacked, marks_of = [], []
    for each in series:
        above = [low + y for low, (_, y) in zip(below, each.points, strict=True)]
        stacked.append((each, list(below), above))
        below = above
    xs = [x for x, _ in series[0].points] if series else []
    scale = _scale(axes, [(x, y) for x, y in zip(xs, below, strict=True)])
    for each, low, high in stacked:
        up = [f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in zip(xs, high, strict=True)]
        down = [f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in zip(xs, low, strict=True)]
        path = "M" + " L".join(up + down[::-1]) + "Z"
        marks_of.append(f'<path d="{path}" class="area f{each.colour % COLOURS}"/>')
    return _figure(axes, scale, marks_of, series)


def points(axes: Axes, series: Sequence[Series], diagonal: str = "") -> str:
    """One dot each; `diagonal` names the line on which both are equal."""
    every = [point for each in series for point in each.points]
    scale = _scale(axes, [*every, *((y, x) for x, y in every)])
    marks = [
        f'<circle cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}" r="1.8" class="dot f{each.colour % COLOURS}"/>'
        for each in series
        for x, y in each.points
    ]
    if diagonal:
        low, high = scale.low_x, scale.high_x
        marks.append(
            f'<path d="M{scale.x(low):.1f} {scale.y(low):.1f} L{scale.x(high):.1f} {scale.y(high):.1f}" '
            f'class="line axis" stroke-dasharray="6 4"><title>{escape(diagonal)}</title></path>'
        )
    return _figure(axes, scale, marks, series)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    low_x: float
    high_x: float
    low_y: float
    high_y: float
    logarithmic: bool

    def x(self, value: float) -> float:
        return LEFT + _part(value, self.low_x, self.high_x, self.logarithmic) * (
            WIDTH - LEFT - RIGHT
        )

    def y(self, value: float) -> float:
        part = _part(value, self.low_y, self.high_y, self.logarithmic)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def _part(value: float, low: float, high: float, logarithmic: bool) -> float:
    if logarithmic:
        value, low, high = (math.log10(max(each, 1e-9)) for each in (value, low, high))
    return max(0.0, min(1.0, (value - low) / (high - low)))


def _scale(axes: Axes, found: Sequence[tuple[float, float]]) -> _Scale:
    xs = [x for x, _ in found] or [0.0, 1.0]
    ys = [y for _, y in found] or [0.0, 1.0]
    if axes.logarithmic:
        low: float = 10.0 ** math.floor(math.log10(max(1e-3, min([*xs, *ys]))))
        high = max(10.0 ** math.ceil(math.log10(max(1e-3, *xs, *ys))), low * 10)
        return _Scale(low_x=low, high_x=high, low_y=low, high_y=high, logarithmic=True)
    high_y = axes.y_most if axes.y_most is not None else _round_up(max(ys) or 1.0)
    high_x = axes.x_most if axes.x_most is not None else max(xs)
    return _Scale(low_x=0.0, high_x=max(high_x, 1e-3), low_y=0.0, high_y=high_y, logarithmic=False)


def _round_up(value: float) -> float:
    size = 10.0 ** math.floor(math.log10(value))
    return next(size * step for step in (1, 2, 2.5, 5, 10) if size * step >= value)


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    if logarithmic:
        first, last = round(math.log10(low)), round(math.log10(high))
        return [10.0**power for power in range(first, last + 1)]
    step = _round_up((high - low) / TICKS)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


def _told(value: float) -> str:
    if value >= 1_000_000:
        return f"{value / 1_000_000:g} M"
    if value >= 10_000:
        return f"{value / 1000:g} k"
    return f"{value:.4g}"


def _figure(axes: Axes, scale: _Scale, marks: Sequence[str], series: Sequence[Series]) -> str:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.y)}">']
    for value in _ticks(scale.low_y, scale.high_y, scale.logarithmic):
        at = scale.y(value)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" class="grid"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_told(value)}</text>'
        )
    parts += [
        f'<text x="{scale.x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_told(value)}</text>'
        for value in _ticks(scale.low_x, scale.high_x, scale.logarithmic)
    ]
    parts += marks
    parts.append(f'<path d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" class="line axis"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(axes.x)}</text>'
    )
    parts.append(
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(axes.y)}</text></svg>"
    )
    keys = "".join(
        f'<span class="key"><i class="k{each.colour % COLOURS}{" dash" if each.dashed else ""}"></i>{escape(each.name)}</span>'
        for each in series
    )
    return f'{"".join(parts)}<div class="legend">{keys}</div>'
