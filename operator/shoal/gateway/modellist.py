"""`GET /v1/models`: the models that a key's tenant may use, in OpenAI's format."""

from collections.abc import Collection
from datetime import datetime
from typing import Any

import orjson

from shoal.core.access import KeyIdentity
from shoal.core.routing.modelindex import ModelIndex, RouteTargets
from shoal.core.routing.resolve import ServedModel, listed_capabilities


def listed(model_index: ModelIndex, identity: KeyIdentity) -> bytes:
    """All models that the client may use."""
    return orjson.dumps(
        {"object": "list", "data": [_card(name, model) for name, model in model_index.listed(identity)]}
    )


def one(model_name: str, model: ServedModel | RouteTargets) -> bytes:
    """One model, by the name that the client uses."""
    return orjson.dumps(_card(model_name, model))


def _card(model_name: str, model: ServedModel | RouteTargets) -> dict[str, Any]:
    if isinstance(model, RouteTargets):
        route, able = model.route, set(listed_capabilities(model.targets[0]))
        for target in model.targets[1:]:
            able &= set(listed_capabilities(target))  # which of them answers is not the client's choice
        return _fields(model_name, route.created, route.key, None, able)
    return _fields(
        model_name, model.created, model.address, model.key if model.adapter else None, listed_capabilities(model)
    )


def _fields(
    model_name: str, created: datetime | None, root: str, parent: str | None, capabilities: Collection[str]
) -> dict[str, Any]:
    return {
        "id": model_name,
        "object": "model",
        "created": int(created.timestamp()) if created else 0,
        "owned_by": "shoal",
        "root": root,
        "parent": parent,
        "capabilities": sorted(capabilities),
    }
