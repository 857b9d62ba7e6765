"""Traces in the chart: off, on, and what cannot be."""

from typing import Any

import pytest
import yaml

from shoal.api.config import OperatorConfig
from shoal.net.trace import per_second, wanted
from tests.support.charts import CHART, EVERYTHING, helm, rendered

LEDGER = ("StatefulSet", "shoal-ledger")
ENDPOINT = "http://otel-collector.monitoring:4318"


def env(kind: str, name: str, values: dict[str, Any]) -> dict[str, str]:
    (found,) = [o for o in rendered(values) if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    all = found["spec"]["template"]["spec"]["containers"][0]["env"]
    assert len({e["name"] for e in all}) == len(all)  # an upgrade mixes up names that are there twice
    return {e["name"]: e.get("value", "") for e in all}


@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "shoal-gateway"), ("Deployment", "shoal-operator"), LEDGER])
def test_traces_are_off_until_somebody_names_a_collector(kind: str, name: str) -> None:
    assert not wanted(env(kind, name, {}))
    said = env(kind, name, {"tracing": {"endpoint": ENDPOINT, "perSecond": 5}})
    assert wanted(said)
    assert said["OTEL_EXPORTER_OTLP_ENDPOINT"] == ENDPOINT
    assert said["OTEL_TRACES_SAMPLER"] == "parentbased_always_on"
    assert per_second(said) == 5


def test_a_components_own_environment_goes_before_it() -> None:
    own = [{"name": "OTEL_TRACES_SAMPLER", "value": "always_off"}, {"name": "OTEL_SERVICE_NAME", "value": "front"}]
    said = env("StatefulSet", "shoal-gateway", {"tracing": {"endpoint": ENDPOINT}, "gateway": {"extraEnv": own}})
    assert (said["OTEL_TRACES_SAMPLER"], said["OTEL_SERVICE_NAME"]) == ("always_off", "front")


def test_the_operator_learns_what_engines_are_to_do() -> None:
    (found,) = [
        o for o in rendered(EVERYTHING) if o["metadata"]["name"] == "shoal-operator" and o["kind"] == "ConfigMap"
    ]
    config = OperatorConfig.model_validate(yaml.safe_load(found["data"]["config.yaml"]))
    assert (config.tracing.endpoint, config.tracing.engines, config.tracing.ratio) == ("http://otel:4318", True, 0.25)


@pytest.mark.parametrize(
    ("tracing", "told"),
    [
        ({"engines": True}, "tracing.engines needs tracing.endpoint, such as http://otel-collector.monitoring:4318"),
        ({"endpoint": "otel-collector:4317"}, "does not match pattern"),
        ({"endpoint": ENDPOINT, "sampler": "sometimes"}, "value must be one of"),
        ({"endpoint": ENDPOINT, "ratio": 10}, "maximum: got 10, want 1"),
    ],
)
def test_what_cannot_be_is_refused(tracing: dict[str, Any], told: str) -> None:
    done = helm("template", "shoal", str(CHART), values={"tracing": tracing})
    assert done.returncode != 0
    assert told in done.stderr


@pytest.mark.parametrize(("ratio", "wants"), [("0.01", 0.01), ("1", 1.0), ("1.0", 1.0), ("0", 0.0)])
def test_a_ratio_may_come_from_set_which_makes_a_string_of_it(ratio: str, wants: float) -> None:
    done = helm("template", "shoal", str(CHART), "--set", f"tracing.endpoint={ENDPOINT},tracing.ratio={ratio}")
    assert done.returncode == 0, done.stderr
    (found,) = [
        o
        for o in yaml.safe_load_all(done.stdout)
        if o and o["kind"] == "ConfigMap" and o["metadata"]["name"] == "shoal-operator"
    ]
    assert OperatorConfig.model_validate(yaml.safe_load(found["data"]["config.yaml"])).tracing.ratio == wants


@pytest.mark.parametrize("ratio", ["1.5", "2", "-0.1", "many"])
def test_a_ratio_that_is_none_is_refused_by_its_name(ratio: str) -> None:
    done = helm("template", "shoal", str(CHART), "--set", f"tracing.ratio={ratio}")
    assert done.returncode != 0
    assert "/tracing/ratio" in done.stderr
