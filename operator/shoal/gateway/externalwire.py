"""What an OpenAI-compatible API outside of this cluster is sent, and what its answers mean."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, cast

import orjson

from shoal.core.enginedifferences import NONE, EngineDifferences
from shoal.core.fields.check import FORWARDED
from shoal.core.routing.external import cause_of
from shoal.engine.wire import AnswerGarbled, EngineCall, NotHere, Ranking, ReadAcceptedDrafts, Rewriter
from shoal.gateway.body import Parsed
from shoal.net.errors import ApiError

DECLINED: Final = "declined"
"""Reason of a retry: the target declines the request, for a reason that may be in the request."""
_MODEL_FIELD: Final = re.compile(rb'"model":\s*"(?:[^"\\]|\\.)*"')
_BYTES_PER_TOKEN: Final = 4
_NOTHING: Final[Mapping[str, frozenset[str]]] = MappingProxyType({})
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal", "text")


def external_body(parsed: Parsed, endpoint: str, model: str, *, translated: bool) -> bytes:
    """The body for an external target: the client's own fields that the table knows, and nothing of the gateway's.
    `translated`: it is that of another API, as a chat completion.

    Raises:
        ApiError: 400, it is nested too deeply to be encoded again.
    """
    forwarded = FORWARDED[endpoint]
    body: dict[str, Any] = {"model": model}
    body |= {name: value for name, value in parsed.fields.items() if name in forwarded and value is not None}
    body["model"] = model
    if translated:
        # The translation's, for engines; OpenAI's API refuses both.
        body.pop("chat_template_kwargs", None)
        for message in body.get("messages") or ():
            message.pop("reasoning_content", None)
    if parsed.stream:
        body["stream_options"] = {"include_usage": True}
    else:
        body.pop("stream_options", None)
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        raise ApiError(400, "The body is nested too deeply.", "invalid_json") from None


def native_body(fields: Mapping[str, Any], model: str) -> bytes:
    """The body for an external target that serves the client's API itself.

    Raises:
        ApiError: 400, it is nested too deeply to be encoded again.
    """
    try:
        return orjson.dumps({"model": model, **fields})
    except orjson.JSONEncodeError:
        raise ApiError(400, "The body is nested too deeply.", "invalid_json") from None


class ExternalRewriter:
    """Puts the client's name of the model into the answer, and estimates its tokens from its text, in case it reports
    none.

    Editing bytes is safe because inside a JSON string every quote is escaped, so `"model":` can only be a key.
    """

    __slots__ = ("_new", "_stream", "_text")

    def __init__(self, model_name: str, *, stream: bool) -> None:
        self._new = b'"model":' + orjson.dumps(model_name)
        self._stream = stream
        self._text = 0

    @property
    def same(self) -> bool:
        return False

    @property
    def tokens(self) -> int:
        """Estimated tokens of the answer so far."""
        return -(-self._text // _BYTES_PER_TOKEN)

    def rewrite(self, data: bytes) -> bytes:
        if self._stream:
            # An event has at least one token, in an envelope of a size that nobody knows.
            self._text += _BYTES_PER_TOKEN
        else:
            self._text += _text_of(data)
        return self._named(data)

    def rewrite_any(self, data: bytes) -> bytes:
        if not data.lstrip().startswith(b"{"):
            raise NotHere("lost")
        return self._named(data)

    def _named(self, data: bytes) -> bytes:
        return _MODEL_FIELD.sub(lambda _: self._new, data, count=1)


def _text_of(answer: bytes) -> int:
    """Bytes of text in a whole answer. Raises NotHere: it is no answer, but the page of a proxy, perhaps."""
    try:
        decoded: Any = orjson.loads(answer)
    except orjson.JSONDecodeError:
        raise NotHere("lost") from None
    if not isinstance(decoded, dict):
        raise NotHere("lost")
    choices: Any = cast(dict[str, Any], decoded).get("choices")
    total = 0
    for choice in cast(list[Any], choices) if isinstance(choices, list) else ():
        inner: Any = cast(dict[str, Any], choice).get("message", choice) if isinstance(choice, dict) else None
        if isinstance(inner, dict):
            texts = (cast(dict[str, Any], inner).get(name) for name in _TEXTS)
            total += sum(len(text.encode(errors="surrogatepass")) for text in texts if isinstance(text, str))
    return total


class ExternalWire:
    """A `Wire` for one request. Its errors before the first byte say that a fallback may answer."""

    type: str = "External"
    provider: str = "openai"
    ready_path: str = "/"
    aborts: bool = False
    differences: EngineDifferences = NONE
    salted: frozenset[str] = frozenset()
    special: Mapping[str, frozenset[str]] = _NOTHING
    reshaped: frozenset[str] = frozenset()

    def __init__(self, *, stream: bool, token: str | None = None) -> None:
        """`token`: the key that is sent."""
        self._stream, self._token = stream, token

    @property
    def paths(self) -> Mapping[str, str]:
        return {}

    def added(self, endpoint: str, fields: Mapping[str, Any]) -> bytes | None:
        return b""

    def path(self, call: EngineCall) -> str:
        return call.endpoint

    def encode(self, body: bytes, call: EngineCall) -> bytes:
        return body

    def sent_id(self, call: EngineCall) -> bytes | None:
        return None

    def rewriter(self, call: EngineCall, model_name: str) -> Rewriter:
        return ExternalRewriter(model_name, stream=self._stream)

    def accepted_drafts(self, call: EngineCall) -> ReadAcceptedDrafts | None:
        return None

    def elsewhere(self, status: int, error: bytes, adapter: bool) -> str | None:
        cause = cause_of(status)
        return None if cause == "request" else "unavailable" if cause == "target" else DECLINED

    def plain_error(self, error: bytes) -> bytes:
        # Some repeat what they were sent.
        return b"" if self._token is not None and self._token.encode() in error else error

    def reshape(self, call: EngineCall, answer: object, ranking: Ranking) -> tuple[dict[str, Any], int | None]:
        raise AnswerGarbled("an external target's answer is passed on as it is")
