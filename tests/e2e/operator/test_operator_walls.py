"""One Model stops nobody but itself: one with numbers that no engine has, one that costs too much, one that breaks."""

from importlib import import_module
from typing import Any

import pytest

from shoal.controllers import planner
from shoal.core import candidates
from shoal.core.placement.modelplan import ModelPlan
from tests.support.controlplane import Fleet
from tests.support.operators import model, model_with, running_operator

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]
placing: Any = import_module("shoal.core.placement.plan")


async def test_bad_models_say_what_is_wrong_and_the_others_serve(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    client, ns = fleet.client, fleet.namespace
    one = {"parallelism": {"tensor": 1}}
    fill = placing.fill

    def breaks(case: ModelPlan, *args: Any) -> None:
        if case.demand.key == f"{ns}/broken":
            raise LookupError("of Shoal's own")
        fill(case, *args)

    monkeypatch.setattr(candidates, "SIZING_STEPS", 5)  # two classes, ten numbers of GPUs
    monkeypatch.setattr(planner, "RETRY_SECONDS", 2.0)
    monkeypatch.setattr(placing, "fill", breaks)
    async with running_operator(client, fleet.kubeconfig):
        await fleet.apply(model("huge", ns, engine={**one, "extraArgs": ["--chunked-prefill-size=20000000000"]}))
        await fleet.apply(model("dear", ns))
        await fleet.apply(model("broken", ns, engine=one))
        await fleet.apply(model("chat", ns, engine=one))
        await model_with(client, ns, "chat", "Ready", "True")
        await model_with(client, ns, "huge", "Accepted", "False", "ArgumentsRefused")
        dear = await model_with(client, ns, "dear", "Accepted", "False", "TooExpensive")
        said = next(c["message"] for c in dear["status"]["conditions"] if c["type"] == "Accepted")
        assert "list in `spec.variants` the classes that it may use" in said
        await model_with(client, ns, "broken", "Ready", "False", "InternalError")
        monkeypatch.setattr(placing, "fill", fill)
        await model_with(client, ns, "broken", "Ready", "True")
