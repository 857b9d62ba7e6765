"""The page of metrics has what the parts of Shoal really export, and what rules and alerts ask for."""

import re
from pathlib import Path

import pytest

from shoal_dev.generate.metrics import PARTS, Shown, metrics
from shoal_dev.generate.monitoring import ALERTS, RECORDED
from tests.support.gateway import gateway
from tests.support.scripted_engine import ScriptedEngine

OWN = re.compile(r"\b(?:shoal|gen_ai)_\w+")
_OF_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def shown() -> dict[str, list[Shown]]:
    return metrics()


def test_every_metric_says_what_it_is(shown: dict[str, list[Shown]]) -> None:
    assert set(shown) == set(PARTS)
    for part in PARTS:
        assert shown[part]
    assert not [one.name for found in shown.values() for one in found if not one.text.endswith(".")]


def test_rules_and_alerts_ask_for_metrics_that_are_exported(shown: dict[str, list[Shown]]) -> None:
    known = {one.name for found in shown.values() for one in found} | {one.record for one in RECORDED}
    exprs = [one.expr for one in RECORDED] + [alert.expr for group in ALERTS.values() for alert in group]
    # Names of recorded series have colons; labels stand in parentheses or braces and have no such prefix.
    asked = {name for expr in exprs for name in OWN.findall(re.sub(r"\w+:\w+:\w+", "", expr))}
    asked -= {label for found in shown.values() for one in found for label in one.labels}
    assert {_OF_HISTOGRAM.sub("", name) for name in asked} <= known


async def test_what_a_gateway_exports_stands_on_the_page(shown: dict[str, list[Shown]], tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        response = await it.post({"model": "llama", "messages": [{"role": "user", "content": "hi"}]})
        assert response.status == 200
        await it.records(count=1)
        page = {(one.name, one.type, frozenset(one.labels)) for one in shown["gateway"]}
        for family in it.metrics.registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            for sample in family.samples:
                assert (name, family.type, frozenset(sample.labels.keys() - {"le"})) in page


def test_the_agents_load_stands_on_the_page_though_nothing_is_known_of_it(shown: dict[str, list[Shown]]) -> None:
    names = {one.name for one in shown["agent"]}
    assert {"shoal_replica_kv_tokens_used", "shoal_agent_adapter_load_seconds", "shoal_agent_stalled"} <= names
    assert "shoal_ledger_open_requests" in {one.name for one in shown["ledger"]}
