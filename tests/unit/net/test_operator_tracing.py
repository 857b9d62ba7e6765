"""What a collector gets of an operator: reconciles, and decisions that changed a number."""

import asyncio
import contextlib

from prometheus_client import CollectorRegistry

from shoal.controllers.tracing import OperatorSpans
from shoal.kube.queue import WorkQueue
from shoal.net.trace import close, from_environment
from tests.support.traces import collecting, environment_of
from tests.unit.controllers.test_scaler import UID, Stage


async def test_reconciles_and_changed_numbers_are_spans(monkeypatch):
    async with collecting() as collector:
        for name, value in environment_of(collector).items():
            monkeypatch.setenv(name, value)
        tracing = from_environment("shoal-operator", CollectorRegistry())
        assert tracing is not None
        spans = OperatorSpans(tracing.tracer)

        queue = WorkQueue("model")
        queue.finished.append(spans.reconciled)

        async def handle(key: str) -> None:
            await asyncio.sleep(0.01)
            if key == "team/broken":
                raise ValueError("a secret of the object")

        working = asyncio.create_task(queue.run(handle))
        for key in ("team/fine", "team/broken"):
            queue.add(key)
        while not queue.idle():
            await asyncio.sleep(0.01)
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working

        async with Stage(0) as stage:
            stage.scaler.decided.append(spans.decided)
            stage.signals.ask(UID)
            for _ in range(3):
                await asyncio.sleep(0)
            assert stage.wanted == 1
        await close(tracing)

    reconciles = {span.attributes["shoal.key"]: span for span in collector.spans if span.name == "reconcile model"}
    assert {key: span.error for key, span in reconciles.items()} == {"team/fine": None, "team/broken": "ValueError"}
    assert all(span.ended - span.began >= 10_000_000 for span in reconciles.values())
    assert b"a secret of the object" not in b"".join(collector.raw)
    scale = collector.named("scale")
    assert (scale.attributes["shoal.replicas.before"], scale.attributes["shoal.replicas.wanted"]) == (0, 1)
    assert scale.attributes["shoal.reason"]
    assert {span.service for span in collector.spans} == {"shoal-operator"}
