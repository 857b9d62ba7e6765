"""The row of the fleet's board that tells of KEDA, by its own queries, where the real KEDA writes replicas."""

import time

import pytest

from shoal_dev.generate.boards import BOARDS
from shoal_dev.lab.addons import prometheus
from tests.support.boards import Asked, Shown
from tests.support.keda import DRIVEN, KEDAFleet
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.keda, pytest.mark.timeout(600)]


def test_the_boards_row_of_keda_shows_its_calls_its_streams_and_wakes(fleet: KEDAFleet) -> None:
    [fleets] = [board for board in BOARDS if board.uid == "shoal-fleet"]
    [row] = [row for row in fleets.rows if row.title.startswith("KEDA")]
    start = time.time()
    fleet.make_model("pictured", scaling=DRIVEN)
    fleet.active("pictured", "DrivenByKEDA", within=180)
    fleet.expect("pictured", "Ready", "ScaledToZero", within=180)
    assert fleet.ask("pictured")
    port = fleet.lab.forward_port(prometheus.NAMESPACE, prometheus.SERVICE, prometheus.PORT)
    with Asked(f"http://127.0.0.1:{port}") as asked:

        def shown() -> dict[str, float]:
            """Legend -> the most that was seen."""
            seen = Shown(start, time.time(), step=2, rate_seconds=4, choices={"namespace": ".*"})
            found = (series for panel in row.panels for _, of in asked.panel(panel, seen) for series in of)
            return {each.name(): max(value for _, value in each.samples) for each in found}

        wanted = {"GetMetrics ok", "IsActive ok", "StreamIsActive ok", "pushed", "streams StreamIsActive"}
        until(lambda: wanted <= {name for name, value in shown().items() if value > 0}, 60, shown)
    fleet.delete_model("pictured")
