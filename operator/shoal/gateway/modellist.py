"""`GET /v1/models`: the models that a key's tenant may use, in OpenAI's format."""

from typing import Any

import orjson

from shoal.core.access import KeyIdentity
from shoal.core.routing.modelindex import ModelIndex
from shoal.core.routing.resolve import ServedModel
from shoal.gateway.ability import abilities


def listed(model_index: ModelIndex, identity: KeyIdentity) -> bytes:
    """All models that the client may use."""
    return orjson.dumps(
        {"object": "list", "data": [_card(name, model) for name, model in model_index.listed(identity)]}
    )


def one(model_name: str, model: ServedModel) -> bytes:
    """One model, by the name that the client uses."""
    return orjson.dumps(_card(model_name, model))


def _card(model_name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model_name,
        "object": "model",
        "created": int(model.created.timestamp()) if model.created else 0,
        "owned_by": "shoal",
        "root": model.address,
        "parent": model.key if model.adapter else None,
        "capabilities": abilities(model),
    }
