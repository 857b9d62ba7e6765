"""Parts of ModelRoutes for tests."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from shoal.api.modelroute import ModelRoute
from shoal.core.routing.resolve import ServedModel
from shoal.core.routing.routes import DeclaredRoute, declared_route
from tests.support.gateway import MODEL, GatewayUnderTest, gateway, replica, tenant
from tests.support.scripted_engine import ScriptedEngine


def target(name: str, weight: int | None = None, kind: str = "model", **reference: str) -> dict[str, Any]:
    """An entry of `targets`."""
    return {kind: {"name": name, **reference}} | ({} if weight is None else {"weight": weight})


def served(key: str, **changes: Any) -> ServedModel:
    """A Model as gateways know it."""
    fields: dict[str, Any] = {"uid": f"uid-{key}", "engine_name": key, "claims": (key.partition("/")[2],), **changes}
    return ServedModel(key, created=MODEL.created, capabilities=MODEL.capabilities, facts=MODEL.facts, **fields)


def a_route(*rules: dict[str, Any], name: str = "front", namespace: str = "chat", **spec: Any) -> ModelRoute:
    """A ModelRoute; a rule is its fields."""
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{namespace}-{name}",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return ModelRoute.model_validate({"metadata": metadata, "spec": {"rules": list(rules), **spec}})


def declared(*rules: dict[str, Any], **more: Any) -> DeclaredRoute:
    """A route as gateways know it."""
    return declared_route(a_route(*rules, **more))


OTHER = served("chat/other", uid="uid-other")
"""The second Model of `two_models`."""


@contextlib.asynccontextmanager
async def two_models(
    tmp_path: Path, first: ScriptedEngine, second: ScriptedEngine, *rules: dict[str, Any], **settings: Any
) -> AsyncGenerator[GatewayUnderTest]:
    """A gateway with the Models chat/llama and chat/other, each with one replica, and the route chat/front."""
    async with gateway(tmp_path, first, second, **settings) as it:
        it.models[OTHER.key] = OTHER
        it.pods["chat/llama-2"] = replica(2, model=OTHER)
        it.tenants["acme"] = tenant(models=["chat/llama", "chat/other"])
        put(it, *rules)
        it.hear(2)
        yield it


def put(it: GatewayUnderTest, *rules: dict[str, Any], **more: Any) -> None:
    """The route as it is from now on."""
    one = declared(*rules, **more)
    it.routes[one.key] = one
    it.changed()
