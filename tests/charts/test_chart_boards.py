"""The Grafana boards in the chart: one ConfigMap each, found by the sidecar, with the installation's own links."""

import json
from typing import Any

from tests.support.charts import CHART, rendered

BOARDS = {path.stem: path.read_text() for path in (CHART / "dashboards").glob("*.json")}


def configmaps(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    maps = [o for o in rendered(values) if o["kind"] == "ConfigMap"]
    return {o["metadata"]["name"]: o for o in maps if o["metadata"]["name"].endswith("-board")}


def test_there_are_none_without_being_asked_for() -> None:
    assert configmaps({}) == {}


def test_each_board_is_a_config_map_that_grafanas_sidecar_finds() -> None:
    found = configmaps({"dashboards": {"enabled": True}})

    assert set(found) == {f"{name}-board" for name in BOARDS}
    assert len(found) == 6
    for name, text in BOARDS.items():
        board = found[f"{name}-board"]
        assert board["data"] == {f"{name}.json": text}
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert board["metadata"]["annotations"] == {"grafana_folder": "Shoal"}


def test_labels_and_folder_are_the_installations() -> None:
    values = {"enabled": True, "labels": {"boards": "mine"}, "annotations": {"grafana_folder": "GPUs"}}
    for board in configmaps({"dashboards": values}).values():
        assert board["metadata"]["labels"]["boards"] == "mine"
        assert board["metadata"]["annotations"] == {"grafana_folder": "GPUs"}


def test_links_to_runbooks_lead_where_the_alerts_do() -> None:
    values = {"dashboards": {"enabled": True}, "prometheusRule": {"runbookBaseUrl": "https://docs.example.com/shoal/"}}
    links = {
        link["url"]
        for name, board in configmaps(values).items()
        for panel in json.loads(board["data"][name.removesuffix("-board") + ".json"])["panels"]
        for link in panel.get("links") or []
    }
    assert links
    assert {link.rpartition("/")[0] for link in links} == {"https://docs.example.com/shoal"}
