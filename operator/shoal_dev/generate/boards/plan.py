"""What a board is: rows of panels, each with its queries and the page to read when it is red."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

COLUMNS: Final = 24
"""Of Grafana's grid."""

Unit = Literal["short", "s", "reqps", "percentunit", "bytes", "ops"]
"""Of a panel's values, in Grafana's words: a count, seconds, requests per second, a share (1 is all), bytes, events
per second."""
Kind = Literal["lines", "stacked", "number", "table"]
"""`number` shows the newest value; `table` one row per series with its newest value."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """PromQL, and the words of each of its series in the legend, with labels as in `{{pod}}`."""

    expr: str
    legend: str = ""
    empty: str | None = None
    """Why it may have no data in a fleet that serves; without that, it always has some."""


@dataclass(frozen=True, slots=True)
class Mark:
    """From `value` on the panel is of this colour; below the first one it is green."""

    value: float
    color: Literal["yellow", "orange", "red", "green"]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    queries: tuple[PanelQuery, ...]
    unit: Unit = "short"
    kind: Kind = "lines"
    width: int = 8
    """Of the board's 24 columns."""
    marks: tuple[Mark, ...] = ()
    least: float | None = 0
    """Bottom of the axis; None: as the values are."""
    most: float | None = None
    """Top of the axis."""
    runbook: str | None = None
    """Page in docs/runbooks, for who sees it red: `scaling.md`."""

    @property
    def height(self) -> int:
        """On the grid."""
        return 4 if self.kind == "number" else 8


@dataclass(frozen=True, slots=True)
class PanelRow:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top of the board: the values of `label` on the series of `metric`."""

    name: str
    label: str
    metric: str
    of: str
    """The label whose values there are."""
    regex: str = ""
    """What of each value counts: the first group."""
    several: bool = True
    """Whether several and all can be chosen; else one."""


@dataclass(frozen=True, slots=True)
class DashboardPlan:
    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[PanelRow, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)

    def placed(self) -> Iterator[tuple["PanelRow | Panel", "GridPlace"]]:
        """Rows and panels from top to bottom, on Grafana's grid of 24 columns."""
        y = 0
        for row in self.rows:
            yield row, GridPlace(0, y, COLUMNS, 1)
            y += 1
            x = height = 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, height = 0, y + height, 0
                yield panel, GridPlace(x, y, panel.width, panel.height)
                x, height = x + panel.width, max(height, panel.height)
            y += height


@dataclass(frozen=True, slots=True)
class GridPlace:
    """On the grid; a unit of height is about 30 pixels."""

    x: int
    y: int
    width: int
    height: int
