"""A whole answer of an engine: where its token counts are, and what the client gets of it."""

from typing import Final, NamedTuple

import orjson

from shoal.core.fields.table import EMBEDDINGS, TOKENIZING
from shoal.engine.wire import AnswerGarbled, EngineCall, Ranking, Rewriter, Wire
from shoal.gateway import sse
from shoal.gateway.prepared import Prepared
from shoal.net.errors import ApiError


class WholeAnswer(NamedTuple):
    body: bytes
    """For the client."""
    usage: bytes | None
    """The engine's usage block; None: it reported none, and the estimate stays."""


_NOTHING: Final = b'{"prompt_tokens":0,"completion_tokens":0}'


def read(prepared: Prepared, wire: Wire, call: EngineCall, rewriter: Rewriter, body: bytes) -> WholeAnswer:
    """Reads an answer with status 200.

    Raises:
        ApiError: 502, it is not an answer of this endpoint.
        NotHere: it is an answer of another model.
    """
    if prepared.path in wire.reshaped:
        return _reshaped(prepared, wire, call, body)
    if prepared.path in TOKENIZING:
        return WholeAnswer(body, _NOTHING)
    rewrite = rewriter.rewrite_any if prepared.path == EMBEDDINGS else rewriter.rewrite
    span = sse.find_usage(body)
    return WholeAnswer(rewrite(body), None if span is None else body[span[0] : span[1]])


def _reshaped(prepared: Prepared, wire: Wire, call: EngineCall, body: bytes) -> WholeAnswer:
    try:
        decoded: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        decoded = None
    ranking = Ranking(prepared.model_name, prepared.top_n, prepared.documents)
    try:
        answer, tokens = wire.reshape(call, decoded, ranking)
    except AnswerGarbled as garbled:
        raise ApiError(502, str(garbled), "bad_answer") from None
    if prepared.path in TOKENIZING:
        return WholeAnswer(orjson.dumps(answer), _NOTHING)
    if tokens is None:
        return WholeAnswer(orjson.dumps(answer), None)
    answer["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return WholeAnswer(orjson.dumps(answer), orjson.dumps({"prompt_tokens": tokens, "completion_tokens": 0}))
