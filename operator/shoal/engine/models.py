"""The list of loaded models, /v1/models, which OpenAI's API and all engines share."""

from typing import cast

from shoal.engine.http import json_object
from shoal.engine.port import EngineGarbled, LoadedAdapter

MODELS_PATH = "/v1/models"


def parse_models(body: bytes) -> tuple[LoadedAdapter, ...]:
    """Reads /v1/models: an adapter's card has a parent. Raises EngineGarbled."""
    cards = json_object(body, MODELS_PATH).get("data")
    if not isinstance(cards, list):
        raise EngineGarbled(f"{MODELS_PATH}: no data")
    found: list[LoadedAdapter] = []
    for card in cast("list[object]", cards):
        entry = cast("dict[str, object]", card) if isinstance(card, dict) else {}
        name, root = entry.get("id"), entry.get("root")
        if not isinstance(name, str) or not isinstance(root, str):
            raise EngineGarbled(f"{MODELS_PATH}: a card without id and root")
        if entry.get("parent") is not None:
            found.append(LoadedAdapter(name, root))
    return tuple(found)
