"""Requests that end or stall SGLang 0.5.23 for everybody: the simulator does as the engine does.

A gateway lets none of them through (`core/fields/table.py`).
"""

import json
from collections.abc import Iterable
from typing import Any, Final, Literal, cast

from shoal.core.fields.patterns import pattern_problem
from shoal.core.fields.schemas import CIRCULAR, reference_problem
from shoal_dev.sim import protocol as p

_GREEDY: Final = 1e-6
"""Temperatures below it take the likeliest token."""


def consequence(
    request: p.ChatRequest | p.CompletionRequest, vocabulary: int | None
) -> Literal["dies", "stalls"] | None:
    """What becomes of an engine with so many tokens; None: nothing."""
    if vocabulary is not None:
        if _outside(_given(request), vocabulary):
            return "dies"
        if request.min_tokens > 0 and _outside(request.stop_token_ids or (), vocabulary):
            return "dies"
        asked = request.top_logprobs if isinstance(request, p.ChatRequest) else request.logprobs
        if request.logprobs and (asked or 0) > vocabulary:
            return "dies"
    # Where no token is left its step samples from what is not a number. Only a step that filters by probability looks.
    if _filters(request) and (_circular(request) or (request.min_tokens > 0 and _schema_or_regex(request))):
        return "dies"
    patterns = [request.stop_regex] if isinstance(request.stop_regex, str) else request.stop_regex or []
    # It searches by backtracking after each token, so it is lost where a text can be cut in many ways.
    if any(
        (found := pattern_problem(each, "")) is not None and found.code == "pattern_not_linear" for each in patterns
    ):
        return "stalls"
    return None


def _filters(request: p.ChatRequest | p.CompletionRequest) -> bool:
    """As it is in one request; in the engine another one of the same step is enough."""
    if request.temperature is not None and request.temperature < _GREEDY:
        return False
    return (request.top_p or 1) < 1 or (request.top_k or -1) > 0 or (request.min_p or 0) > 0


def _schema_or_regex(request: p.ChatRequest | p.CompletionRequest) -> bool:
    """Nearly: the engine dies when such a grammar has come to its end too early."""
    return request.regex is not None or _schema(request) is not None


def _circular(request: p.ChatRequest | p.CompletionRequest) -> bool:
    schema = _schema(request)
    return schema is not None and (found := reference_problem(schema, "")) is not None and found.code == CIRCULAR


def _schema(request: p.ChatRequest | p.CompletionRequest) -> dict[str, Any] | None:
    wanted: Any = (request.response_format or {}).get("json_schema")
    found: Any = cast(dict[str, Any], wanted).get("schema") if isinstance(wanted, dict) else None
    if isinstance(request, p.CompletionRequest) and request.json_schema is not None:
        try:
            found = json.loads(request.json_schema)
        except ValueError:
            return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def _given(request: p.ChatRequest | p.CompletionRequest) -> list[int]:
    """Tokens that the client itself named."""
    if isinstance(request, p.ChatRequest) or isinstance(request.prompt, str):
        return []
    found: list[int] = []
    for item in request.prompt:
        if isinstance(item, int):
            found.append(item)
        elif isinstance(item, list):
            found += item
    return found


def _outside(tokens: Iterable[int], vocabulary: int) -> bool:
    return any(not 0 <= token < vocabulary for token in tokens)
