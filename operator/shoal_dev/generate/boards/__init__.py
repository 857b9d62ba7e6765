"""Grafana boards as code.

What a board shows is plain data (`plan.py`): one module per board (`fleet.py`, `model.py`, `gateway.py`, `tenant.py`,
`adapters.py`, `cost.py`), with the queries' common words in `promql.py`. `grafana.py` turns it into Grafana's JSON
with Grafana's own SDK; `shoal generate` writes that to charts/shoal/dashboards. Tests run each query against a real
Prometheus that scrapes a real fleet.
"""

from typing import Final

from shoal_dev.generate.boards import adapters, cost, fleet, gateway, model, tenant
from shoal_dev.generate.boards.plan import DashboardPlan

BOARDS: Final[tuple[DashboardPlan, ...]] = (
    fleet.BOARD,
    model.BOARD,
    gateway.BOARD,
    tenant.BOARD,
    adapters.BOARD,
    cost.BOARD,
)
