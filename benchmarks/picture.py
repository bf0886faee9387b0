"""A bar chart as SVG, in a few lines of our own."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

COLOURS = ("#1f6feb", "#8b949e", "#6e7681", "#bf8700", "#57ab5a", "#b083f0", "#e0823d", "#39c5cf")
LEFT, WIDTH, BAR, GAP = 190, 620, 18, 30


@dataclass(frozen=True)
class Group:
    """Bars that are compared with each other."""

    title: str
    bars: list[tuple[str, float]]
    """Name and value."""
    limit: float | None = None
    """Drawn as a line: what is possible."""


def draw(path: Path, title: str, unit: str, groups: list[Group]) -> None:
    """One group below the other, each with a scale of its own."""
    names = list(dict.fromkeys(name for group in groups for name, _ in group.bars))
    colour = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    body: list[str] = []
    y = 40
    for group in groups:
        body.append(f'<text x="10" y="{y + 12}" class="head">{escape(group.title)}</text>')
        y += 22
        top = max([value for _, value in group.bars] + [group.limit or 0.0]) or 1.0
        begin = y
        for name, value in group.bars:
            length = value / top * WIDTH
            body.append(f'<text x="{LEFT - 8}" y="{y + 13}" class="name">{escape(name)}</text>')
            body.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 3}" '
                f'fill="{colour[name]}"/>'
            )
            body.append(f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}">{value:.2f}</text>')
            y += BAR
        if group.limit:
            x = LEFT + group.limit / top * WIDTH
            body.append(
                f'<line x1="{x:.1f}" y1="{begin - 4}" x2="{x:.1f}" y2="{y}" stroke="#d1242f"/>'
                f'<text x="{x + 4:.1f}" y="{begin - 6}" class="limit">raw {group.limit:.2f}</text>'
            )
        y += GAP
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{y}" '
        'font-family="sans-serif" font-size="12">',
        "<style>.head,.title{font-weight:bold}.title{font-size:15px}.name{text-anchor:end}"
        ".limit{fill:#d1242f}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="24" class="title">{escape(title)} ({escape(unit)})</text>',
        *body,
        "</svg>",
    ]
    path.write_text("\n".join(text) + "\n")
