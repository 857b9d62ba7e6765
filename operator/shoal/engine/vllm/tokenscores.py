"""/v1/score of a Model that generates, on vLLM: as completions of one token, with the probabilities of the labels.

vLLM's /v1/score is for rerankers, and its /generative_scoring tells of the first label only and cuts what is longer
than the context. A completion says all labels of every item, refuses what is too long, and takes a `cache_salt`.
"""

import math
from collections.abc import Mapping
from typing import Any, Final, cast

import orjson

from shoal.core.fields.pairs import pairs_of
from shoal.core.fields.table import SCORE
from shoal.engine.wire import AnswerGarbled, EngineCall, Ranking

MOST_BYTES: Final = 4 * 2**20
"""Of all prompts of a request, each with the query."""
MOST_LABELS: Final = 20
"""Its --max-logprobs, where nothing else is said."""
_OPTIONS: Final = ("apply_softmax", "temperature", "return_token_logprobs")
_MARK: Final = b',"label_token_ids":'
_PLACEHOLDER: Final = "token_id:"


def few_labels(value: Any) -> bool:
    """Whether vLLM tells the probabilities of so many."""
    return len(value) <= MOST_LABELS


def options(fields: Mapping[str, Any]) -> bytes | None:
    """What the answer is made by, as `Wire.added`; None: vLLM does not do it."""
    labels = fields["label_token_ids"]
    if not few_labels(labels):
        return None
    asked = {"label_token_ids": labels, **{name: v for name in _OPTIONS if (v := fields.get(name)) is not None}}
    return b"," + orjson.dumps(asked)[1:-1]


def asked(call: EngineCall) -> bool:
    """Whether a call is one for the tokens of labels."""
    return call.endpoint == SCORE and call.added.startswith(_MARK)


def encode(body: bytes, call: EngineCall) -> bytes:
    """The completion for a score. Its prompts are the query with each item, as SGLang joins them."""
    fields = cast(dict[str, Any], orjson.loads(body))
    query, items = pairs_of(fields)
    if query is None:
        prompts = items
    elif fields.get("item_first"):
        prompts = [item + query for item in items]
    else:
        prompts = [query + item for item in items]
    salt = fields.get("cache_salt")
    return orjson.dumps(
        {
            "model": call.adapter or call.model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "logprob_token_ids": _options(call)["label_token_ids"],
            "return_tokens_as_token_ids": True,
            **({} if salt is None else {"cache_salt": salt}),
        }
    )


def scored(answer: Mapping[str, Any], call: EngineCall, ranking: Ranking) -> dict[str, Any]:
    """The answer of /v1/score. Raises AnswerGarbled, also where it does not tell of each item."""
    wanted = _options(call)
    names = [f"{_PLACEHOLDER}{label}" for label in wanted["label_token_ids"]]
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        rows = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
        logs = [[float(row[name]) for name in names] for row in rows]
    except (KeyError, IndexError, TypeError, ValueError):
        raise AnswerGarbled("The engine's answer has no probabilities of the labels.") from None
    ranking.complete(choice["index"] for choice in choices)
    soft, temperature = bool(wanted.get("apply_softmax")), float(wanted.get("temperature") or 1)
    return {
        "scores": [_softmax(row, temperature) if soft else [math.exp(log) for log in row] for row in logs],
        "token_logprobs": logs if wanted.get("return_token_logprobs") else None,
        "model": ranking.model_name,
        "object": "scoring",
    }


def _softmax(logs: list[float], temperature: float) -> list[float]:
    most = max(logs)
    weights = [math.exp((log - most) / temperature) for log in logs]
    return [weight / sum(weights) for weight in weights]


def _options(call: EngineCall) -> dict[str, Any]:
    return orjson.loads(b"{" + call.added[1:] + b"}")
