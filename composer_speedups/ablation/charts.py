"""The pictures of a study: speed-ups, where time and memory go, loss and throughput over steps and over seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from composer_speedups.ablation.drawing import PARTS, SERIES, Drawing, ticks
from composer_speedups.ablation.labels import Labels
from composer_speedups.ablation.names import short_names
from composer_speedups.ablation.row import Row
from composer_speedups.ablation.store import Run
from composer_speedups.ablation.words import flaw
from composer_speedups.measurement.operator_kinds import KINDS
from composer_speedups.measurement.results import MEMORY_KINDS

__all__ = ["charts", "pareto", "shares"]

Curve = list[tuple[float, float]]

_LETTER = 7.3  # mean width of a letter of size 12, in wide fonts such as DejaVu Sans
_POINTS = 160  # of a curve: more cannot be told apart
_DASHES = (None, (7.0, 3.0), (2.0, 3.0))
# Colours of the parts of a step, in the pictures' order; and of the kinds of memory.
_TIME = dict(zip(KINDS, (*PARTS, "slow", "ink", "same", "line", "line"), strict=True))
_MEMORY = dict(zip(MEMORY_KINDS, ("p0", "p2", "slow", "p9", "p3"), strict=True))
_SMALL = 0.005  # of a bar: parts that are smaller in all bars are shown with `other`


def charts(rows: Sequence[Row], runs: Sequence[Run]) -> dict[str, Drawing]:
    """By the name of its file, every picture for which there is something to show."""
    names = dict(zip((row["recipe"] for row in rows), short_names([row["recipe"] for row in rows]), strict=True))
    by_recipe: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if run.status == "ok" and run.result.get("losses"):
            by_recipe.setdefault(run.recipe, []).append(run.result)
    series = {names[row["recipe"]]: by_recipe[row["recipe"]] for row in rows if row["recipe"] in by_recipe}
    found: dict[str, Drawing | None] = {
        "speedups": _bars(rows, names),
        "speed_memory": _speed_memory(rows, names),
        "step_time": _step_time(rows, names),
        "memory": _memory(rows, names),
    }
    for file, title, over, value in (
        ("loss_steps", "Loss over steps", "step", _losses),
        ("loss_seconds", "Loss over seconds", "seconds of training", _losses),
        ("throughput_steps", "Samples/s over steps", "step", _speeds),
        ("throughput_seconds", "Samples/s over seconds", "seconds of training", _speeds),
    ):
        curves = {name: _curve(results, value, over != "step") for name, results in series.items()}
        found[file] = _lines(title, over, {name: curve for name, curve in curves.items() if len(curve) > 1})
    return {file: drawing for file, drawing in found.items() if drawing is not None}


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (memory, speed): those that no other one beats in both, by growing memory.

    >>> pareto([(1, 10), (2, 9), (3, 12)])
    [(1, 10), (3, 12)]
    """
    best: list[tuple[float, float]] = []
    for memory, speed in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or speed > best[-1][1]:
            best.append((memory, speed))
    return best


def _bars(rows: Sequence[Row], names: Mapping[str, str]) -> Drawing | None:
    """Speed-ups as bars from 1, their intervals as lines, the published figures as diamonds."""
    shown = [row for row in rows if row["speedup"]]
    if len(shown) < 2:
        return None
    published = [(row["published"] or {}).get("speedup") for row in shown]
    values = [1.0, *(row["speedup"] for row in shown), *(p for p in published if p)]
    # An interval of few seeds can be very wide: it is cut where it would squeeze all bars.
    reach = max(values) - min(values) or 0.1
    bounds = [b for row in shown for b in row["speedup_interval"] or []]
    low = max(min([*values, *bounds]), min(values) - reach)
    high = min(max([*values, *bounds]), max(values) + reach)
    pad = 0.04 * (high - low) or 0.1
    left = min(200.0, 14 + _LETTER * max(len(names[row["recipe"]]) for row in shown))
    right, step = 404.0, 26
    drawing = Drawing("Speed-up of every recipe", height=step * len(shown) + 34)

    def x(value: float) -> float:
        return left + (min(max(value, low), high) - low + pad) / (high - low + 2 * pad) * (right - left)

    bottom = drawing.height - 24
    for tick in ticks(low, high, 5):
        drawing.line([(x(tick), 2), (x(tick), bottom)], "line")
        drawing.text(x(tick), bottom + 17, f"{tick:g}x", "soft", "middle", 12)
    for n, (row, source) in enumerate(zip(shown, published, strict=True)):
        y, value, name = step * n + 4, row["speedup"], names[row["recipe"]]
        colour = {"faster": "fast", "slower": "slow"}.get(row["speed_verdict"], "same") if _sound(row) else "same"
        start, end = sorted((x(1), x(value)))
        drawing.text(left - 8, y + 14, _cut(name, left - 14), anchor="end", size=12)
        drawing.box(start, y + 3, max(1.5, end - start), 14, colour, f"{name}: {value:.3f}x, {row['speed_verdict']}")
        if row["speedup_interval"]:
            a, b = map(x, row["speedup_interval"])
            drawing.line([(a, y + 10), (b, y + 10)], "ink", 1.5)
            for edge, bound in zip((a, b), row["speedup_interval"], strict=True):
                if low <= bound <= high:
                    drawing.line([(edge, y + 6), (edge, y + 14)], "ink", 1.5)
                else:  # it goes on
                    back = 5 if bound < low else -5
                    drawing.line([(edge + back, y + 5), (edge, y + 10), (edge + back, y + 15)], "ink", 1.5)
        if source:
            p = x(source)
            drawing.line(
                [(p, y + 3), (p + 6, y + 10), (p, y + 17), (p - 6, y + 10), (p, y + 3)],
                "ink",
                1.5,
                hint=f"published: {source:g}x",
            )
        drawing.text(right + 8, y + 14, f"{value:.2f}x", size=12)
    drawing.line([(x(1), 2), (x(1), bottom)], "ink")
    return drawing


def _sound(row: Row) -> bool:
    """Whether nothing but its speed is to be said of a row."""
    return row["stable"] is not False and not flaw(row)


def _speed_memory(rows: Sequence[Row], names: Mapping[str, str]) -> Drawing | None:
    shown = [row for row in rows if row["samples_per_second"] and row["peak_memory_bytes"]]
    if len(shown) < 2:
        return None
    points = [(row["peak_memory_bytes"] / 1e6, row["samples_per_second"]) for row in shown]
    # What diverged, failed in part or did nothing is shown, but beats nobody.
    best = pareto([point for row, point in zip(shown, points, strict=True) if _sound(row)])
    drawing = Drawing("Speed against memory", height=360)
    x, y = _axes(drawing, points, "peak memory, MB", "samples/s", right=438, top=30, bottom=300)
    corners = [(x(memory), y(speed)) for memory, speed in best]
    stairs: Curve = corners[:1]
    for (_, level), corner in pairwise(corners):
        stairs += [(corner[0], level), corner]
    if stairs:
        drawing.line(stairs, "fast", 1.5, (5, 3), hint="no recipe is faster with less memory")
    places = [(x(memory), y(speed)) for memory, speed in points]
    labels = Labels(places, stairs, frame=(56, 0, 458, 302))
    for row, point, place in zip(shown, points, places, strict=True):
        name = names[row["recipe"]]
        hint = f"{name}: {point[1]:.4g} samples/s, {point[0]:,.0f} MB"
        drawing.dot(*place, 5, "fast" if point in best else "same", hint, hollow=point not in best)
        if label := labels.place(place, _LETTER * len(name)):
            start, tie = label
            if tie:
                drawing.line(tie, "soft", 0.8)
            drawing.text(*start, name, size=12, halo=True)
    return drawing


def shares(row: Row) -> dict[str, float]:
    """Of a row's step, the share of each kind of work, in the pictures' order; empty where nobody has looked."""
    seconds = row["step_profile"]
    whole = sum(seconds.values())
    return {kind: seconds[kind] / whole for kind in dict.fromkeys([*_TIME, *seconds]) if kind in seconds}


def _step_time(rows: Sequence[Row], names: Mapping[str, str]) -> Drawing | None:
    """Bars as long as a sample takes, in the parts of a step."""
    shown = [row for row in rows if shares(row) and row["samples_per_second"]]
    if not shown:
        return None
    seen = {kind for row in shown for kind, share in shares(row).items() if share >= _SMALL} | {"other"}
    bars = []
    for row in shown:
        parts: dict[str, float] = dict.fromkeys((kind for kind in _TIME if kind in seen), 0.0)
        for kind, share in shares(row).items():
            parts[kind if kind in parts else "other"] += share
        hints = {kind: f"{kind} {share:.1%}" for kind, share in parts.items()}
        known = ", ".join(f"{name} {1e3 * s:.2g} ms a step" for name, s in row["step_profile_other"].items())
        hints["other"] += f": {known}" if known else ""
        each = 1e3 / row["samples_per_second"]
        bars.append((names[row["recipe"]], [({k: s * each for k, s in parts.items()}, hints)], f"{each:.3g} ms"))
    kinds = {kind: _TIME[kind] for kind in _TIME if any(bar[1][0][0].get(kind) for bar in bars)}
    return _stacked("Where a step's time goes", bars, kinds, "ms a sample")


def _memory(rows: Sequence[Row], names: Mapping[str, str]) -> Drawing | None:
    """For each recipe what was measured, and below it, thinner, what arithmetic had predicted."""
    shown = [row for row in rows if row["memory"]]
    if not shown:
        return None
    kinds = {k: colour for k, colour in _MEMORY.items() if any(k in row["memory"] for row in shown)}
    bars = []
    for row in shown:
        both = []
        for word, found in (("measured", row["memory"]), ("predicted", row["memory_predicted"])):
            sizes = {kind: found.get(kind, 0) / 1e6 for kind in kinds}
            if found:
                both.append((sizes, {kind: f"{kind} {size:,.1f} MB, {word}" for kind, size in sizes.items()}))
        total = sum(both[0][0].values())
        bars.append((names[row["recipe"]], both, f"{total:,.0f} MB"))
    return _stacked("Memory by kind", bars, kinds, "MB")


Bar = tuple[str, list[tuple[dict[str, float], dict[str, str]]], str]


def _stacked(title: str, bars: Sequence[Bar], colours: Mapping[str, str], unit: str) -> Drawing:
    """Horizontal bars of parts: name, one bar or two (the second one thinner), and the sum in words."""
    places, lines = _legend_places(colours)
    top, step = 12 + 18 * lines, 26
    drawing = Drawing(title, height=top + step * len(bars) + 40)
    for (kind, colour), (x, line) in zip(colours.items(), places, strict=True):
        drawing.box(x + 4, 3 + 18 * line, 12, 12, colour)
        drawing.text(x + 20, 14 + 18 * line, kind, size=12)
    left = min(170.0, 14 + _LETTER * max(len(name) for name, *_ in bars))
    right = 452 - _LETTER * max(len(words) for *_, words in bars)
    longest = max(sum(parts.values()) for _, both, _ in bars for parts, _ in both)
    scale, bottom = (right - left) / longest, top + step * len(bars) + 2
    for tick in ticks(0, longest, 4):
        drawing.line([(left + tick * scale, top), (left + tick * scale, bottom)], "line")
        drawing.text(left + tick * scale, bottom + 15, _number(tick), "soft", "middle", 12)
    drawing.text((left + right) / 2, bottom + 32, unit, "soft", "middle", 12)
    for n, (name, both, words) in enumerate(bars):
        y = top + step * n + 4
        drawing.text(left - 8, y + 14, _cut(name, left - 14), anchor="end", size=12)
        end = left
        for (parts, hints), (above, height) in zip(
            both, ((3, 14),) if len(both) == 1 else ((0, 12), (14, 5)), strict=True
        ):
            x = left
            for kind, size in parts.items():
                width = size * scale
                # A gap of half a unit keeps neighbours apart for those who see no difference in their colours.
                if width > 0.2:
                    drawing.box(x, y + above, max(width - 0.5, 0.2), height, colours[kind], f"{name}: {hints[kind]}")
                x += width
            end = max(end, x)
        drawing.text(end + 6, y + 14, words, size=12)
    return drawing


def _legend_places(names: Iterable[str], mark: float = 30.0) -> tuple[list[tuple[float, int]], int]:
    """Where each name of a legend goes, as (x, line), and how many lines there are."""
    places, at, line = [], 0.0, 0
    for name in names:
        width = mark + _LETTER * len(name)
        if at and at + width > 446:
            at, line = 0.0, line + 1
        places.append((at, line))
        at += width
    return places, line + 1


def _lines(title: str, over: str, curves: Mapping[str, Curve]) -> Drawing | None:
    if not curves:
        return None
    legend, lines = _legend_places(curves, 34.0)
    top = 16 + 18 * lines
    drawing = Drawing(title, height=top + 262)
    everything = [point for curve in curves.values() for point in curve]
    x, y = _axes(drawing, everything, over, "", right=448, top=top, bottom=top + 215, margin=0.0)
    for n, (name, curve) in enumerate(curves.items()):
        colour, dash = SERIES[n % len(SERIES)], _DASHES[n // len(SERIES) % len(_DASHES)]
        drawing.line([(x(a), y(b)) for a, b in curve], colour, 2, dash, name)
        left, row = legend[n]
        drawing.line([(left + 4, 12 + 18 * row), (left + 24, 12 + 18 * row)], colour, 2.5, dash)
        drawing.text(left + 28, 16 + 18 * row, name, size=12)
    return drawing


def _axes(
    drawing: Drawing,
    points: Sequence[tuple[float, float]],
    across: str,
    up: str,
    *,
    right: float,
    top: float,
    bottom: float,
    margin: float = 0.08,
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Draw axes around `points`; return where a value lies on each."""
    left = 54.0
    scales = []
    for n in (0, 1):
        low, high = min(p[n] for p in points), max(p[n] for p in points)
        pad = (margin if n == 0 else max(margin, 0.05)) * (high - low) or (abs(high) * 0.05 if low == high else 0.0)
        scales.append((low - pad, high + pad if high + pad > low - pad else low + 1))
    (x0, x1), (y0, y1) = scales

    def x(value: float) -> float:
        return left + (value - x0) / (x1 - x0) * (right - left)

    def y(value: float) -> float:
        return bottom - (value - y0) / (y1 - y0) * (bottom - top)

    for tick in ticks(y0, y1, 5):
        drawing.line([(left, y(tick)), (right, y(tick))], "line")
        drawing.text(left - 6, y(tick) + 4, _number(tick), "soft", "end", 12)
    for tick in ticks(x0, x1, 6):
        drawing.line([(x(tick), bottom), (x(tick), bottom + 4)], "soft")
        drawing.text(x(tick), bottom + 17, _number(tick), "soft", "middle", 12)
    drawing.line([(left, bottom), (right, bottom)], "soft")
    drawing.text((left + right) / 2, bottom + 36, across, "soft", "middle", 12)
    if up:
        drawing.text(6, 14, up, "soft", size=12)
    return x, y


def _losses(result: Mapping[str, Any]) -> list[float | None]:
    return list(result.get("losses") or [])


def _speeds(result: Mapping[str, Any]) -> list[float | None]:
    seconds = result.get("step_seconds") or []
    samples = result.get("step_samples") or [result.get("batch_size")] * len(seconds)
    return [held / s if s and held else None for held, s in zip(samples, seconds, strict=False)]


def _curve(results: Sequence[Mapping[str, Any]], value: Callable[..., list[float | None]], seconds: bool) -> Curve:
    """The median over the seeds at each step, against the step or the seconds since the start."""
    columns = [value(result) for result in results]
    clocks = [list(accumulate(s or 0.0 for s in result.get("step_seconds") or [])) for result in results]
    curve: Curve = []
    for step in range(max(map(len, columns), default=0)):
        found = [c[step] for c in columns if step < len(c)]
        values = [v for v in found if v is not None and math.isfinite(v)]
        times = [c[step] for c in clocks if step < len(c)]
        if values and (times or not seconds):
            curve.append((statistics.median(times) if seconds else step + 1, statistics.median(values)))
    size = math.ceil(len(curve) / _POINTS)
    if size < 2:
        return curve
    parts = [curve[n : n + size] for n in range(0, len(curve), size)]
    return [(statistics.mean(p[0] for p in part), statistics.median(p[1] for p in part)) for part in parts]


def _cut(text: str, width: float) -> str:
    count = math.floor(width / _LETTER + 1e-6)  # the width of ten letters is room for ten, rounded or not
    return text if len(text) <= count else text[: max(1, count - 1)] + "…"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
