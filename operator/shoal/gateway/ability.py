"""Whether a Model can do what an endpoint is for."""

from collections.abc import Mapping
from typing import Any, Final

from shoal.core.capabilities import Capability, generates_only
from shoal.core.fields.table import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS, GENERATING, RERANK, SCORE, TRANSCRIBE
from shoal.core.routing.resolve import ServedModel, abilities, can
from shoal.net.errors import ApiError

NEEDS: Final[Mapping[str, Capability]] = {
    CHAT: "generate",
    COMPLETIONS: "generate",
    EMBEDDINGS: "embed",
    RERANK: "rerank",
    SCORE: "score",
    CLASSIFY: "classify",
    TRANSCRIBE: "transcribe",
}
"""What each endpoint needs; one that is not listed works with every Model."""


def takes_salt(path: str, model: ServedModel) -> bool:
    """Whether a request goes through a prefix cache that a `cache_salt` separates by tenants. Engines that generate
    nothing keep no prompts (engine/sglang/launch.py)."""
    return path in GENERATING or (path == SCORE and generates_only(model.capabilities))


def needs_salt(path: str, model: ServedModel) -> bool:
    """Whether only an engine that reads the `cache_salt` may get the request. Of the same Model, replicas of another
    engine may be left, which would show one tenant the prompts of another."""
    return path == SCORE and model.facts.differences.salts_scores


def refuse_incapable(model: ServedModel, path: str, name: str, asked: str) -> None:
    """`path`: of the engine; `asked`: the client's, which is another one where its API is translated.

    Raises:
        ApiError: 400, the Model cannot do it; the message names what it can do.
    """
    if model.external is not None and path not in model.external.endpoints:
        paths = ", ".join(sorted(model.external.endpoints))
        text = f"The model `{name}` does not serve {asked} where this request goes: use {paths}."
        raise ApiError(400, text, "wrong_endpoint", param="model")
    need = NEEDS.get(path)
    if need is None or can(model, need):
        return
    able = abilities(model)
    paths = ", ".join(path for path, needed in NEEDS.items() if needed in able)
    what = f"it can {' and '.join(able)}: use {paths}" if paths else "no endpoint here is for it"
    kind = "model" if model.adapter is None else "adapter"
    raise ApiError(400, f"The {kind} `{name}` does not serve {asked}; {what}.", "wrong_endpoint", param="model")


def refuse_begun_answer(model: ServedModel, fields: Mapping[str, Any]) -> None:
    """Of a chat that was translated from another API.

    Raises:
        ApiError: 400, it begins the answer, and goes to an external target. OpenAI's API has no words for that:
            providers refuse the field of engines, or ignore it and begin anew, and the client joins the two texts.
    """
    if model.external is None or not fields.get("continue_final_message"):
        return
    text = "`messages`: an answer that has begun cannot be continued where this request goes."
    raise ApiError(400, f"{text} The last message must not be the assistant's.", "unsupported_field", param="messages")
