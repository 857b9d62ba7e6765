"""The Grafana boards as files: Grafana's schema, links, variables. What their queries bring is tested in tests/e2e."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from shoal_dev.generate.boards import BOARDS
from shoal_dev.generate.boards.grafana import to_json
from shoal_dev.generate.boards.plan import DashboardPlan, Panel, PanelQuery, PanelRow
from tests.support.boards import Shown, metrics, unknown

ROOT = Path(__file__).resolve().parents[4]
GRAFANAS = {"datasource", "__rate_interval", "__range", "__range_s"}

SCRAPED = {"namespace", "pod", "le"}
"""Labels that a scrape gives."""


def labels_of_metrics() -> dict[str, set[str]]:
    """By name, from the reference page, which is made from the code."""
    found: dict[str, set[str]] = {}
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for part in page.split("\n## ")[1:]:
        for name, labels in re.findall(r"^\| `(\w+)` \| \w+ \| (.*?) \|", part, re.MULTILINE):
            # The monitors name an engine pod's Model and class.
            monitors = {"model", "gpu_class"} if part.startswith("Agent") else set[str]()
            found[name] = set(re.findall(r"\w+", labels)) | monitors
    return found


each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def panels(board: DashboardPlan) -> list[dict[str, Any]]:
    return json.loads(to_json(board))["panels"]


@each_board
def test_grafanas_own_reader_understands_every_field(board: DashboardPlan) -> None:
    text = to_json(board)
    read = Dashboard.from_json(json.loads(text))
    assert json.dumps(read, cls=JSONEncoder, indent=2, sort_keys=True) + "\n" == text


@each_board
def test_panels_have_ids_of_their_own_and_lie_side_by_side_on_the_grid(board: DashboardPlan) -> None:
    found = panels(board)
    ids = [panel["id"] for panel in found]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        here = set(itertools.product(columns, lines))
        assert not here & taken, panel["title"]
        taken |= here


@each_board
def test_every_panel_says_what_it_shows_and_its_runbook_is_there(board: DashboardPlan) -> None:
    titles = [panel.title for panel in board.panels]
    assert len(set(titles)) == len(titles)
    for panel in board.panels:
        assert panel.description.endswith("."), panel.title
        assert panel.runbook is None or (ROOT / "docs" / "runbooks" / panel.runbook).is_file(), panel.runbook


@each_board
def test_a_board_reads_only_what_is_exported_with_the_labels_that_it_has(board: DashboardPlan) -> None:
    exported = labels_of_metrics()
    assert unknown(board, exported) == set()
    for panel in board.panels:
        for query in panel.queries:
            for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", query.expr):
                used = set(re.findall(r"(\w+)=", matchers))
                family = (metrics(PanelQuery(name)) or {name}).pop()
                assert used <= exported[family] | SCRAPED, query.expr


@each_board
def test_queries_use_only_variables_that_the_board_has_and_ask_its_data_source(board: DashboardPlan) -> None:
    has = {variable.name for variable in board.variables}
    for panel in panels(board):
        for target in panel.get("targets") or []:
            used = set(re.findall(r"\$([a-z_]+)", target["expr"]))
            assert used <= has | GRAFANAS, target["expr"]
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    names = [v["name"] for v in json.loads(to_json(board))["templating"]["list"]]
    assert names == ["datasource", *(variable.name for variable in board.variables)]


@each_board
def test_words_of_legends_are_labels_of_the_query(board: DashboardPlan) -> None:
    for panel in board.panels:
        for query in panel.queries:
            for word in re.findall(r"{{(\w+)}}", query.legend):
                assert re.search(rf"\b{word}\b", query.expr) or " by (" not in query.expr, (panel.title, query)


def test_boards_are_told_apart_and_find_each_other() -> None:
    assert len({board.uid for board in BOARDS}) == len({board.title for board in BOARDS}) == 6
    for board in BOARDS:
        made = json.loads(to_json(board))
        (link,) = made["links"]
        assert link["tags"] == made["tags"] == ["shoal"]
        assert "id" not in made  # of somebody's installation


def test_the_thresholds_are_the_defaults_of_a_models_targets() -> None:
    (board,) = [board for board in BOARDS if board.uid == "shoal-model"]
    marks = {panel.title: [mark.value for mark in panel.marks] for panel in board.panels}
    assert marks["KV cache in use by replica"][0] == 0.8
    assert marks["Queue and batch by replica"] == [4]


def test_a_board_that_reads_what_nobody_exports_is_found() -> None:
    (board,) = [board for board in BOARDS if board.uid == "shoal-cost"]
    exported = {name for panel in board.panels for query in panel.queries for name in metrics(query)}
    assert unknown(board, exported) == set()
    panel = Panel(
        "New", "Not there yet.", (PanelQuery("histogram_quantile(0.5, rate(shoal_made_up_seconds_bucket[1m]))"),)
    )
    more = dataclasses.replace(board, rows=(*board.rows, PanelRow("New", (panel,))))
    assert unknown(more, exported) == {"shoal_made_up_seconds"}


def test_a_query_is_asked_as_grafana_would() -> None:
    shown = Shown(start=100, end=160.5, step=5, rate_seconds=4, choices={"model": "a/b"})
    assert shown.filled('rate(x{model=~"$model"}[$__rate_interval])') == 'rate(x{model=~"a/b"}[4s])'
    assert shown.filled("increase(x[$__range]) / $__range_s") == "increase(x[61s]) / 61"
    assert shown.filled('label_replace(x, "a", "$1", "b", "(.+)")') == 'label_replace(x, "a", "$1", "b", "(.+)")'
    with pytest.raises(KeyError):
        shown.filled("x{tenant=~$tenant}")
