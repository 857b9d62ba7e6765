"""A whole answer of an engine: where its token counts are, and what the client gets of it."""

import re
from typing import Final, NamedTuple, cast

import orjson

from shoal.core.fields.table import CLASSIFY, EMBEDDINGS, GENERATING, TOKENIZING, TRANSCRIBE
from shoal.core.nativeapi import NativeApi
from shoal.core.transcripts import usage_of
from shoal.core.translation import UnreadableAnswer
from shoal.engine.wire import AnswerGarbled, EngineCall, NotHere, Ranking, Rewriter, Wire, check_results
from shoal.gateway import sse
from shoal.gateway.prepared import Prepared
from shoal.net.errors import ApiError


class WholeAnswer(NamedTuple):
    body: bytes
    """For the client."""
    usage: bytes | None
    """The engine's usage block; None: it reported none, and the estimate stays."""
    content_type: bytes = b"application/json"
    logged: bytes | None = None
    """What the request log gets of it; None: nothing."""
    estimate: int | None = None
    """Tokens of the answer by its length, if its usage may be none that can be believed."""


_A_RESULT_EACH: Final = frozenset({EMBEDDINGS, CLASSIFY})
"""Each text of the request has a result, with its index."""
_INDEX: Final = re.compile(rb'"index": ?(-?\d{1,9})')
"""Within a string each quote is escaped, so this can only be a field."""
_NOTHING: Final = b'{"prompt_tokens":0,"completion_tokens":0}'


def read(
    prepared: Prepared, wire: Wire, call: EngineCall, rewriter: Rewriter, body: bytes, content_type: bytes
) -> WholeAnswer:
    """Reads an answer with status 200.

    Raises:
        ApiError: 502, it is not an answer of this endpoint.
        NotHere: it is an answer of another model.
    """
    if prepared.native is not None:
        return _native(prepared, prepared.native, body)
    if prepared.path in wire.reshaped:
        return _reshaped(prepared, wire, call, body)
    if prepared.path in TOKENIZING:
        return WholeAnswer(body, _NOTHING)
    if prepared.path == TRANSCRIBE:
        return _transcribed(body, content_type, plain=prepared.plain)
    if prepared.path in _A_RESULT_EACH and prepared.model.external is None:
        _check_results(body, prepared.texts)
    rewrite = rewriter.rewrite_any if prepared.path == EMBEDDINGS else rewriter.rewrite
    span = sse.find_usage(body)
    out = rewrite(body)
    logged = out if prepared.path in GENERATING else None
    return WholeAnswer(out, None if span is None else body[span[0] : span[1]], logged=logged)


def _check_results(body: bytes, texts: int) -> None:
    """Raises ApiError where an answer does not have one result for each text. It is not decoded: embeddings have
    megabytes of numbers."""
    try:
        check_results((int(index) for index in _INDEX.findall(body)), texts)
    except AnswerGarbled as garbled:
        raise ApiError(502, str(garbled), "bad_answer") from None


def _native(prepared: Prepared, api: NativeApi, body: bytes) -> WholeAnswer:
    """An answer of an API that an external target serves itself."""
    try:
        decoded: object = orjson.loads(body)
        if not isinstance(decoded, dict):
            raise NotHere("lost")
        answer = api.answer(cast(dict[str, object], decoded), prepared.model_name)
        out = orjson.dumps(answer.body)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        raise NotHere("lost") from None
    logged = {"choices": [{"index": 0, "text": answer.text, "finish_reason": answer.finish}]}
    usage = None if answer.usage is None else orjson.dumps(answer.usage)
    return WholeAnswer(out, usage, logged=orjson.dumps(logged), estimate=estimated_tokens(answer.text))


def translated(prepared: Prepared, answer: bytes, id: str) -> bytes:
    """The answer in the client's API, of one that was read; `id` is the request's.

    Raises:
        ApiError: 502, the engine's answer is none.
        NotHere: an external target's is none.
    """
    if prepared.dialect is None:
        return answer
    try:
        decoded: object = orjson.loads(answer)
        if not isinstance(decoded, dict):
            raise UnreadableAnswer
        return orjson.dumps(prepared.dialect.answer(cast(dict[str, object], decoded), id))
    except (UnreadableAnswer, orjson.JSONDecodeError, orjson.JSONEncodeError):
        if prepared.model.external is not None:
            raise NotHere("lost") from None
        raise ApiError(502, "The engine's answer does not have the shape of its API.", "bad_answer") from None


_BYTES_PER_TOKEN: Final = 4


def estimated_tokens(text: str) -> int:
    """Tokens of a text by its length."""
    return -(-len(text.encode(errors="surrogatepass")) // _BYTES_PER_TOKEN)


_NO_BLOCK: Final = b"{}"
_TEXT: Final = b"text/plain; charset=utf-8"


def _transcribed(body: bytes, content_type: bytes, *, plain: bool) -> WholeAnswer:
    """A transcript as JSON, or as a text without any usage: then the length counts that was measured in the file.
    `plain`: the client wants the text alone, which vLLM puts into JSON all the same."""
    if not content_type.startswith(b"application/json"):
        text = body.decode("utf-8", "replace")
        return WholeAnswer(body, _NO_BLOCK, _TEXT, _choice(text))
    try:
        decoded: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        decoded = None
    answer = cast(dict[str, object], decoded) if isinstance(decoded, dict) else {}
    text = answer.get("text")
    if not isinstance(text, str):
        raise ApiError(502, "The engine's answer is no transcript.", "bad_answer")
    usage = usage_of(answer)
    block = _NO_BLOCK if usage is None else orjson.dumps(usage)
    if plain:
        return WholeAnswer(text.encode("utf-8", "replace"), block, _TEXT, _choice(text))
    if usage is not None and usage is not answer.get("usage"):
        body = orjson.dumps(answer | {"usage": usage})
    return WholeAnswer(body, block, logged=_choice(text))


def _choice(text: str) -> bytes:
    return orjson.dumps({"choices": [{"index": 0, "text": text}]})


def _reshaped(prepared: Prepared, wire: Wire, call: EngineCall, body: bytes) -> WholeAnswer:
    try:
        decoded: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        decoded = None
    ranking = Ranking(prepared.model_name, prepared.top_n, prepared.documents, prepared.texts)
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
