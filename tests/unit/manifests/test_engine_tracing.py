"""What engines are started with, so that their spans join the gateways'."""

from typing import Any

import pytest
from pydantic import ValidationError

from shoal.api.config import EngineVersion, NamedValue, OperatorConfig, TracingConfig
from tests.support.operators import CONFIG
from tests.unit.manifests.test_manifests import containers, shape

ON = TracingConfig(endpoint="http://otel:4318/", engines=True)


def engine(tracing: TracingConfig, row: EngineVersion | None = None, **spec: Any) -> dict[str, Any]:
    config = CONFIG.model_copy(update={"tracing": tracing})
    if row is not None:
        versions = dict.fromkeys(config.engines.versions, row)
        config = config.model_copy(update={"engines": config.engines.model_copy(update={"versions": versions})})
    return containers(shape(config, **spec))["engine"]


def environment(found: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in found["env"]}


def test_engines_trace_where_that_is_asked_for_and_only_what_the_gateway_samples() -> None:
    found = engine(ON)
    assert "--enable-trace" in found["args"]
    assert "--otlp-traces-endpoint=http://otel:4318/v1/traces" in found["args"]
    assert environment(found)["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert environment(found)["OTEL_TRACES_SAMPLER"] == "parentbased_always_off"


@pytest.mark.parametrize("off", [TracingConfig(), TracingConfig(endpoint="http://otel:4318")])
def test_otherwise_pods_are_as_they_were(off: TracingConfig) -> None:
    assert engine(off) == containers(shape())["engine"]


def test_the_engine_table_and_the_model_have_the_last_word() -> None:
    row = EngineVersion(image="x", args=("--otlp-traces-endpoint=a:1",), env=(NamedValue(name="OTEL_X", value="y"),))
    own = {"pod": {"env": [{"name": "OTEL_TRACES_SAMPLER", "value": "always_on"}]}}
    found = engine(ON, row, engine={"extraArgs": ["--otlp-traces-endpoint=b:2"]}, **own)
    said = [arg for arg in found["args"] if arg.startswith("--otlp")]
    assert said == [
        "--otlp-traces-endpoint=http://otel:4318/v1/traces",
        "--otlp-traces-endpoint=a:1",
        "--otlp-traces-endpoint=b:2",
    ]
    assert environment(found)["OTEL_TRACES_SAMPLER"] == "always_on"
    assert environment(found)["OTEL_X"] == "y"


def test_an_image_of_the_models_own_traces_too() -> None:
    found = engine(ON, engine={"version": "0.5.23", "image": "registry.example.com/own"})
    assert (found["image"], "--enable-trace" in found["args"]) == ("registry.example.com/own", True)


def test_engines_without_a_collector_are_refused() -> None:
    with pytest.raises(ValidationError, match="engines need endpoint, such as http://otel-collector"):
        OperatorConfig.model_validate({**CONFIG.model_dump(by_alias=True), "tracing": {"engines": True}})
