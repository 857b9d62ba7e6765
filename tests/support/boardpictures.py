"""Draws a board from what its own queries brought: a picture for the docs, not Grafana's own drawing."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from shoal_dev.generate.boards.plan import COLUMNS, DashboardPlan, GridPlace, Panel, PanelRow
from tests.support.boards import Series, Shown

_INCHES: Final = (0.6, 0.36)
"""Of a column and of a line of the grid."""
_GAP: Final = 0.1
_COLORS: Final = ("#3f6833", "#1f60c4", "#e0a000", "#c4162a", "#8f3bb8", "#0f8a8a", "#b35c00", "#6e6e6e", "#d683ce")
_MARKS: Final = {"green": "#2f8132", "yellow": "#c69500", "orange": "#d9730d", "red": "#c4162a"}
_LEGENDS: Final = 8
"""Of a panel at most."""

Axes = Any  # matplotlib's own types are largely unknown


def draw(board: DashboardPlan, found: Sequence[Sequence[Sequence[Series]]], shown: Shown, path: Path) -> None:
    """Writes the picture. `found`: of each panel of the board, of each of its queries, what it brought."""
    from matplotlib.figure import Figure

    placed = list(board.placed())
    lines = max(place.y + place.height for _, place in placed)
    width, height = COLUMNS * _INCHES[0], lines * _INCHES[1] + 0.5
    figure: Any = Figure(figsize=(width, height), facecolor="#f4f5f5")
    figure.text(_GAP / width, 1 - 0.25 / height, board.title, size=13, weight="bold", va="center")
    span = f"{(shown.end - shown.start) / 60:.0f} minutes of the demo; drawn from the board's queries, not by Grafana"
    figure.text(1 - _GAP / width, 1 - 0.25 / height, span, size=8, color="#666666", ha="right", va="center")
    brought = iter(found)
    for thing, place in placed:
        if isinstance(thing, PanelRow):
            y = 1 - (0.5 + (place.y + 0.5) * _INCHES[1]) / height
            figure.text(_GAP / width, y, thing.title, size=11, weight="bold", color="#444444", va="center")
        else:
            _panel(_axes(figure, place, width, height), thing, next(brought), shown)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """With few colours: a third of the bytes, and nothing is lost that lines and letters need."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=80, format="png")
    picture: Any = Image.open(drawn)
    picture.convert("RGB").quantize(64, dither=0).save(path, optimize=True)


def _axes(figure: Any, place: GridPlace, width: float, height: float) -> Axes:
    """A white card with its title, and the axes inside it."""
    from matplotlib.patches import Rectangle

    left, top = place.x * _INCHES[0] + _GAP / 2, 0.5 + place.y * _INCHES[1] + _GAP / 2
    wide, high = place.width * _INCHES[0] - _GAP, place.height * _INCHES[1] - _GAP
    card = Rectangle(
        (left / width, 1 - (top + high) / height),
        wide / width,
        high / height,
        transform=figure.transFigure,
        facecolor="white",
        edgecolor="#dddddd",
        zorder=-1,
    )
    figure.add_artist(card)
    axes = figure.add_axes(
        ((left + 0.55) / width, 1 - (top + high - 0.3) / height, (wide - 0.7) / width, (high - 0.65) / height)
    )
    axes.tick_params(labelsize=7, colors="#555555", length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return axes


def _panel(axes: Axes, panel: Panel, brought: Sequence[Sequence[Series]], shown: Shown) -> None:
    axes.set_title(panel.title, size=9, loc="left", x=-0.02, pad=5)
    match panel.kind:
        case "number":
            _number(axes, panel, brought)
        case "table":
            _table(axes, panel, brought)
        case "lines" | "stacked":
            _lines(axes, panel, [series for of in brought for series in of], shown)


def _number(axes: Axes, panel: Panel, brought: Sequence[Sequence[Series]]) -> None:
    axes.axis("off")
    series = [one for of in brought for one in of]
    for number, one in enumerate(series):
        value = one.samples[-1][1]
        color = "#2f8132"
        for mark in panel.marks:
            color = _MARKS[mark.color] if value >= mark.value else color
        text = f"{said(value, panel.unit)} {one.name()}".strip()
        axes.text(0.5, 0.55 - 0.4 * number, text, size=17, weight="bold", color=color, ha="center", va="center")
    if not series:
        axes.text(0.5, 0.5, "no data", size=10, color="#888888", ha="center")


def _lines(axes: Axes, panel: Panel, series: Sequence[Series], shown: Shown) -> None:
    axes.set_xlim(0, (shown.end - shown.start) / 60)
    if panel.kind == "stacked" and series:
        steps = [shown.start + n * shown.step for n in range(int((shown.end - shown.start) / shown.step) + 1)]
        known = [{round(at - shown.start, 1): value for at, value in one.samples} for one in series]
        minutes = [(at - shown.start) / 60 for at in steps]
        values = [[of.get(round(at - shown.start, 1), 0.0) for at in steps] for of in known]
        names = [one.name() for one in series]
        axes.stackplot(minutes, *values, labels=names, colors=_COLORS, alpha=0.75, linewidth=0)
    else:
        for number, one in enumerate(series):
            minutes, values = _with_holes(one, shown)
            axes.plot(minutes, values, label=one.name(), color=_COLORS[number % len(_COLORS)], linewidth=1.1)
    highest = max((value for one in series for _, value in one.samples), default=0.0)
    top = axes.get_ylim()[1] if highest > 0 else 1.0
    for mark in panel.marks:
        if mark.value <= top:
            axes.axhline(mark.value, color=_MARKS[mark.color], linewidth=0.8, linestyle="--")
    axes.set_ylim(bottom=panel.least, top=panel.most if panel.most is not None else top)
    axes.yaxis.set_major_formatter(lambda value, _: said(value, panel.unit))
    axes.grid(axis="y", color="#eeeeee", linewidth=0.6)
    if not series:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, size=10, color="#888888", ha="center")
    handles, names = axes.get_legend_handles_labels()
    kept = [(handle, name) for handle, name in zip(handles, names, strict=True) if name][:_LEGENDS]
    if kept:
        axes.legend(
            *zip(*kept, strict=True), fontsize=6, framealpha=0.7, edgecolor="none", loc="best", handlelength=1.2
        )


def _with_holes(one: Series, shown: Shown) -> tuple[list[float], list[float]]:
    """Of a time of which nothing is known nothing is drawn."""
    minutes: list[float] = []
    values: list[float] = []
    before: float | None = None
    for at, value in one.samples:
        if before is not None and at - before > 1.5 * shown.step:
            minutes.append((before - shown.start) / 60)
            values.append(math.nan)
        minutes.append((at - shown.start) / 60)
        values.append(value)
        before = at
    return minutes, values


def _table(axes: Axes, panel: Panel, brought: Sequence[Sequence[Series]]) -> None:
    """One row per set of labels, as Grafana's merge makes them; what a query does not have stays empty."""
    axes.axis("off")
    labels = sorted({name for of in brought for one in of for name in one.labels})
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    # Those with most labels first: the others are merged into them.
    for query, of in sorted(zip(panel.queries, brought, strict=True), key=lambda pair: -_labelled(pair[1])):
        for one in of:
            value = said(one.samples[-1][1], panel.unit)
            fitting = [key for key in rows if all(one.labels.get(n, v) == v for n, v in zip(labels, key, strict=True))]
            for key in fitting or [tuple(one.labels.get(name, "") for name in labels)]:
                rows.setdefault(key, {})[query.legend] = value
    columns = [*labels, *(query.legend for query in panel.queries)]
    cells = [[*key, *(row.get(query.legend, "") for query in panel.queries)] for key, row in sorted(rows.items())]
    if not cells:
        axes.text(0.5, 0.5, "no data", size=10, color="#888888", ha="center")
        return
    table = axes.table(cellText=cells[:10], colLabels=columns, loc="upper left", cellLoc="left", edges="horizontal")
    table.auto_set_font_size(False)
    table.set_fontsize(7)
    table.auto_set_column_width(list(range(len(columns))))


def _labelled(of: Sequence[Series]) -> int:
    return max((len(one.labels) for one in of), default=0)


def said(value: float, unit: str) -> str:
    """A value for people."""
    match unit:
        case "percentunit":
            return f"{value * 100:.3g} %"
        case "s":
            return f"{value * 1000:.3g} ms" if 0 < abs(value) < 1 else f"{value:.3g} s"
        case "bytes":
            for prefix in ("", "Ki", "Mi", "Gi"):
                if abs(value) < 1024:
                    return f"{value:.3g} {prefix}B"
                value /= 1024
            return f"{value:.3g} TiB"
        case _:
            suffix = {"reqps": "/s", "ops": "/s"}.get(unit, "")
            if abs(value) >= 1e6:
                return f"{value / 1e6:.3g} M{suffix}"
            return f"{value / 1e3:.3g} k{suffix}" if abs(value) >= 1e4 else f"{value:.4g}{suffix}"
