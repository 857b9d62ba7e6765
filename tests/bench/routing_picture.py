"""Draws the tables of routing rules in docs/routing.md: each rule's p99 of the TTFT beside that of `Seconds`, and what
share of the prompt tokens each rule finds in the caches.

    python -m tests.bench.routing_picture docs/routing.md docs/routing-p99.png docs/routing-cache.png

The page's own tables are read, which `python -m tests.bench.bench_routing --held-out` prints, because to measure them
takes hours.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

OURS: Final = "Seconds"
MARKS: Final = {
    "round robin": ("x", "tab:gray"),
    "least in flight": ("+", "tab:brown"),
    "smg cache_aware (model)": ("s", "tab:orange"),
    "smg least_load (model)": ("D", "tab:red"),
    "PrefixHeads": ("^", "tab:green"),
    "ideal": ("|", "black"),
}
"""Shape and colour of the rules that are drawn."""
CACHE_MARKS: Final = {
    **{rule: MARKS[rule] for rule in MARKS if rule not in ("round robin", "least in flight")},
    OURS: ("o", "tab:blue"),
}
"""The same for the picture of the caches."""
FARTHEST: Final = 20.0
"""Ratios beyond are drawn at the edge."""


@dataclass(frozen=True, slots=True)
class Row:
    traffic: str
    gateways: int
    p99: dict[str, float]
    """Seconds, by rule."""


def rows(page: str) -> tuple[Row, ...]:
    """The page's first table with columns of gateways, of round robin and of `Seconds`.

    Raises:
        ValueError: no such table.
    """
    found = list[Row]()
    for cells in _table(page, (OURS, *MARKS)):
        p99 = {name: float(cells[name].split()[0]) for name in (OURS, *MARKS)}
        found.append(Row(cells["traffic"], int(cells["gateways"]), p99))
    return tuple(found)


def cached(page: str) -> dict[str, dict[str, float]]:
    """Percent of the prompt tokens that came from the caches, by traffic and rule: of the page's first table whose
    cells have a share beside the median.

    Raises:
        ValueError: no such table.
    """
    table = _table(page, tuple(CACHE_MARKS), "%")
    return {
        cells["traffic"]: {rule: float(cells[rule].partition(",")[2].strip(" %")) for rule in CACHE_MARKS}
        for cells in table
    }


def _table(page: str, columns: Sequence[str], mark: str = "") -> list[dict[str, str]]:
    """The cells of the first table with these columns, and with `mark` in its rows, by the names of its columns."""
    lines = page.splitlines()
    for at, line in enumerate(lines[:-2]):
        names = _cells(line)
        if names[:2] == ["traffic", "gateways"] and {*columns} <= {*names} and mark in lines[at + 2]:
            table = itertools.takewhile(lambda one: one.startswith("|"), lines[at + 2 :])
            return [dict(zip(names, _cells(one), strict=True)) for one in table]
    raise ValueError(f"no table with the columns `traffic`, `gateways`, {', '.join(columns)}")


def _cells(line: str) -> list[str]:
    return [re.sub(r"[`*]", "", cell).strip() for cell in line.strip("|").split("|")]


def draw(found: Sequence[Row], file: Path) -> None:
    """One picture, with a part for each number of gateways: left of 1 a rule beats `Seconds`, right of it it loses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = sorted({row.gateways for row in found})
    height = 1.6 + 0.27 * max(sum(row.gateways == part for row in found) for part in parts)
    figure, grid = pyplot.subplots(1, len(parts), sharex=True, figsize=(6.2 * len(parts), height), squeeze=False)
    for axis, part in zip(grid[0], parts, strict=True):
        _part(axis, [row for row in found if row.gateways == part], f"{part} gateways")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(MARKS) + 1, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _part(axis: Any, found: Sequence[Row], title: str) -> None:
    places = range(len(found))[::-1]
    for rule, (mark, colour) in MARKS.items():
        ratios = [min(FARTHEST, row.p99[rule] / row.p99[OURS]) for row in found]
        axis.scatter(ratios, places, marker=mark, color=colour, s=26, label=rule, zorder=3)
    axis.axvline(1.0, color="tab:blue", linewidth=2, label=OURS)
    axis.set_xscale("log")
    axis.set_xticks([0.5, 1, 2, 5, 10, FARTHEST], ["0.5", "1", "2", "5", "10", f"{FARTHEST:.0f} or more"])
    axis.minorticks_off()
    axis.set_yticks(places, [row.traffic for row in found], fontsize=8)
    axis.grid(axis="both", linewidth=0.3)
    axis.set_title(f"{title}: p99 of the TTFT, to that of {OURS}", loc="left", fontsize=9)


def draw_cached(found: Mapping[str, Mapping[str, float]], file: Path) -> None:
    """One picture: the farther right a rule, the fewer prompt tokens its replicas computed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.4, 1.6 + 0.32 * len(found)))
    places = range(len(found))[::-1]
    for rule, (mark, colour) in CACHE_MARKS.items():
        shares = [of_rule[rule] for of_rule in found.values()]
        axis.scatter(shares, places, marker=mark, color=colour, s=34, label=rule, zorder=3)
    axis.set_xlim(0, 100)
    axis.set_yticks(places, list(found), fontsize=8)
    axis.grid(axis="both", linewidth=0.3)
    axis.set_title("prompt tokens from the caches, percent; 2 gateways", loc="left", fontsize=9)
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(file, dpi=110, metadata={"Software": None})


@click.command()
@click.argument("page", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("cache_file", type=click.Path(path_type=Path, dir_okay=False))
def main(page: Path, file: Path, cache_file: Path) -> None:
    """Draws the tables of PAGE into FILE (p99) and CACHE_FILE (shares from the caches)."""
    text = page.read_text()
    found, shares = rows(text), cached(text)
    draw(found, file)
    draw_cached(shares, cache_file)
    click.echo(f"{file}: {len(found)} rows, {cache_file}: {len(shares)} rows")


if __name__ == "__main__":
    main()
