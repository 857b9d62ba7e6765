"""APIs that no engine speaks well enough and that the gateway translates: which endpoint of the engine serves each, and
how requests, answers and errors change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from shoal.core import anthropic, responses
from shoal.core.anthropic import native as anthropic_native
from shoal.core.fields.table import CHAT, TOKENIZE
from shoal.core.nativeapi import NativeApi
from shoal.core.responses import native as responses_native
from shoal.core.translation import Json, Names, StreamFailure
from shoal.net.errors import ApiError

MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"
RESPONSES: Final = "/v1/responses"


class AnswerEvents(Protocol):
    """The events of one streamed answer."""

    def held_after(self, more: int) -> int:
        """Bytes of the answer that are kept in memory until its end, after so many more of the engine's."""
        ...

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        """What becomes of a chunk of a chat completion."""
        ...

    def end(self) -> bytes:
        """The last events, once the engine has said that the stream is complete."""
        ...

    def error(self, failure: StreamFailure) -> bytes:
        """The last events instead, of a stream that failed."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One translated endpoint. The texts of errors name fields of its own requests."""

    engine_path: str
    request: Callable[[Mapping[str, Any]], Json]
    """The engine's request. Raises NotTranslatable."""
    answer: Callable[[Mapping[str, Any], str], Json]
    """The client's answer, from the engine's and the request's id. Raises UnreadableAnswer."""
    events: Callable[[str, str], AnswerEvents]
    """From the request's id, and the name of the model that the client used."""
    error: Callable[[ApiError, str], bytes]
    """The body of an error; with the request's id."""
    native: NativeApi | None = None
    """How external targets are asked that serve it themselves; None: it is none that they may serve."""
    names: Names = ()
    """What the client calls the fields of the engine's request."""
    kept_tools: Callable[[Mapping[str, Any]], Sequence[int]] = lambda _: ()
    """Where the tools of the engine's request are in the list of the client's. For a body that `request` takes."""
    id_header: bytes = b""
    """The header in which its SDKs look for the request's id; empty: they read `x-request-id`."""


def _anthropic_error(error: ApiError, id: str) -> bytes:
    return orjson.dumps(anthropic.error(error.status, error.message, id))


def _openai_error(error: ApiError, _id: str) -> bytes:
    return error.body()


DIALECTS: Final[Mapping[str, Dialect]] = {
    MESSAGES: Dialect(
        CHAT,
        anthropic.chat_request,
        anthropic.message,
        anthropic.MessageEvents,
        _anthropic_error,
        NativeApi(
            MESSAGES,
            "anthropic",
            "max_tokens",
            anthropic_native.native_request,
            anthropic_native.native_answer,
            anthropic_native.NativeMessageEvents,
            anthropic_native.native_turns,
        ),
        anthropic.NAMES,
        anthropic.kept_tools,
        b"request-id",
    ),
    COUNT_TOKENS: Dialect(
        TOKENIZE,
        anthropic.count_request,
        anthropic.token_count,
        anthropic.MessageEvents,
        _anthropic_error,
        NativeApi(
            MESSAGES,
            "anthropic",
            "max_tokens",
            anthropic_native.native_count_request,
            anthropic_native.native_count,
            anthropic_native.NativeMessageEvents,
            anthropic_native.native_turns,
        ),
        anthropic.NAMES,
        anthropic.kept_tools,
        b"request-id",
    ),
    RESPONSES: Dialect(
        CHAT,
        responses.chat_request,
        responses.whole,
        responses.ResponseEvents,
        _openai_error,
        NativeApi(
            RESPONSES,
            "openai",
            "max_output_tokens",
            responses_native.native_request,
            responses_native.native_answer,
            responses_native.NativeResponseEvents,
            responses_native.native_turns,
        ),
        responses.NAMES,
        responses.kept_tools,
    ),
}
"""By the client's path."""


_BELOW_MESSAGES: Final = f"{MESSAGES}/"


def dialect_of_errors(path: str) -> Dialect | None:
    """The API whose shape errors have: also of a path below Anthropic's that is not served; None: OpenAI's."""
    found = DIALECTS.get(path)
    return DIALECTS[MESSAGES] if found is None and path.startswith(_BELOW_MESSAGES) else found
