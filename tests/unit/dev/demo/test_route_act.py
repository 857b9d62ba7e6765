"""The demo's act on routes, against a gateway whose canary can never serve."""

import json
from pathlib import Path
from typing import Any, cast

import click
import pytest
import yaml

from shoal.api.modelroute import ModelRoute
from shoal.core.routing.resolve import DeadEnd
from shoal.core.routing.routes import declared_route
from shoal_dev.demo import routeact
from tests.support.gateway import GatewayUnderTest, gateway, replica, tenant
from tests.support.routes import served
from tests.support.scripted_engine import ScriptedEngine


class Cluster:
    """Says of the route what the operator would."""

    def __init__(self, it: GatewayUnderTest) -> None:
        self._it = it

    def kubectl(self, *_: str) -> str:
        halts = [halt.describe() for halt in self._it.app.canaries.halts.values()]
        ready = {"type": "Ready", "status": "True", "reason": "CanaryHalted", "message": " ".join(halts)}
        return json.dumps({"status": {"conditions": [ready] if halts else []}})


def example(kind: str) -> dict[str, Any]:
    (found,) = [one for one in yaml.safe_load_all(routeact.FILE.read_text()) if one["kind"] == kind]
    return found


async def test_the_canary_of_the_example_is_halted_and_no_client_gets_an_error(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    async with gateway(tmp_path, engine) as it:
        before = served("routes/before")
        it.models["routes/before"] = before
        it.models["routes/next"] = served("routes/next", dead_end=DeadEnd("SourceNotFound", unless_pods=False))
        it.pods["chat/llama-1"] = replica(1, model=before)
        it.tenants["globex"] = tenant("globex", routeact.KEY, ("routes/before", "routes/next"))
        raw = example("ModelRoute")
        raw["metadata"] |= {"uid": "uid-route", "creationTimestamp": "2026-01-01T00:00:00Z"}
        route = declared_route(ModelRoute.model_validate(raw))
        it.routes[route.key] = route
        it.changed()
        asked = await routeact._until_halted(cast("Any", Cluster(it)), it.url, 60)  # pyright: ignore[reportPrivateUsage]
        assert 3 <= asked <= routeact.MOST_ASKED
        assert len(engine.requests) == asked, "each was answered, those of the canary by the fallback"


async def test_an_error_of_the_gateway_ends_the_act(tmp_path: Path) -> None:
    async with gateway(tmp_path, ScriptedEngine()) as it:
        with pytest.raises(click.ClickException, match="the gateway answered"):
            async with routeact._client(it.url) as client:  # pyright: ignore[reportPrivateUsage]
                await routeact._ask(client, [{"role": "user", "content": "x"}])  # pyright: ignore[reportPrivateUsage]
