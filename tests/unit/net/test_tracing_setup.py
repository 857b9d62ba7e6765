"""When a process traces, and what it says when the environment asks for what there is not."""

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from shoal.net.trace import TracingUnusable, close, from_environment, per_second, wanted
from tests.support.traces import collecting, environment_of

URL = "http://collector:4318"


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "mine", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{URL}/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": URL}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_EXPORTER": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_TRACES_SAMPLER": "traceidratio"}, True),
    ],
)
def test_it_is_on_where_the_usual_variables_say_so(environment, on):
    assert wanted(environment) is on


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"OTEL_TRACES_EXPORTER": "jaeger"}, "OTEL_TRACES_EXPORTER is 'jaeger': set it to otlp, or to none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "write a URL, such as http://otel-collector:4318"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "only http/protobuf is spoken"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "name the collector's HTTP port, usually 4318"),
        ({"OTEL_TRACES_SAMPLER": "some"}, "OTEL_TRACES_SAMPLER is 'some': set it to one of always_on"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "5"}, "a share from 0 to 1"),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "5%"}, "a share from 0 to 1"),
        ({"SHOAL_TRACES_PER_SECOND": "0"}, "set it to a number above 0, such as 100"),
        ({"SHOAL_TRACES_PER_SECOND": "many"}, "set it to a number above 0, such as 100"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "max_queue_size must be a positive integer"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "few"}, "invalid literal for int"),
    ],
)
async def test_what_cannot_be_is_said_and_the_process_goes_on_without_traces(monkeypatch, environment, told):
    for name, value in {"OTEL_TRACES_EXPORTER": "otlp", **environment}.items():
        monkeypatch.setenv(name, value)
    with capture_logs() as logs:
        assert from_environment("shoal-gateway", CollectorRegistry()) is None
    [line] = [entry for entry in logs if entry["event"] == "no traces are exported"]
    assert told in line["why"]


def test_the_bound_is_a_hundred_unless_somebody_says_otherwise():
    assert per_second({}) == 100
    assert per_second({"SHOAL_TRACES_PER_SECOND": "2.5"}) == 2.5
    with pytest.raises(TracingUnusable):
        per_second({"SHOAL_TRACES_PER_SECOND": "nan"})


async def test_names_of_the_environment_go_before_our_own(monkeypatch):
    async with collecting() as collector:
        attributes = "deployment.environment.name=prod,service.namespace=theirs"
        own = {
            "OTEL_SERVICE_NAME": "llm-front",
            "OTEL_RESOURCE_ATTRIBUTES": attributes,
            "POD_NAMESPACE": "shoal-system",
        }
        for name, value in {**environment_of(collector), **own}.items():
            monkeypatch.setenv(name, value)
        tracing = from_environment("shoal-gateway", CollectorRegistry())
        assert tracing is not None
        tracing.tracer.start_span("one").end()
        await close(tracing)
    [span] = collector.spans
    assert span.service == "llm-front"
    assert span.resource["deployment.environment.name"] == "prod"
    assert span.resource["service.namespace"] == "theirs"
    assert span.resource["k8s.namespace.name"] == "shoal-system"


async def test_what_waits_is_sent_at_the_end(monkeypatch):
    async with collecting() as collector:
        for name, value in {**environment_of(collector), "OTEL_BSP_SCHEDULE_DELAY": "60000"}.items():
            monkeypatch.setenv(name, value)
        tracing = from_environment("shoal-gateway", CollectorRegistry())
        assert tracing is not None
        for _ in range(50):
            tracing.tracer.start_span("one").end()
        assert not collector.spans
        await close(tracing)
        assert len(collector.spans) == 50
        assert tracing.counts.exported == 50


async def test_a_collector_that_hangs_does_not_hold_up_the_end(monkeypatch):
    async with collecting() as collector:
        for name, value in {**environment_of(collector), "OTEL_EXPORTER_OTLP_TIMEOUT": "10"}.items():
            monkeypatch.setenv(name, value)
        collector.gate.clear()
        tracing = from_environment("shoal-gateway", CollectorRegistry())
        assert tracing is not None
        tracing.tracer.start_span("one").end()
        began = time.monotonic()
        with capture_logs() as logs:
            await close(tracing, seconds=0.2)
        assert time.monotonic() - began < 8  # the export itself would take ten seconds
        assert any("the last traces were not taken in time" in entry["event"] for entry in logs)


async def test_a_lost_collector_is_told_once_and_so_is_its_return(monkeypatch):
    async with collecting() as collector:
        for name, value in environment_of(collector).items():
            monkeypatch.setenv(name, value)
        collector.status = 400
        tracing = from_environment("shoal-gateway", CollectorRegistry())
        assert tracing is not None
        with capture_logs() as logs:
            for number in range(1, 4):
                tracing.tracer.start_span("one").end()
                async with asyncio.timeout(20):
                    while tracing.counts.failed < number:
                        await asyncio.sleep(0.01)
            collector.status = 200
            tracing.tracer.start_span("one").end()
            await collector.until(lambda spans: len(spans) == 1)
            await close(tracing)
        told = [entry["event"] for entry in logs if "the collector takes" in entry["event"]]
        assert told == [
            "the collector takes no traces; they are dropped until it does, and counted",
            "the collector takes traces again",
        ]
        [said] = [entry["said"] for entry in logs if entry["event"] == "OpenTelemetry"]
        assert "code: 400" in said
