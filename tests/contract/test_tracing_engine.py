"""A trace from the gateway into the engine: what SGLang's own spans hang on, and which of them there are."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.api.config import TracingConfig
from shoal.api.model import Model
from shoal.core.routing.resolve import ServedModel
from shoal.manifests.shape import engine_row
from shoal.net.installkey import KeyRing
from tests.contract.conftest import KINDS
from tests.support.engines import API_KEY as ENGINE_KEY
from tests.support.engines import SERVED, Kind, running_engine
from tests.support.gateway import gateway, replica, tenant
from tests.support.operators import CONFIG
from tests.support.traces import collecting, traced

MODEL = ServedModel(SERVED, "uid-tiny", SERVED, ("tiny",), None)
OF_A_POD = Model.model_validate(
    {"metadata": {"name": "tiny", "namespace": "team-a"}, "spec": {"source": {"uri": "hf://org/tiny"}}}
)
SECRET = "the-canary-that-nobody-may-see"
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 4,
    "ignore_eos": True,
}
NOT_SAMPLED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"


class OneKey(KeyRing):
    def key_for(self, fingerprint: str | None, model_uid: str) -> str | None:
        return ENGINE_KEY


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engines_spans_are_part_of_the_gateways_trace(kind: Kind, tmp_path: Path, monkeypatch):
    async with collecting() as collector, gateway(tmp_path) as it:
        tracing = TracingConfig(endpoint=collector.url, engines=True)
        row = engine_row(OF_A_POD, CONFIG.model_copy(update={"tracing": tracing}))
        environment = {each.name: each.value for each in row.env}
        with running_engine(kind, tmp_path / "engine", *row.args, environment=environment) as engine:
            it.models[SERVED] = MODEL
            it.tenants["acme"] = tenant(models=[SERVED])
            it.pods[f"{SERVED}-1"] = replica(1, MODEL)
            it.ports["pod-1"] = engine.port
            it.app.key_ring = OneKey(tmp_path)
            it.changed()
            it.hear(1)
            async with traced(it, collector, monkeypatch):
                for body, headers in ((CHAT, {"traceparent": NOT_SAMPLED}), (CHAT, {}), ({**CHAT, "stream": True}, {})):
                    response = await it.post(body, headers=headers)
                    assert response.status == 200
                    await response.read()
                calls = 2
                await collector.until(
                    lambda spans: len([s for s in spans if s.service == "sglang" and "rid" in s.attributes]) == calls
                )
                await asyncio.sleep(1.0)  # twice what an engine waits before it sends: nothing else comes
        records = await it.records(count=3)
    of_gateway = [span for span in collector.spans if span.service == "shoal-gateway"]
    of_engine = [span for span in collector.spans if span.service == "sglang"]
    asked = {span.id: span for span in of_gateway if span.kind == "CLIENT"}
    roots = [span for span in of_engine if "rid" in span.attributes]
    assert len(asked) == calls
    # Each call has one span of the engine below it, and probes and warm-ups have none.
    assert {span.parent for span in roots} == asked.keys()
    assert {span.trace for span in of_engine} == {span.trace for span in asked.values()}
    for root in roots:
        assert root.trace == asked[root.parent].trace
        assert root.attributes["rid"] in {record.data.request_id for record in records}
        assert root.attributes["gen_ai.usage.completion_tokens"] == 4
    assert SECRET.encode() not in b"".join(collector.raw)
