"""A drawing of lines, boxes and words that becomes SVG for a page, SVG for a file, or PNG.

Small on purpose: the page's drawings follow its colours, light or dark, and cost milliseconds, as they are made
again after every run of a study.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

__all__ = ["PARTS", "SERIES", "Drawing", "ticks"]

# Okabe and Ito's colours, which the colour-blind tell apart; their yellow is left out, too pale on white.
SERIES = ("c0", "c1", "c2", "c3", "c4", "c5")
# Tol's muted colours, and one of Okabe and Ito's: for bars of many parts, which lie in the order of their legend.
PARTS = ("p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9")
_COLOURS = {
    "ink": "#1b1f24",
    "soft": "#59636e",
    "line": "#d5dae0",
    "page": "#ffffff",
    "fast": "#0072b2",
    "slow": "#d55e00",
    "same": "#8a939c",
    "c0": "#0072b2",
    "c1": "#d55e00",
    "c2": "#009e73",
    "c3": "#cc79a7",
    "c4": "#e69f00",
    "c5": "#56b4e9",
    "p0": "#332288",
    "p1": "#cc6677",
    "p2": "#44aa99",
    "p3": "#ddcc77",
    "p4": "#117733",
    "p5": "#88ccee",
    "p6": "#882255",
    "p7": "#e69f00",
    "p8": "#999933",
    "p9": "#aa4499",
}
_FONT = "system-ui, 'DejaVu Sans', sans-serif"
_SCALE = 2  # PNG pixels to a unit of the drawing
_SMOOTH = 2  # drawn so much larger, then reduced: Pillow's lines have rough edges


@dataclass
class Drawing:
    """Shapes on a canvas of `width` x `height` units, in the order in which they are drawn."""

    title: str
    width: float = 460  # no more: a phone shows it at four fifths of its size
    height: float = 340
    _shapes: list[tuple[str, dict]] = field(default_factory=list)

    @property
    def dashed(self) -> bool:
        """Whether one of the lines is."""
        return any(kind == "line" and shape["dash"] for kind, shape in self._shapes)

    def line(
        self,
        points: Sequence[tuple[float, float]],
        colour: str,
        width: float = 1.0,
        dash: tuple[float, float] | None = None,
        hint: str = "",
    ) -> None:
        if len(points) > 1:
            self._shapes.append(("line", dict(points=points, colour=colour, width=width, dash=dash, hint=hint)))

    def box(self, x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> None:
        self._shapes.append(("box", dict(x=x, y=y, width=width, height=height, colour=colour, hint=hint)))

    def dot(self, x: float, y: float, radius: float, colour: str, hint: str = "", hollow: bool = False) -> None:
        self._shapes.append(("dot", dict(x=x, y=y, radius=radius, colour=colour, hint=hint, hollow=hollow)))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        colour: str = "ink",
        anchor: str = "start",
        size: float = 13,
        halo: bool = False,
    ) -> None:
        """`y` is the line on which the letters stand; `anchor` is `start`, `middle` or `end`; a halo hides lines."""
        self._shapes.append(("text", dict(x=x, y=y, text=text, colour=colour, anchor=anchor, size=size, halo=halo)))

    def svg(self, themed: bool = False) -> str:
        """SVG; `themed` takes the colours of the page that it is put into."""
        colours = {name: f"var(--{name})" for name in _COLOURS} if themed else _COLOURS
        size = "" if themed else f' width="{self.width:g}" height="{self.height:g}"'
        name = escape(self.title)
        # Elements of a page need no namespace, and a page without addresses is plainly one without a network.
        space = "" if themed else ' xmlns="http://www.w3.org/2000/svg"'
        out = [f'<svg{space} viewBox="0 0 {self.width:g} {self.height:g}"{size} role="img" aria-label="{name}">']
        if not themed:
            out.append(f'<rect width="100%" height="100%" fill="{colours["page"]}"/>')
        for kind, s in self._shapes:
            hint = f"<title>{escape(s['hint'])}</title>" if s.get("hint") else ""
            colour = colours[s["colour"]]
            if kind == "line":
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in s["points"])
                dash = f' stroke-dasharray="{s["dash"][0]:g} {s["dash"][1]:g}"' if s["dash"] else ""
                style = f'fill="none" stroke="{colour}" stroke-width="{s["width"]:g}" stroke-linejoin="round"'
                out.append(f'<polyline points="{points}" {style}{dash}>{hint}</polyline>')
            elif kind == "box":
                place = f'x="{s["x"]:.1f}" y="{s["y"]:.1f}" width="{s["width"]:.1f}" height="{s["height"]:.1f}"'
                out.append(f'<rect {place} fill="{colour}">{hint}</rect>')
            elif kind == "dot":
                style = f'fill="{colours["page"]}" stroke="{colour}" stroke-width="1.5"'
                style = style if s["hollow"] else f'fill="{colour}"'
                out.append(f'<circle cx="{s["x"]:.1f}" cy="{s["y"]:.1f}" r="{s["radius"]:g}" {style}>{hint}</circle>')
            else:
                place = f'x="{s["x"]:.1f}" y="{s["y"]:.1f}" text-anchor="{s["anchor"]}"'
                font = f'font-family="{_FONT}" font-size="{s["size"]:g}" fill="{colour}"'
                if s["halo"]:
                    font += f' paint-order="stroke" stroke="{colours["page"]}" stroke-width="4"'
                out.append(f"<text {place} {font}>{escape(s['text'])}</text>")
        return "".join(out) + "</svg>"

    def png(self) -> bytes:
        from PIL import Image, ImageDraw, ImageFont

        k = _SCALE * _SMOOTH
        image = Image.new("RGB", (round(self.width * k), round(self.height * k)), _COLOURS["page"])
        pen = ImageDraw.Draw(image)
        for kind, s in self._shapes:
            colour = _COLOURS[s["colour"]]
            if kind == "line":
                width = max(1, round(s["width"] * k))
                for part in _dashed(s["points"], s["dash"]):
                    pen.line([(x * k, y * k) for x, y in part], fill=colour, width=width, joint="curve")
            elif kind == "box":
                right, bottom = s["x"] + s["width"], s["y"] + s["height"]
                pen.rectangle([s["x"] * k, s["y"] * k, max(right * k - 1, s["x"] * k), bottom * k - 1], fill=colour)
            elif kind == "dot":
                x, y, r = s["x"] * k, s["y"] * k, s["radius"] * k
                fill = _COLOURS["page"] if s["hollow"] else colour
                pen.ellipse([x - r, y - r, x + r, y + r], fill=fill, outline=colour, width=round(1.5 * k))
            else:
                anchor = {"start": "ls", "middle": "ms", "end": "rs"}[s["anchor"]]
                font = ImageFont.load_default(s["size"] * k)
                edge = dict(stroke_width=2 * k, stroke_fill=_COLOURS["page"]) if s["halo"] else {}
                pen.text((s["x"] * k, s["y"] * k), s["text"], fill=colour, font=font, anchor=anchor, **edge)
        size = (round(self.width * _SCALE), round(self.height * _SCALE))
        buffer = io.BytesIO()
        image.resize(size, Image.Resampling.LANCZOS).save(buffer, "PNG", optimize=True)
        return buffer.getvalue()


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from `low` to `high`.

    >>> ticks(0, 47)
    [0, 10, 20, 30, 40]
    """
    if not high > low:
        return [low]
    rough = (high - low) / most
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _dashed(points: Sequence[tuple[float, float]], dash: tuple[float, float] | None) -> list[list[tuple[float, float]]]:
    """The pieces of a line that are drawn."""
    if dash is None:
        return [list(points)]
    pieces, piece, on, left = [], [points[0]], True, dash[0]
    for (x0, y0), (x1, y1) in pairwise(points):
        length, done = math.hypot(x1 - x0, y1 - y0), 0.0
        while length - done > left:
            done += left
            point = (x0 + (x1 - x0) * done / length, y0 + (y1 - y0) * done / length)
            if on:
                pieces.append([*piece, point])
            piece, on = [point], not on
            left = dash[0] if on else dash[1]
        left -= length - done
        if on:
            piece.append((x1, y1))
    return [*pieces, piece] if on and len(piece) > 1 else pieces
