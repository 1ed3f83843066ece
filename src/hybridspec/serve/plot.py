"""A plot of latencies as SVG, readable on light and dark pages; needs no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["distribution_svg"]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 60, 20, 44, 50
_COLORS = ("#2f7ed8", "#d2691e", "#2e8b57", "#8a5bc0")


def distribution_svg(series: Mapping[str, Sequence[float]], title: str, unit: str) -> str:
    """Draw which share of the values lies below each value, on a logarithmic axis.

    Args:
        series: positive values by name, none of them empty.
        title: what stands above.
        unit: of the values.
    """
    every = [value for values in series.values() for value in values]
    low = math.floor(math.log10(max(min(every), 1e-6)))
    high = max(math.ceil(math.log10(max(max(every), 1e-6))), low + 1)

    def x(value: float) -> float:
        share = (math.log10(max(value, 1e-6)) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="#808080" stroke-width="1">',
        f"<title>{escape(title)}</title>",
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(
            f'<path d="M{at:.1f} {y(0):.1f}V{y(1):.1f}" stroke="#80808055"/>'
            f'<text x="{at:.1f}" y="{y(0) + 18:.1f}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(
            f'<path d="M{_LEFT} {y(share):.1f}H{_WIDTH - _RIGHT}" stroke="#80808055"/>'
            f'<text x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        )
    parts.append(
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 12}" text-anchor="end">{escape(unit)}</text>'
    )
    for i, (name, values) in enumerate(series.items()):
        color, ordered = _COLORS[i % len(_COLORS)], sorted(values)
        points = " ".join(
            f"{x(value):.1f},{y((place + 1) / len(ordered)):.1f}"
            for place, value in enumerate(ordered)
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{_LEFT + 170 * i}" y="38" fill="{color}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
