"""`GET /v1/models`: what a key's tenant may use, in OpenAI's shape."""

from typing import Any

import orjson

from shoal.core.access import Identity
from shoal.core.resolve import ServedModel
from shoal.core.words import Words


def listed(words: Words, identity: Identity) -> bytes:
    """All of them."""
    return orjson.dumps({"object": "list", "data": [_card(word, model) for word, model in words.listed(identity)]})


def one(word: str, model: ServedModel) -> bytes:
    """One, by the word that the client uses."""
    return orjson.dumps(_card(word, model))


def _card(word: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": word,
        "object": "model",
        "created": int(model.created.timestamp()) if model.created else 0,
        "owned_by": "shoal",
        "root": model.address,
        "parent": model.key if model.adapter else None,
    }
