"""Every query of every Grafana board, against a real Prometheus that scrapes a real fleet by the chart's own monitors.

The fleet plays the demo's acts meanwhile. `SHOAL_WRITE_BOARDS=1` draws the boards into docs/boards.
"""

import contextlib
import os
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from shoal_dev.demo import loraact, scaleact, steps, tenantact
from shoal_dev.demo.clusters import LabCluster
from shoal_dev.demo.stages import Stages
from shoal_dev.demo.watch import wait_until_ready
from shoal_dev.generate.boards import BOARDS
from shoal_dev.generate.boards.plan import DashboardPlan
from shoal_dev.lab.addons import prometheus
from shoal_dev.lab.api import Lab
from tests.support.boards import Asked, Shown, unknown
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.timeout(1500)]

SCRAPE_SECONDS: Final = 1
ACT_SECONDS: Final = 240.0
"""For each step of an act."""
MODEL: Final = f"{scaleact.NAMESPACE}/{scaleact.MODEL}"
PICTURES: Final = Path(__file__).resolve().parents[2] / "docs" / "boards"


@dataclass(frozen=True, slots=True)
class Played:
    """A fleet that has played its acts, and the Prometheus that watched."""

    asked: Asked
    start: float
    end: float

    def shown(self, board: DashboardPlan) -> Shown:
        """The whole run; of the boards that show one Model, the one that scaled."""
        choices = {v.name: ".*" if v.several else MODEL for v in board.variables}
        return Shown(self.start, self.end, step=2, rate_seconds=4 * SCRAPE_SECONDS, choices=choices)


@pytest.fixture(scope="module")
def played() -> Generator[Played]:
    if os.geteuid() != 0:
        pytest.skip("the lab needs root")
    lab = Lab.up(f"boards-{os.getpid()}", addons=("prometheus",))
    try:
        cluster = LabCluster(lab)
        values = {**prometheus.values(f"{SCRAPE_SECONDS}s"), "dashboards": {"enabled": True}}
        steps.install(cluster, "simulator", steps.LAB_IMAGE, values)
        start = time.time()
        steps.apply_examples(cluster)
        console = Console(quiet=True)
        wait_until_ready(cluster, steps.DEMO_NAMESPACE, console, 120)
        stages = Stages(console)
        scaleact.run(cluster, stages, ACT_SECONDS)
        loraact.run(cluster, stages, ACT_SECONDS)
        tenantact.run(cluster, stages, ACT_SECONDS)
        port = lab.forward_port(prometheus.NAMESPACE, prometheus.SERVICE, prometheus.PORT)
        with Asked(f"http://127.0.0.1:{port}") as asked:
            _wait_for_scrapes(asked, time.time() + 3 * SCRAPE_SECONDS)
            yield Played(asked, start, time.time())
    finally:
        lab.down()


def _wait_for_scrapes(asked: Asked, since: float) -> None:
    """Until what happened last is scraped, and no target was too slow for it: one that was has no series just then."""

    def value(query: str) -> float:
        found = asked._get("/api/v1/query", query=query)["result"]
        return float(found[0]["value"][1]) if found else 0.0

    with contextlib.suppress(AssertionError):
        until(lambda: value("min(up)") == 1 and value("min(timestamp(up))") > since, 60)


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_board_reads_only_what_is_exported(board: DashboardPlan, played: Played) -> None:
    assert unknown(board, played.asked.exported()) == set()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_each_query_of_a_board_brings_data(board: DashboardPlan, played: Played) -> None:
    shown = played.shown(board)
    brought = [played.asked.panel(panel, shown) for panel in board.panels]
    if os.environ.get("SHOAL_WRITE_BOARDS"):
        from tests.support.boardpictures import draw

        PICTURES.mkdir(exist_ok=True)
        draw(board, [[found for _, found in panel] for panel in brought], shown, PICTURES / f"{board.uid}.png")
    silent: list[str] = []
    nameless: list[str] = []
    for panel, queries in zip(board.panels, brought, strict=True):
        for query, found in queries:
            if not found and query.empty is None:
                silent.append(f"{panel.title}: {shown.filled(query.expr)}")
            if query.legend and panel.kind != "table" and not all(series.name().strip() for series in found):
                nameless.append(f"{panel.title}: {query.legend}")
    assert silent == []
    assert nameless == []


def test_the_choices_of_the_variables_are_there(played: Played) -> None:
    variables = {variable for board in BOARDS for variable in board.variables}
    for variable in variables:
        values = played.asked.values(variable, Shown(played.start, played.end, 1, 4, {"namespace": ".*"}))
        wanted = {"namespace": scaleact.NAMESPACE, "model": MODEL, "tenant": tenantact.BILLED}[variable.name]
        assert wanted in values, variable


def test_numbers_are_those_of_the_run(played: Played) -> None:
    """Not only some data: what the acts are known to have done."""

    def highest(uid: str, title: str, query: int = 0) -> float:
        (board,) = [board for board in BOARDS if board.uid == uid]
        (panel,) = [panel for panel in board.panels if panel.title == title]
        _, found = played.asked.panel(panel, played.shown(board))[query]
        return max(value for series in found for _, value in series.samples)

    assert highest("shoal-model", "Wanted and ready") == scaleact.MOST
    assert highest("shoal-model", "Held") >= 1
    assert highest("shoal-tenant", "Refused") >= 1
    assert highest("shoal-fleet", "Leading operators") == 1
    assert highest("shoal-fleet", "Not answered") == 0
    assert 0 < highest("shoal-fleet", "GPUs in use") <= 1
    assert highest("shoal-adapters", "Loads and evictions") > 0
    assert highest("shoal-adapters", "Hit rate") == 1
    for title in ("Wakes", "Cold starts", "Time held", "Time to first token", "Time per output token"):
        assert highest("shoal-model", title) > 0, title
    assert highest("shoal-cost", "Cost per hour") > 0
    assert highest("shoal-gateway", "Usage lost") == 0
