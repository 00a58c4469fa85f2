"""A figure for documents: curves over time, one panel below the other, as SVG."""

from collections.abc import Mapping, Sequence

_WIDTH, _PANEL, _LEFT, _TOP = 720, 110, 60, 34
_GAP = 26
_COLOURS = ("#2b5cb3", "#b3532b", "#22774a", "#7a3f9d")


def svg(title: str, minutes: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """panels: by heading, curves by name; every axis begins at 0."""
    height = _TOP + len(panels) * (_PANEL + _GAP) + 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="Inter, Helvetica, Arial, sans-serif" font-size="11" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{title}</text>',
    ]
    for index, (heading, curves) in enumerate(panels.items()):
        parts += _panel(_TOP + index * (_PANEL + _GAP), heading, minutes, curves)
    parts.append(f'<text x="{_WIDTH - 10}" y="{height - 6}" text-anchor="end">{minutes[-1]:.0f} minutes</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(top: int, heading: str, minutes: Sequence[float], curves: Mapping[str, Sequence[float]]) -> list[str]:
    right, bottom = _WIDTH - 10, top + _PANEL
    most = max(max(values) for values in curves.values()) * 1.1 or 1.0
    parts = [
        f'<path d="M{_LEFT} {top}V{bottom}H{right}" fill="none" stroke="#888"/>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{_LEFT - 6}" y="{top + 8}" text-anchor="end">{most:{",.0f" if most >= 10 else ".1f"}}</text>',
        f'<text x="{_LEFT}" y="{top - 4}">{heading}</text>',
    ]
    for index, (name, values) in enumerate(curves.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        points = " ".join(
            f"{_LEFT + (right - _LEFT) * minute / minutes[-1]:.1f},{bottom - _PANEL * value / most:.1f}"
            for minute, value in zip(minutes, values, strict=True)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{right - 110 * index}" y="{top - 4}" fill="{colour}" text-anchor="end">{name}</text>')
    return parts
