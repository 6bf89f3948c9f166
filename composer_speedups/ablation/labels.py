"""Where the names of points go in a scatter plot: beside their points, over nothing else, and read as no other's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["Labels"]

Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom

_RADIUS = 6.0  # of a point, with some air
_MISREAD = 30  # what it costs to lie nearer to another point; the places below cost their number
_CROSSED = 8  # and to lie on a piece of a line
_TIED = 12.0  # pixels from its point, beyond which a name is tied to it


@dataclass
class Labels:
    """Places names one after the other, each where it disturbs least.

    Args:
        points: all that are drawn.
        line: a line of level and upright pieces, which names had better not cover.
        frame: that names must stay in.
    """

    points: Sequence[Point]
    line: Sequence[Point]
    frame: Box
    _taken: list[Box] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._taken = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in self.points]

    def place(self, point: Point, width: float) -> tuple[Point, list[Point]] | None:
        """Where the text of `point` begins, and the line that ties it to its point (empty beside it); None: no room."""
        found: list[tuple[float, Point, Box]] = []
        for order, (x, y) in enumerate(_around(point, width)):
            box = (x - 3, y - 11, x + width + 3, y + 3)
            if _inside(box, self.frame) and not any(_overlap(box, other) for other in self._taken):
                found.append((order + self._cost(box, point), (x, y), box))
        if not found:
            return None
        _, start, box = min(found, key=lambda one: one[0])
        self._taken.append(box)
        return start, _tie(point, box)

    def _cost(self, box: Box, point: Point) -> float:
        nearest = min((_distance(box, other) for other in self.points if other != point), default=math.inf)
        crossed = sum(_crosses(box, piece) for piece in pairwise(self.line))
        return _MISREAD * (nearest <= _distance(box, point)) + _CROSSED * crossed


def _around(point: Point, width: float) -> list[Point]:
    """Places beside a point, then above and below it, then farther away; the best first."""
    x, y = point
    places = [(x + 9, y + 4), (x - 9 - width, y + 4)]
    places += [(x - width / 2, y + d) for d in (-10, 19)]
    return places + [(x + side, y + d) for d in (-9, 17, -22, 30, -35, 43) for side in (7, -7 - width)]


def _tie(point: Point, box: Box) -> list[Point]:
    """From the point's edge to the box, where that is not right beside it."""
    if _distance(box, point) <= _TIED:
        return []
    x, y = point
    end = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
    part = 5 / math.dist(point, end)
    return [(x + part * (end[0] - x), y + part * (end[1] - y)), end]


def _inside(box: Box, frame: Box) -> bool:
    return box[0] > frame[0] and box[1] > frame[1] and box[2] < frame[2] and box[3] < frame[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _distance(box: Box, point: Point) -> float:
    across = max(box[0] - point[0], 0.0, point[0] - box[2])
    return math.hypot(across, max(box[1] - point[1], 0.0, point[1] - box[3]))


def _crosses(box: Box, piece: tuple[Point, Point]) -> bool:
    (x0, y0), (x1, y1) = piece
    return _overlap(box, (min(x0, x1) - 1, min(y0, y1) - 1, max(x0, x1) + 1, max(y0, y1) + 1))
