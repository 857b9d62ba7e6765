"""A whole answer of an engine: where its token counts are, and what the client gets of it."""

from typing import Any, Final, NamedTuple, cast

import orjson

from shoal.core.fields.table import EMBEDDINGS, RERANK, TOKENIZING
from shoal.gateway import sse
from shoal.gateway.prepared import Prepared
from shoal.net.errors import ApiError


class WholeAnswer(NamedTuple):
    body: bytes
    """For the client."""
    usage: bytes | None
    """The engine's usage block; None: it reported none, and the estimate stays."""


_NOTHING: Final = b'{"prompt_tokens":0,"completion_tokens":0}'


def read(prepared: Prepared, body: bytes) -> WholeAnswer:
    """Reads an answer with status 200.

    Raises:
        ApiError: 502, it is not an answer of this endpoint.
    """
    if prepared.path == RERANK:
        return _ranked(prepared, body)
    if prepared.path in TOKENIZING:
        return WholeAnswer(body, _NOTHING)
    rewrite = prepared.rewriter.rewrite_any if prepared.path == EMBEDDINGS else prepared.rewriter.rewrite
    span = sse.find_usage(body)
    return WholeAnswer(rewrite(body), None if span is None else body[span[0] : span[1]])


def _ranked(prepared: Prepared, body: bytes) -> WholeAnswer:
    """SGLang's list of documents, the best first, as the object that clients of Cohere, Jina and vLLM read. The list
    has no usage: each document has the prompt tokens of its pair."""
    try:
        decoded: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        decoded = None
    if not isinstance(decoded, list) or not all(isinstance(item, dict) for item in cast(list[object], decoded)):
        raise ApiError(502, "The engine's answer is no ranked list.", "bad_answer")
    results: list[dict[str, Any]] = []
    total: int | None = 0
    for item in cast(list[dict[str, Any]], decoded):
        tokens = _tokens(item.get("meta_info"))
        total = None if total is None or tokens is None else total + tokens
        result: dict[str, Any] = {"index": item.get("index"), "relevance_score": item.get("score")}
        if (text := item.get("document")) is not None:
            result["document"] = {"text": text}
        results.append(result)
    answer: dict[str, Any] = {"object": "list", "model": prepared.model_name, "results": results[: prepared.top_n]}
    if total is None:
        return WholeAnswer(orjson.dumps(answer), None)
    answer["usage"] = {"prompt_tokens": total, "total_tokens": total}
    return WholeAnswer(orjson.dumps(answer), orjson.dumps({"prompt_tokens": total, "completion_tokens": 0}))


def _tokens(meta: object) -> int | None:
    found = cast(dict[str, object], meta).get("prompt_tokens") if isinstance(meta, dict) else None
    return found if type(found) is int and found >= 0 else None
