"""The boards' queries against a real Prometheus: as Grafana would ask them, for one choice of the variables."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from shoal_dev.generate.boards.plan import DashboardPlan, Panel, PanelQuery, Variable

METRIC: Final = re.compile(r"\b(?:shoal|gen_ai_server|gen_ai_client)_\w+")
_PART: Final = re.compile(r"_(?:bucket|sum|count)$")
_WORD: Final = re.compile(r"{{\s*(\w+)\s*}}")

Samples = list[tuple[float, float]]
"""(Unix time, value); values that are no numbers are left out."""


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    samples: Samples
    legend: str

    def name(self) -> str:
        """As Grafana's legend has it."""
        return _WORD.sub(lambda found: self.labels.get(found[1], ""), self.legend)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a board shows: from when to when, and how closely looked at, in seconds; choices of its variables."""

    start: float
    end: float
    step: float
    rate_seconds: float
    choices: Mapping[str, str]

    def filled(self, expr: str) -> str:
        """The query with Grafana's variables filled in. Raises KeyError for one that the board does not have."""
        span = math.ceil(self.end - self.start)
        grafana = {"__rate_interval": f"{self.rate_seconds:g}s", "__range": f"{span}s", "__range_s": str(span)}
        known = {**grafana, **self.choices}
        return re.sub(r"\$([a-z_]+)", lambda found: known[found[1]], expr)


def metrics(query: PanelQuery) -> set[str]:
    """The families that a query reads."""
    return {_PART.sub("", name) for name in METRIC.findall(query.expr)}


def unknown(board: DashboardPlan, exported: Iterable[str]) -> set[str]:
    """Families that a board reads and nobody exports."""
    known = set(exported)
    return {name for panel in board.panels for query in panel.queries for name in metrics(query)} - known


class Asked:
    """A Prometheus that boards ask, for as long as the context lasts."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def exported(self) -> set[str]:
        """Families that some target has told of, those without a series yet included."""
        return set(self._get("/api/v1/metadata"))

    def panel(self, panel: Panel, shown: Shown) -> list[tuple[PanelQuery, list[Series]]]:
        """What each query of a panel brings."""
        return [(query, self.query(query, shown, at_end=panel.kind == "table")) for query in panel.queries]

    def query(self, query: PanelQuery, shown: Shown, *, at_end: bool) -> list[Series]:
        expr = shown.filled(query.expr)
        if at_end:
            found = self._get("/api/v1/query", query=expr, time=f"{shown.end:.3f}")
        else:
            times = {"start": f"{shown.start:.3f}", "end": f"{shown.end:.3f}", "step": f"{shown.step:g}"}
            found = self._get("/api/v1/query_range", query=expr, **times)
        return list(_series(found["result"], query.legend))

    def values(self, variable: Variable, shown: Shown) -> set[str]:
        """What can be chosen."""
        times = {"start": f"{shown.start:.3f}", "end": f"{shown.end:.3f}"}
        match = {"match[]": shown.filled(variable.metric)}
        found: list[str] = self._get(f"/api/v1/label/{variable.of}/values", **times, **match)
        if not variable.regex:
            return set(found)
        pattern = re.compile(variable.regex[1:-1].replace(r"\/", "/"))
        return {hit[1] for value in found if (hit := pattern.search(value))}

    def _get(self, path: str, **params: str) -> Any:
        answer = self._client.get(path, params=params)
        body = answer.json()
        assert body.get("status") == "success", f"{params}: {body.get('error')}"
        return body["data"]


def _series(result: list[dict[str, Any]], legend: str) -> Iterator[Series]:
    for one in result:
        pairs = one["values"] if "values" in one else [one["value"]]
        samples = [(float(at), float(value)) for at, value in pairs]
        samples = [(at, value) for at, value in samples if math.isfinite(value)]
        if samples:
            yield Series(one["metric"], samples, legend)
