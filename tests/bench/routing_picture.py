"""Draws the table of routing rules in docs/routing.md: each rule's p99 of the TTFT beside that of `Seconds`.

    python -m tests.bench.routing_picture docs/routing.md docs/routing-p99.png

The page's own table is read, which `python -m tests.bench.bench_routing --held-out` prints, because to measure it
takes hours.
"""

import re
from collections.abc import Sequence
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
FARTHEST: Final = 20.0
"""Ratios beyond are drawn at the edge."""


@dataclass(frozen=True, slots=True)
class Row:
    traffic: str
    gateways: int
    p99: dict[str, float]
    """Seconds, by rule."""


def rows(page: str) -> tuple[Row, ...]:
    """The page's first table with a column of gateways and one of `Seconds`.

    Raises:
        ValueError: no such table.
    """
    lines = page.splitlines()
    at = next((at for at, line in enumerate(lines) if _heads(_cells(line))), None)
    if at is None:
        raise ValueError("no table with the columns `traffic`, `gateways`, `round robin` and `Seconds`")
    names = _cells(lines[at])
    found = list[Row]()
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        cells = dict(zip(names, _cells(line), strict=True))
        p99 = {name: float(cells[name].split()[0]) for name in (OURS, *MARKS)}
        found.append(Row(cells["traffic"], int(cells["gateways"]), p99))
    return tuple(found)


def _heads(names: list[str]) -> bool:
    return names[:2] == ["traffic", "gateways"] and OURS in names and "round robin" in names


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


@click.command()
@click.argument("page", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def main(page: Path, file: Path) -> None:
    """Draws the table of PAGE into FILE."""
    found = rows(page.read_text())
    draw(found, file)
    click.echo(f"{file}: {len(found)} rows")


if __name__ == "__main__":
    main()
