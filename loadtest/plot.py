"""Line charts as inline SVG. Knows nothing of load tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 36, 44
_LEGEND_STEP = 90
_COLOURS = ("#3b7dd8", "#d8663b", "#3ba55c", "#9b59b6", "#c9a227", "#17a2b8", "#e84393", "#7f8c8d")


@dataclass(frozen=True, slots=True)
class Series:
    """A line; without a label it has no entry in the legend."""

    label: str
    points: Sequence[tuple[float, float]]


def line_chart(
    title: str,
    x_unit: str,
    y_unit: str,
    series: Sequence[Series],
    *,
    y_max: float | None = None,
) -> str:
    """An SVG element. Both axes start at 0; a chart without points says so."""
    points = [point for line in series for point in line.points]
    x_ticks = _ticks(max((x for x, _ in points), default=1.0))
    y_ticks = _ticks(y_max if y_max is not None else max((y for _, y in points), default=1.0))
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" font-family="system-ui,sans-serif" '
        f'font-size="12" fill="currentColor">',
        f'<text x="{_LEFT}" y="18" font-size="14" font-weight="600">{escape(title)}</text>',
    ]
    for value in y_ticks:
        y = _y(value, y_ticks[-1])
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    for value in x_ticks:
        x = _x(value, x_ticks[-1])
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
        )
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{escape(x_unit)}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="18" text-anchor="end">{escape(y_unit)}</text>'
    )
    for index, line in enumerate(series):
        parts += _line(line, index, x_ticks[-1], y_ticks[-1])
    if not points:
        parts.append(
            f'<text x="{_WIDTH / 2}" y="{_HEIGHT / 2}" text-anchor="middle">no data</text>'
        )
    parts.append("</svg>")
    return "".join(parts)


def _line(line: Series, index: int, x_end: float, y_end: float) -> list[str]:
    colour = _COLOURS[index % len(_COLOURS)]
    path = " ".join(f"{_x(x, x_end):.1f},{_y(y, y_end):.1f}" for x, y in line.points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    if len(line.points) <= 30:
        parts += [
            f'<circle cx="{_x(x, x_end):.1f}" cy="{_y(y, y_end):.1f}" r="3" fill="{colour}">'
            f"<title>{x:g}, {y:g}</title></circle>"
            for x, y in line.points
        ]
    if line.label:
        x = _LEFT + _LEGEND_STEP * index
        parts.append(f'<text x="{x}" y="{_HEIGHT - 8}" fill="{colour}">{escape(line.label)}</text>')
    return parts


def _x(value: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / end


def _y(value: float, end: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(value / end, 1.0)


def _ticks(largest: float) -> list[float]:
    """Round values from 0 to the first one at or above `largest`, at most about six."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(largest / step - 1e-9) + 1)]
